"""Embedded services: PostgreSQL, NATS and S3 from the package index, started on first use.

All processes of a project share the services through the state folder (``Settings.home``). The services listen on
127.0.0.1 only, outlive the process that started them, and keep their ports and data across restarts. They require
generated passwords, which are recorded in the state folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import SecretStr

from noetl_dagster.embedded import supervisor
from noetl_dagster.embedded.servers import ServiceName as ServiceName
from noetl_dagster.embedded.supervisor import ServiceStatus as ServiceStatus
from noetl_dagster.embedded.supervisor import down as down
from noetl_dagster.embedded.supervisor import status as status
from noetl_dagster.errors import ServiceError
from noetl_dagster.private_files import closed_folder, write_private
from noetl_dagster.settings import Settings, plain_settings

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
"""Hosts of services that other machines do not reach, as the embedded ones."""

CONNECT_SECONDS = 10
"""Time in which one of several hosts must accept a connection of Dagster."""


def ensure(
    settings: Settings, only: Collection[str] | None = None, announce: supervisor.Announce | None = None
) -> Settings:
    """Starts the services that have no address in the settings, and adds their addresses.

    The call takes a few milliseconds if the services are running, so every process makes it when it starts.

    Args:
        only: names of the required services; default: all except the records API.
        announce: called with the services that are not running, before they are started.

    Returns:
        A copy with the missing ones of ``db_url``, ``dagster_db_url``, ``nats_url`` and ``minio_endpoint`` with its
        secret key, and with ``pvc_mount_path`` and ``default_postgres_credential`` if the event log is embedded;
        ``settings`` itself if nothing is missing or may be started.

    Raises:
        ServiceError: a service does not start; the message contains the end of its log.
    """
    if not settings.embedded:
        return settings
    names = supervisor.names_missing(settings, only)
    if not names:
        return settings
    home = settings.home.resolve()
    addresses: dict[str, object] = {**supervisor.start(settings, names, announce)}
    if "db_url" in addresses and settings.db_url is None:
        addresses["pvc_mount_path"] = closed_folder(
            home / "pvc"
        )  # on one machine, a folder serves as the shared volume
        addresses["default_postgres_credential"] = "embedded"  # so that playbooks run without any set-up
    if "minio_secret_key" in addresses:
        addresses["minio_secret_key"] = SecretStr(str(addresses["minio_secret_key"]))
    missing = {name: value for name, value in addresses.items() if not getattr(settings, name, "set")}
    return settings.model_copy(update={**missing, "home": home})


def running_db_url(settings: Settings) -> str | None:
    """Returns the address of the embedded event log; None if it does not run or may not be used."""
    return supervisor.running(settings, ServiceName.POSTGRES).get("db_url") if settings.embedded else None


def environment(settings: Settings) -> dict[str, str]:
    """Returns the ``NOETL_*`` variables that give a child process the same settings and services.

    Secret values are in clear text, since environment variables have no other form.
    """
    values = plain_settings(settings, changed=True)
    variables = {
        f"NOETL_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
    }
    variables["NOETL_HOME"] = str(settings.home.resolve())
    return variables


def demo_environment(settings: Settings) -> dict[str, str]:
    """Starts the records API and returns the credentials of the example playbooks, as ``NOETL_*`` variables."""
    return {
        "NOETL_DEFAULT_POSTGRES_CREDENTIAL": "embedded",  # also where NOETL_DB_URL is that of a running server
        "NOETL_CREDENTIAL_RECORDS_API": supervisor.start(settings, [ServiceName.RECORDS_API])["records_api"],
    }


def dagster_home(settings: Settings) -> Path:
    """Writes ``home/dagster/dagster.yaml`` for the settings that :func:`ensure` returned, and returns the folder."""
    if settings.dagster_db_url is None:
        raise ServiceError("Dagster has no storage: set NOETL_DAGSTER_DB_URL or NOETL_EMBEDDED=true")
    folder = closed_folder(settings.home.resolve() / "dagster")
    import yaml  # only here, since every process imports this module

    text = yaml.safe_dump(_instance(settings, settings.dagster_db_url, folder), sort_keys=False)
    path = folder / "dagster.yaml"
    if not path.exists() or path.read_text() != text:
        write_private(path, text)  # the URL may hold a password
    return folder


def run_server_folder(settings: Settings) -> Path:
    """Returns the folder in which run servers listen and keep their logs and the locks of their runs."""
    return settings.home.resolve() / "runs"


def driver_url(url: str) -> str:
    """Returns the address for Dagster's SQLAlchemy.

    SQLAlchemy 2.1 maps a bare ``postgresql://`` to psycopg 3, and takes several hosts only as parameters. Of several
    hosts, Dagster needs the one that accepts writes, and must not wait long for one that does not answer.
    """
    address = re.sub(r"^postgres(ql)?://", "postgresql+psycopg2://", url)
    parts = urlsplit(address)
    login, at, hosts = parts.netloc.rpartition("@")
    if "," not in hosts:
        return address
    options = {"target_session_attrs": "read-write", "connect_timeout": CONNECT_SECONDS} | dict(parse_qsl(parts.query))
    query = urlencode([*(("host", host) for host in hosts.split(",")), *options.items()])
    return f"{parts.scheme}://{login}{at}{parts.path}?{query}"


def _instance(settings: Settings, url: str, folder: Path) -> dict[str, object]:
    runs = {"folder": str(run_server_folder(settings)), "runs_at_once": settings.driven_at_once}
    logs = str(folder / "storage")
    compute_logs = _class("noetl_dagster.launcher.compute_logs", "RunLogs", {"base_dir": logs})
    if settings.minio_endpoint is not None and urlsplit(settings.minio_endpoint).hostname not in THIS_MACHINE:
        # other machines may read it; its keys stay in the settings, since Dagster's UI shows this file
        config = {"bucket": settings.minio_bucket, "endpoint_url": settings.minio_endpoint, "local_dir": logs}
        config["prefix"] = "compute-logs"
        compute_logs = _class("noetl_dagster.launcher.stored_logs", "StoredRunLogs", config)
    return {
        "storage": {"postgres": {"postgres_url": driver_url(url)}},
        "run_launcher": _class("noetl_dagster.launcher.warm", "WarmRunLauncher", runs),
        "compute_logs": compute_logs,
        "run_coordinator": _class("dagster.core.run_coordinator", "DefaultRunCoordinator", {}),
        "local_artifact_storage": _class(
            "dagster.core.storage.root", "LocalArtifactStorage", {"base_dir": str(folder)}
        ),
        "telemetry": {"enabled": False},
        "nux": {"enabled": False},  # no dialogue before the first page
    }


def _class(module: str, name: str, config: dict[str, Any]) -> dict[str, object]:
    return {"module": module, "class": name, "config": config}
