"""``python -m noetl_dagster``: the command line."""

from noetl_dagster.cli import main

main()
