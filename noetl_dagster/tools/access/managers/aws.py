"""Secrets of AWS: Secrets Manager, and parameters of Systems Manager.

Clients come from ``dagster-aws``. Keys, profile, role and endpoint come from the AWS environment, as boto3 reads it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from botocore import exceptions
from dagster import BetaWarning
from dagster_aws.secretsmanager import SecretsManagerResource
from dagster_aws.ssm import SSMResource

from noetl_dagster.errors import CredentialError
from noetl_dagster.settings import Settings

CLIENTS = 16  # that a process keeps
ATTEMPTS = 2  # of a request; callers have their own retry policy

_MISSING = {"ResourceNotFoundException", "ParameterNotFound", "ParameterVersionNotFound"}
_DENIED = {"AccessDeniedException", "AccessDenied", "UnauthorizedOperation"}
_REJECTED = {
    "ExpiredToken",
    "ExpiredTokenException",
    "IncompleteSignature",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "MissingAuthenticationToken",
    "UnrecognizedClientException",
}


def secret(name: str, where: str, settings: Settings) -> str:
    """Returns the current version of a secret.

    Args:
        name: name or ARN; the region of an ARN overrides the environment's.
        where: the secret and its provider, for messages.

    Raises:
        CredentialError: there is none, it may not be read, or the AWS environment is not complete.
    """
    with _errors(where, "secretsmanager:GetSecretValue"):
        response = _client(SecretsManagerResource, name).get_secret_value(SecretId=name)
    if "SecretString" in response:
        return str(response["SecretString"])
    try:
        return str(response["SecretBinary"].decode())
    except UnicodeDecodeError:
        raise CredentialError(f"{where} is binary; only text can be used") from None


def parameter(name: str, where: str, settings: Settings) -> str:
    """Returns a parameter, decrypted; ``name:3`` is its third version. Otherwise as :func:`secret`."""
    with _errors(where, "ssm:GetParameter"):
        client = _client(SSMResource, name)
        return str(client.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"])


def _client(resource: Any, name: str) -> Any:
    """Returns boto3's client for the region of a name, else of the environment."""
    parts = name.split(":")
    region = parts[3] if parts[0] == "arn" and len(parts) > 3 else ""
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    # boto3 reads the second only, where containers of AWS have the first
    region = region or environment.get("AWS_DEFAULT_REGION") or environment.get("AWS_REGION") or ""
    return _cached_client(resource, region, frozenset(environment.items()))


@lru_cache(maxsize=CLIENTS)
def _cached_client(resource: Any, region: str, environment: frozenset[tuple[str, str]]) -> Any:
    """Returns the client, which reads ``environment`` itself; a changed environment makes another client."""
    # Dagster's warning, which readers of a playbook's log cannot act on
    warnings.filterwarnings("ignore", f"Class `{resource.__name__}` is currently in beta", BetaWarning)
    return resource(region_name=region or None, max_attempts=ATTEMPTS).get_client()


@contextmanager
def _errors(where: str, action: str) -> Iterator[None]:
    """Adds the secret's name and a remedy to errors."""
    try:
        yield
    except exceptions.ClientError as error:
        raise _refused(where, action, error.response) from None
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError):
        raise CredentialError(
            f"{where}: no AWS credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role"
        ) from None
    except exceptions.NoRegionError:
        raise CredentialError(f"{where}: no AWS region; set AWS_DEFAULT_REGION") from None
    except (exceptions.HTTPClientError, exceptions.ConnectionError) as error:
        raise CredentialError(
            f"{where}: AWS cannot be reached ({type(error).__name__}); check the network and AWS_ENDPOINT_URL",
            retryable=True,
        ) from None
    except exceptions.BotoCoreError as error:
        raise CredentialError(f"{where}: {type(error).__name__}: {error}; check the AWS_* variables") from None


def _refused(where: str, action: str, response: Any) -> CredentialError:
    code = str(response.get("Error", {}).get("Code", ""))
    if code in _MISSING:
        return CredentialError(f"{where} is not found; create it, or check name, account and region")
    if code in _DENIED:
        return CredentialError(f"{where} may not be read; allow {action} (and kms:Decrypt of its key)")
    if code in _REJECTED:
        return CredentialError(f"{where}: AWS does not accept the credentials ({code}); renew them")
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    retryable = status >= 500 or "Throttl" in code or code == "TooManyRequestsException"
    message = response.get("Error", {}).get("Message", "")
    return CredentialError(f"{where}: AWS refuses with {code}: {message}", retryable=retryable)
