"""Writes Dagster's instance folder, with its storage in PostgreSQL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import Settings


def dagster_home(settings: Settings) -> Path:
    """Writes ``home/dagster/dagster.yaml`` and returns the folder, to be used as ``DAGSTER_HOME``.

    Args:
        settings: as returned by ``ensure``: ``dagster_db_url`` is set.
    """
    if settings.dagster_db_url is None:
        raise ServiceError("Dagster has no storage: set NOETL_DAGSTER_DB_URL or NOETL_EMBEDDED=true")
    folder = settings.home.resolve() / "dagster"
    folder.mkdir(parents=True, exist_ok=True)
    import yaml  # only here, since every process imports this module

    text = yaml.safe_dump(_instance(settings, settings.dagster_db_url, folder), sort_keys=False)
    path = folder / "dagster.yaml"
    if not path.exists() or path.read_text() != text:
        fresh = path.with_suffix(".new")
        fresh.touch(mode=0o600)  # the URL may hold a password
        fresh.write_text(text)
        fresh.replace(path)
    return folder


def run_server_folder(settings: Settings) -> Path:
    """Returns the folder in which run servers listen and keep their logs and the locks of their runs."""
    return settings.home.resolve() / "runs"


def driver_url(url: str) -> str:
    """Returns the address for Dagster. SQLAlchemy 2.1 maps a bare ``postgresql://`` to psycopg 3 instead."""
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg2://", url)


def _instance(settings: Settings, url: str, folder: Path) -> dict[str, object]:
    runs = {"folder": str(run_server_folder(settings)), "runs_at_once": settings.driven_at_once}
    logs = {"base_dir": str(folder / "storage")}
    compute_logs = _class("noetl_dagster.launcher.compute_logs", "RunLogs", logs)
    if settings.minio_endpoint is not None:
        # its keys stay in the settings, since Dagster's UI shows this file
        logs |= {"bucket": settings.minio_bucket, "endpoint_url": settings.minio_endpoint}
        compute_logs = _class("noetl_dagster.launcher.stored_logs", "StoredRunLogs", logs)
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
