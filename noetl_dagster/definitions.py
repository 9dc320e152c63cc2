"""The Dagster code location: every playbook of ``NOETL_PLAYBOOKS_PATH`` as a job and its assets."""

from noetl_dagster.code_location import build_code_location

defs = build_code_location()
