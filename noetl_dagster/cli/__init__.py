"""The command line, ``noetl-dagster``: ``app`` names the commands, which are imported when they are called."""

from noetl_dagster.process.collector import importing


def main() -> None:
    """Entry point of ``noetl-dagster``."""
    with importing():
        from noetl_dagster.cli.app import main as run
    run()
