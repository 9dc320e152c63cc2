"""AWS as Dagster's own library reaches it: the one door to ``dagster-aws``, which is loaded when it is asked for.

What a resource is not given comes from the AWS environment, as boto3 reads it: keys, profile, role, endpoint.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

CLIENTS = 8
"""Clients that a process keeps of each service."""

ATTEMPTS = 2
"""Of a request. Whoever asks has a policy of retries of its own."""


def secrets_manager(region: str | None = None) -> Any:
    """boto3's client of Secrets Manager, by ``SecretsManagerResource``.

    Args:
        region: None: the environment's.

    Raises:
        botocore.exceptions.BotoCoreError: the environment names no region, or a profile that is not there.
    """
    return _kept(_secrets_manager, region)


def parameter_store(region: str | None = None) -> Any:
    """boto3's client of Systems Manager's parameters, by ``SSMResource``; else as :func:`secrets_manager`."""
    return _kept(_parameter_store, region)


def compute_logs(folder: str, *, bucket: str, prefix: str, s3: Mapping[str, Any]) -> Any:
    """dagster-aws's ``S3ComputeLogManager``, which reads with a client of ``S3Resource``.

    Args:
        folder: where it keeps what it has read.
        s3: fields of the resource.
    """
    from dagster_aws.s3 import S3ComputeLogManager, S3Resource

    manager = S3ComputeLogManager(bucket, folder, prefix=prefix, endpoint_url=s3.get("endpoint_url"))
    manager._s3_session = S3Resource(**s3).get_client()  # its own has no keys but those of the environment
    return manager


def _kept(make: Callable[[str | None, frozenset[tuple[str, str]]], Any], region: str | None) -> Any:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    # boto3 reads the second only, where containers of AWS have the first
    own = environment.get("AWS_DEFAULT_REGION") or environment.get("AWS_REGION")
    return make(region or own, frozenset(environment.items()))


@lru_cache(maxsize=CLIENTS)
def _secrets_manager(region: str | None, environment: frozenset[tuple[str, str]]) -> Any:
    """``environment`` is what the client finds by itself; another one makes another client."""
    from dagster_aws.secretsmanager import SecretsManagerResource

    _accept_beta("SecretsManagerResource")
    return SecretsManagerResource(region_name=region, max_attempts=ATTEMPTS).get_client()


@lru_cache(maxsize=CLIENTS)
def _parameter_store(region: str | None, environment: frozenset[tuple[str, str]]) -> Any:
    from dagster_aws.ssm import SSMResource

    _accept_beta("SSMResource")
    return SSMResource(region_name=region, max_attempts=ATTEMPTS).get_client()


def _accept_beta(name: str) -> None:
    """Who reads a playbook's log cannot do anything about Dagster's warning."""
    from dagster import BetaWarning

    warnings.filterwarnings("ignore", f"Class `{name}` is currently in beta", BetaWarning)
