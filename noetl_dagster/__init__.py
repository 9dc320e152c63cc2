"""NoETL playbooks as Dagster assets: Dagster sees groups, PostgreSQL sees iterations, Spark sees rows.

The names of ``__all__`` are public, and are imported on first use. Every other name may change. Fixtures for pytest are
in :mod:`noetl_dagster.testing`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from noetl_dagster.code_location.component import PlaybooksComponent
    from noetl_dagster.code_location.definitions import load_playbooks
    from noetl_dagster.code_location.folder import PlaybookStep
    from noetl_dagster.code_location.materialize import MaterializedPlaybook, materialize_playbook
    from noetl_dagster.compiler.executors.threaded import threaded_executor
    from noetl_dagster.errors import ExecutionFailedError, NoetlError, PlaybookError, WorkloadError
    from noetl_dagster.io_managers.gcs import GcsIOManager
    from noetl_dagster.io_managers.minio import MinioIOManager
    from noetl_dagster.io_managers.pvc import PvcIOManager
    from noetl_dagster.io_managers.results import NoetlResultIOManager
    from noetl_dagster.playbook.loader import load_playbook
    from noetl_dagster.playbook.models import Playbook
    from noetl_dagster.playbook.tool_kinds import ToolKind
    from noetl_dagster.resources.noetl import NoetlResource
    from noetl_dagster.resources.spark import PySparkResource
    from noetl_dagster.result_ref import ResultRef
    from noetl_dagster.settings import Settings
    from noetl_dagster.spark.frames import frame_of
    from noetl_dagster.tools.base import ToolCall, ToolContext, ToolResult

__version__ = "0.1.0"

__all__ = [
    "ExecutionFailedError",
    "GcsIOManager",
    "MaterializedPlaybook",
    "MinioIOManager",
    "NoetlError",
    "NoetlResource",
    "NoetlResultIOManager",
    "Playbook",
    "PlaybookError",
    "PlaybookStep",
    "PlaybooksComponent",
    "PvcIOManager",
    "PySparkResource",
    "ResultRef",
    "Settings",
    "ToolCall",
    "ToolContext",
    "ToolKind",
    "ToolResult",
    "WorkloadError",
    "frame_of",
    "load_playbook",
    "load_playbooks",
    "materialize_playbook",
    "threaded_executor",
]

_HOMES = {
    "code_location.component": ("PlaybooksComponent",),
    "code_location.definitions": ("load_playbooks",),
    "code_location.materialize": ("MaterializedPlaybook", "materialize_playbook"),
    "code_location.folder": ("PlaybookStep",),
    "errors": ("ExecutionFailedError", "NoetlError", "PlaybookError", "WorkloadError"),
    "compiler.executors.threaded": ("threaded_executor",),
    "io_managers.results": ("NoetlResultIOManager",),
    "io_managers.gcs": ("GcsIOManager",),
    "io_managers.minio": ("MinioIOManager",),
    "io_managers.pvc": ("PvcIOManager",),
    "playbook.loader": ("load_playbook",),
    "playbook.models": ("Playbook",),
    "playbook.tool_kinds": ("ToolKind",),
    "resources.noetl": ("NoetlResource",),
    "resources.spark": ("PySparkResource",),
    "result_ref": ("ResultRef",),
    "settings": ("Settings",),
    "spark.frames": ("frame_of",),
    "tools.base": ("ToolCall", "ToolResult", "ToolContext"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
