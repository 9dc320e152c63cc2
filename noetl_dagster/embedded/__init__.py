"""Embedded services: PostgreSQL, NATS and S3 from the package index, started on first use.

All processes of a project share them through the state folder (``Settings.home``). They listen on 127.0.0.1
only, outlive the process that started them, and keep their ports and data across restarts.

Gives addresses of running servers, as ``Settings``, to whoever starts. Stands on the ground floor.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from pydantic import SecretStr

from noetl_dagster.embedded import supervisor
from noetl_dagster.embedded.dagster_home import dagster_home, run_server_folder
from noetl_dagster.embedded.postgres import Postgres
from noetl_dagster.embedded.state import ServiceName, ServiceRecord
from noetl_dagster.embedded.supervisor import ServiceStatus
from noetl_dagster.settings import Settings

__all__ = [
    "ServiceName",
    "ServiceStatus",
    "dagster_home",
    "demo_environment",
    "down",
    "ensure",
    "environment",
    "records_api_url",
    "run_server_folder",
    "status",
    "up",
]


def ensure(settings: Settings, only: Collection[str] | None = None) -> Settings:
    """Starts the services whose addresses the settings leave empty, and fills the addresses in.

    Cheap when they run already (a few milliseconds), so every process calls it at its start.

    Args:
        only: names of the services that are needed; default: all but the records API.

    Returns:
        A copy with ``db_url``, ``dagster_db_url``, ``nats_url`` and ``minio_endpoint`` filled where they were
        empty, and ``pvc_mount_path`` when the event log is embedded; the same object when nothing is missing
        or ``settings.embedded`` is off.

    Raises:
        ServiceError: a service does not start; the message holds the tail of its log.
    """
    if not settings.embedded:
        return settings
    names = supervisor.names_missing(settings, only)
    if not names:
        return settings
    home = settings.home.resolve()
    found: dict[str, Any] = {}
    for name, record in supervisor.start(settings, names).items():
        found |= _addresses(name, record)
    if "db_url" in found and settings.db_url is None:  # one machine: a folder is a volume that all share
        volume = home / "pvc"
        volume.mkdir(exist_ok=True)
        found["pvc_mount_path"] = volume
    missing = {name: value for name, value in found.items() if getattr(settings, name) is None}
    return settings.model_copy(update={**missing, "home": home})


def up(settings: Settings) -> list[ServiceStatus]:
    """Starts every embedded service that the settings leave to us and tells how all are."""
    ensure(settings)
    return status(settings)


def down(settings: Settings) -> None:
    """Stops every embedded service of the state folder, the records API included. Data stays."""
    supervisor.stop(settings)


def status(settings: Settings) -> list[ServiceStatus]:
    """How every embedded service is; starts none."""
    return supervisor.inspect(settings)


def environment(settings: Settings) -> dict[str, str]:
    """The ``NOETL_*`` variables with which a child process has these settings and uses the same services.

    Holds secret values in clear, as an environment must.
    """
    dumped = settings.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    variables = {}
    for name in dumped:
        value = getattr(settings, name)
        variables[f"NOETL_{name.upper()}"] = _as_variable(value, dumped[name])
    variables["NOETL_HOME"] = str(settings.home.resolve())
    return variables


def demo_environment(settings: Settings) -> dict[str, str]:
    """Credentials with which the example playbooks run on the embedded services, as ``NOETL_*`` variables.

    Starts the records API.
    """
    return {
        "NOETL_DEFAULT_POSTGRES_CREDENTIAL": "embedded",
        "NOETL_CREDENTIAL_RECORDS_API": records_api_url(settings),
    }


def records_api_url(settings: Settings) -> str:
    """Address of the made-up clinical records API, which is started when it does not run."""
    return supervisor.start(settings, [ServiceName.RECORDS_API])[ServiceName.RECORDS_API].url


def _addresses(name: ServiceName, record: ServiceRecord) -> dict[str, str]:
    match name:
        case ServiceName.POSTGRES:
            postgres = Postgres()
            return {
                "db_url": postgres.database_url(record.ports, "noetl"),
                "dagster_db_url": postgres.database_url(record.ports, "dagster"),
            }
        case ServiceName.NATS:
            return {"nats_url": record.url}
        case ServiceName.OBJECT_STORE:
            return {"minio_endpoint": record.url}
        case ServiceName.RECORDS_API:
            return {}


def _as_variable(value: object, dumped: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(dumped, bool):
        return "true" if dumped else "false"
    if isinstance(dumped, (dict, list)):
        return json.dumps(dumped)
    return str(dumped)
