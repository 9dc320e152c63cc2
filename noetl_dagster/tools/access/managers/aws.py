"""Secrets of AWS: Secrets Manager, and parameters of Systems Manager.

Clients come from ``dagster-aws``, which only this module imports, on first use. Keys, profile, role and endpoint come
from the AWS environment, as boto3 reads it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from noetl_dagster.errors import CredentialError
from noetl_dagster.settings import Settings

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


def secret(name: str, settings: Settings) -> str:
    """Returns the current version of a secret.

    Args:
        name: name or ARN; the region of an ARN overrides the environment's.

    Raises:
        CredentialError: there is none, it may not be read, or the AWS environment is not complete.
    """
    with _errors(name, "aws", "secretsmanager:GetSecretValue"):
        found = _client(secrets_manager, name).get_secret_value(SecretId=name)
        if "SecretString" in found:
            return str(found["SecretString"])
        return _text(name, found["SecretBinary"])


def parameter(name: str, settings: Settings) -> str:
    """Returns a parameter, decrypted; ``name:3`` is its third version.

    Raises:
        CredentialError: as :func:`secret`.
    """
    with _errors(name, "aws_ssm", "ssm:GetParameter"):
        client = _client(parameter_store, name)
        return str(client.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"])


def _client(make: Callable[[str | None], Any], name: str) -> Any:
    parts = name.split(":")
    return make(parts[3] or None if parts[0] == "arn" and len(parts) > 3 else None)


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CredentialError(f"secret {name!r} of provider 'aws' is binary; only text can be used") from None


@contextmanager
def _errors(name: str, provider: str, action: str) -> Iterator[None]:
    """Adds the secret's name and a remedy to errors."""
    from botocore import exceptions

    what = f"secret {name!r} of provider {provider!r}"
    try:
        yield
    except ImportError:
        raise CredentialError(f"{what} needs dagster-aws; install dagster-aws") from None
    except exceptions.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        raise _refused(what, action, code, error) from None
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError):
        raise CredentialError(
            f"{what}: no AWS credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or a role"
        ) from None
    except exceptions.NoRegionError:
        raise CredentialError(f"{what}: no AWS region; set AWS_DEFAULT_REGION") from None
    except (exceptions.HTTPClientError, exceptions.ConnectionError) as error:
        raise CredentialError(
            f"{what}: AWS cannot be reached ({type(error).__name__}); check the network and AWS_ENDPOINT_URL",
            retryable=True,
        ) from None
    except exceptions.BotoCoreError as error:
        raise CredentialError(f"{what}: {type(error).__name__}: {error}; check the AWS_* variables") from None


def _refused(what: str, action: str, code: str, error: Any) -> CredentialError:
    if code in _MISSING:
        return CredentialError(f"{what} is not found; create it, or check name, account and region")
    if code in _DENIED:
        return CredentialError(f"{what} may not be read; allow {action} (and kms:Decrypt of its key)")
    if code in _REJECTED:
        return CredentialError(f"{what}: AWS does not accept the credentials ({code}); renew them")
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    retryable = status >= 500 or "Throttl" in code or code == "TooManyRequestsException"
    message = str(error.response.get("Error", {}).get("Message", ""))
    return CredentialError(f"{what}: AWS refuses with {code}: {message}", retryable=retryable)


CLIENTS = 8
"""Clients that a process keeps of each service."""

ATTEMPTS = 2
"""Attempts of a request. Callers have their own retry policy."""


def secrets_manager(region: str | None = None) -> Any:
    """Returns boto3's client of Secrets Manager, by ``SecretsManagerResource``.

    Args:
        region: None: the environment's.

    Raises:
        botocore.exceptions.BotoCoreError: the environment names no region, or a missing profile.
    """
    return _cached(_secrets_manager, region)


def parameter_store(region: str | None = None) -> Any:
    """Returns boto3's client of Systems Manager's parameters, by ``SSMResource``; else as :func:`secrets_manager`."""
    return _cached(_parameter_store, region)


def _cached(make: Callable[[str | None, frozenset[tuple[str, str]]], Any], region: str | None) -> Any:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    # boto3 reads the second only, where containers of AWS have the first
    own = environment.get("AWS_DEFAULT_REGION") or environment.get("AWS_REGION")
    return make(region or own, frozenset(environment.items()))


@lru_cache(maxsize=CLIENTS)
def _secrets_manager(region: str | None, environment: frozenset[tuple[str, str]]) -> Any:
    """The client reads ``environment`` itself; a changed environment makes another client."""
    from dagster_aws.secretsmanager import SecretsManagerResource

    _accept_beta("SecretsManagerResource")
    return SecretsManagerResource(region_name=region, max_attempts=ATTEMPTS).get_client()


@lru_cache(maxsize=CLIENTS)
def _parameter_store(region: str | None, environment: frozenset[tuple[str, str]]) -> Any:
    from dagster_aws.ssm import SSMResource

    _accept_beta("SSMResource")
    return SSMResource(region_name=region, max_attempts=ATTEMPTS).get_client()


def _accept_beta(name: str) -> None:
    """Hides Dagster's warning, which readers of a playbook's log cannot act on."""
    from dagster import BetaWarning

    warnings.filterwarnings("ignore", f"Class `{name}` is currently in beta", BetaWarning)
