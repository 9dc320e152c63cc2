"""DuckDB files that are written, and the ledger in them of what sinks and transfers have published."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import duckdb

from noetl_dagster.tools.sql.duckdb import is_held

WAIT_SECONDS = 60.0  # for another process that has the file open
PAUSE_SECONDS = 0.1

# A part of a sink, or a transfer, is published once: a process that was assumed dead does not publish it again.
# position: of a transfer, as JSON; published is null before its end.
LEDGER = """
CREATE SCHEMA IF NOT EXISTS noetl;
CREATE TABLE IF NOT EXISTS noetl.sink_part (target VARCHAR, part VARCHAR, published TIMESTAMPTZ DEFAULT now(),
                                            position VARCHAR, PRIMARY KEY (target, part));
"""
# DESCRIBE reads one table; duckdb_columns() costs as much as opening the file
LACKS_POSITION = "SELECT count(*) = 0 FROM (DESCRIBE noetl.sink_part) WHERE column_name = 'position'"
ADD_POSITION = "ALTER TABLE noetl.sink_part ADD COLUMN position VARCHAR"

_preparing = threading.Lock()
"""Connections of one process that create the ledger at the same time would refuse each other."""


def open_file(path: str) -> duckdb.DuckDBPyConnection:
    """Opens a file with its ledger; waits while another process has it open.

    Raises:
        duckdb.Error: the other process has it for longer than a minute, or it is no DuckDB file.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            connection = duckdb.connect(path)
            break
        except duckdb.Error as error:
            if not is_held(error) or time.monotonic() > until:
                raise
            time.sleep(PAUSE_SECONDS)
    try:
        with _preparing:
            connection.execute(LEDGER)
            if connection.execute(LACKS_POSITION).fetchone() == (True,):  # of an earlier version
                connection.execute(ADD_POSITION)
    except BaseException:
        connection.close()
        raise
    return connection
