"""The Dagster code location: every playbook of ``NOETL_PLAYBOOKS_PATH`` as a job and its assets."""

from __future__ import annotations

from noetl_dagster.process.collector import importing

with importing():  # what is loaded stays until the process ends
    from dagster import Definitions

    from noetl_dagster.code_location.definitions import build_definitions
    from noetl_dagster.process import logs
    from noetl_dagster.settings import get_settings

    logs.set_up(get_settings())
    defs: Definitions = build_definitions(get_settings())
