"""Clients of AWS services through ``dagster-aws``, which this module alone imports, on first use.

Keys, profile, role and endpoint come from the AWS environment, as boto3 reads it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

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
