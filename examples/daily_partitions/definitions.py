"""What Dagster loads."""

from pathlib import Path

from noetl_dagster import load_playbooks

defs = load_playbooks(Path(__file__).parent)
