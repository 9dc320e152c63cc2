"""The command line: ``noetl-dagster``."""

from noetl_dagster.cli.app import main

__all__ = ["main"]
