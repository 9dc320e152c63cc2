"""Playbooks as Dagster Definitions: the code location of a folder, the ``dg`` component, runs in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from noetl_dagster.process.collector import importing

if TYPE_CHECKING:
    from dagster import Definitions


def build_code_location() -> Definitions:
    """Returns the Definitions of the folder that ``NOETL_PLAYBOOKS_PATH`` names.

    Importing Dagster without looking for garbage takes a third less time, so this function imports it.
    """
    with importing():
        from noetl_dagster.code_location.definitions import build_definitions
        from noetl_dagster.process import logs
        from noetl_dagster.settings import get_settings

        settings = get_settings()
        logs.set_up(settings)
        return build_definitions(settings)
