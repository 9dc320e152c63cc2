"""The command line, ``noetl-dagster``: ``app`` names the commands, which are imported when they are called."""

import sys

from noetl_dagster.cli.client import forward, wants_server


def main() -> None:
    """Entry point of ``noetl-dagster``."""
    if wants_server(sys.argv):
        code = forward()
        if code is not None:
            sys.exit(code)
    from noetl_dagster.process.collector import importing

    with importing():
        from noetl_dagster.cli.app import main as run
    run()
