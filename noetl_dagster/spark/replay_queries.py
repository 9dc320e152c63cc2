"""Every statement of a replay on Spark that the projection worker does not have."""

from __future__ import annotations

from noetl_dagster.events.projection_queries import EXECUTION_COLUMNS

_LIST = ", ".join(EXECUTION_COLUMNS)

HORIZON = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text"

# One replay at a time holds the checkpoints, so the table can have one name.
MAKE_STAGING = """
DROP TABLE IF EXISTS noetl.execution_replay;
CREATE UNLOGGED TABLE noetl.execution_replay (LIKE noetl.execution INCLUDING DEFAULTS INCLUDING INDEXES);
"""
DROP_STAGING = "DROP TABLE IF EXISTS noetl.execution_replay"

PUT_STAGED = f"""
INSERT INTO noetl.execution_replay ({_LIST})
SELECT {_LIST} FROM jsonb_populate_recordset(NULL::noetl.execution, $1::text::jsonb)
ON CONFLICT DO NOTHING
"""

PUBLISH = f"""
WITH published AS (
    INSERT INTO noetl.execution ({_LIST}) SELECT {_LIST} FROM noetl.execution_replay RETURNING 1
)
SELECT count(*) FROM published
"""
