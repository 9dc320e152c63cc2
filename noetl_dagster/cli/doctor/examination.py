"""Everything that the settings name, tried side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from noetl_dagster.cli.doctor.databases import database_checks
from noetl_dagster.cli.doctor.finding import Check, Finding
from noetl_dagster.cli.doctor.programs import program_checks
from noetl_dagster.cli.doctor.secrets import (
    credential_checks,
    hide_secrets,
    opened_credentials,
    provider_checks,
)
from noetl_dagster.cli.doctor.servers import server_checks
from noetl_dagster.cli.doctor.stores import store_checks
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.credentials import Credentials


async def examine(settings: Settings) -> list[tuple[str, Finding]]:
    """What was found of each thing, in a fixed order. No text of it holds a secret."""
    async with opened_credentials(settings) as credentials:
        hide_secrets(credentials, settings)
        checks = [
            *database_checks(settings),
            *server_checks(settings),
            *store_checks(settings),
            *await credential_checks(settings, credentials),
            *provider_checks(settings),
            *program_checks(settings),
        ]
        return await _found(checks, credentials)


async def _found(checks: Sequence[Check], credentials: Credentials) -> list[tuple[str, Finding]]:
    findings = await asyncio.gather(*(check.find() for check in checks))
    return [
        (check.name, replace(one, what=credentials.redact(one.what), remedy=credentials.redact(one.remedy)))
        for check, one in zip(checks, findings, strict=True)
    ]
