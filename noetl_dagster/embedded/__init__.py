"""Embedded services: PostgreSQL, NATS and S3 from the package index, started on first use.

All processes of a project share the services through the state folder (``Settings.home``). The services listen on
127.0.0.1 only, outlive the process that started them, and keep their ports and data across restarts.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from pydantic import SecretStr

from noetl_dagster.embedded import supervisor
from noetl_dagster.embedded.dagster_home import dagster_home, run_server_folder
from noetl_dagster.embedded.servers import ServiceName
from noetl_dagster.embedded.supervisor import ServiceStatus, down, status
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
]


def ensure(settings: Settings, only: Collection[str] | None = None) -> Settings:
    """Starts the services that have no address in the settings, and adds their addresses.

    The call takes a few milliseconds if the services are running, so every process makes it when it starts.

    Args:
        only: names of the required services; default: all except the records API.

    Returns:
        A copy in which the missing ones of ``db_url``, ``dagster_db_url``, ``nats_url`` and ``minio_endpoint`` are
        set, and ``pvc_mount_path`` too if the event log is embedded. Returns ``settings`` itself if nothing is missing
        or ``settings.embedded`` is off.

    Raises:
        ServiceError: a service does not start; the message contains the end of its log.
    """
    if not settings.embedded:
        return settings
    names = supervisor.names_missing(settings, only)
    if not names:
        return settings
    home = settings.home.resolve()
    found: dict[str, object] = {**supervisor.start(settings, names)}
    if "db_url" in found and settings.db_url is None:  # on one machine, a folder serves as the shared volume
        volume = home / "pvc"
        volume.mkdir(exist_ok=True)
        found["pvc_mount_path"] = volume
    missing = {name: value for name, value in found.items() if getattr(settings, name, "set") is None}
    return settings.model_copy(update={**missing, "home": home})


def environment(settings: Settings) -> dict[str, str]:
    """Returns the ``NOETL_*`` variables that give a child process the same settings and services.

    Secret values are in clear text, since environment variables have no other form.
    """
    dumped = settings.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    variables = {}
    for name, plain in dumped.items():
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            text = value.get_secret_value()
        elif isinstance(plain, bool | dict | list):
            text = json.dumps(plain)
        else:
            text = str(plain)
        variables[f"NOETL_{name.upper()}"] = text
    variables["NOETL_HOME"] = str(settings.home.resolve())
    return variables


def demo_environment(settings: Settings) -> dict[str, str]:
    """Starts the records API and returns the credentials of the example playbooks, as ``NOETL_*`` variables."""
    return {
        "NOETL_DEFAULT_POSTGRES_CREDENTIAL": "embedded",
        "NOETL_CREDENTIAL_RECORDS_API": records_api_url(settings),
    }


def records_api_url(settings: Settings) -> str:
    """Returns the address of the simulated clinical records API, and starts it if it is not running."""
    return supervisor.start(settings, [ServiceName.RECORDS_API])["records_api"]
