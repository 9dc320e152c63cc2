"""The command line, ``noetl-dagster``: ``app`` names the commands, which are imported when they are called."""

from noetl_dagster.cli.app import main

__all__ = ["main"]
