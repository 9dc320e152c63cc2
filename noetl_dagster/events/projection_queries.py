"""Every statement of the projection. Transaction ids travel as text, their order is that of xid8."""

from noetl_dagster.events.queries import done_by

SHARDS = 4
"""Number of projection shards. It is fixed: a checkpoint belongs to the executions of its shard."""

# The shard of an execution: the one in noetl.execution_shard, otherwise that of its hash.
_SHARD = f"COALESCE(shard.shard, abs(hashint8(event.execution_id) % {SHARDS}))"

# Events that change a row one by one. Successful iterations are counted, see DONE.
_CHANGES = """(
    event.event_type IN (
        'playbook.initialized', 'playbook.completed', 'playbook.failed', 'execution.resumed',
        'execution.cancelled', 'step.enter', 'step.exit', 'loop.started', 'loop.done',
        'loop.fanout.started', 'loop.fanin.completed', 'warning')
    OR (event.event_type IN ('command.failed', 'loop.shard.failed') AND event.meta ? 'loop_id'
        AND COALESCE(event.meta ->> 'final', 'true') = 'true'))"""

# Events that change no row, and that people who watch an execution want to see.
_SHOWN = """ARRAY['step.skipped', 'check.evaluated', 'command.failed', 'loop.shard.failed', 'workflow.initialized']"""

# By how much an event changes the number of successful iterations; the condition skips the rest for other events.
_DONE = f"""CASE
    WHEN event.event_type IN ('command.completed', 'command.failed', 'loop.shard.done') AND event.meta ? 'loop_id'
    THEN {done_by("event")} ELSE 0 END"""

_PARTS = """
    event.execution_id, event.event_id, event.event_type, event.catalog_id, event.parent_execution_id,
    event.node_name, event.status, event.meta, event.error, event.created_at, event.xact_id,
    CASE WHEN event.event_type = 'playbook.initialized' THEN event.context -> 'workload' END AS workload,
    event.context ->> 'collection_ref' AS collection_ref,
    event.result -> 'reference' ->> 'physical_uri' AS result_uri, event.result ->> 'status' AS result_status
"""
_VISIT = "event.node_name, COALESCE((event.meta ->> 'visit')::int, 1) AS visit"
_WINDOW = "event.xact_id >= $1::text::xid8 AND event.xact_id < $2::text::xid8"

_EXECUTIONS_OF = f"""
SELECT event.execution_id FROM noetl.execution event
LEFT JOIN noetl.execution_shard shard USING (execution_id)
WHERE {_SHARD}"""

# A shard whose checkpoint is missing is projected from the start. Usually none is, and no execution is read.
MAKE_CHECKPOINTS = f"""
WITH made AS (
    INSERT INTO noetl.projection_checkpoint (shard, xact_id)
    SELECT shard, '0' FROM generate_series(0, {SHARDS - 1}) AS shard
    ON CONFLICT DO NOTHING RETURNING shard
)
DELETE FROM noetl.execution
WHERE (SELECT count(*) FROM made) > 0 AND execution_id IN ({_EXECUTIONS_OF} IN (SELECT shard FROM made))
"""

# The checkpoints of the shards.
LOCK_CHECKPOINTS = """
SELECT shard, xact_id::text AS xact_id FROM noetl.projection_checkpoint ORDER BY shard FOR UPDATE
"""
# Those that no other process has locked.
LOCK_FREE_CHECKPOINTS = f"{LOCK_CHECKPOINTS} SKIP LOCKED"

# The limit of a read: transactions below the horizon have all ended, so no row can appear there later.
# ``first`` is the next transaction with events, ``bound`` the one that a batch of events later.
WINDOW = """
SELECT pg_snapshot_xmin(pg_current_snapshot())::text AS horizon,
       (SELECT xact_id::text FROM noetl.event WHERE xact_id >= $1::text::xid8
        ORDER BY event.xact_id LIMIT 1) AS first,
       (SELECT xact_id::text FROM noetl.event WHERE xact_id >= $1::text::xid8
        ORDER BY event.xact_id OFFSET $2 LIMIT 1) AS bound
"""

EVENTS = f"""
SELECT {_PARTS} FROM noetl.event
LEFT JOIN noetl.execution_shard shard USING (execution_id)
WHERE {_WINDOW} AND {_CHANGES} AND {_SHARD} = ANY($3::int[])
ORDER BY event.xact_id, event.event_id
"""

DONE = f"""
SELECT event.execution_id, {_VISIT}, sum({_DONE})::bigint AS done FROM noetl.event
LEFT JOIN noetl.execution_shard shard USING (execution_id)
WHERE {_WINDOW} AND {_DONE} <> 0 AND {_SHARD} = ANY($3::int[])
GROUP BY 1, 2, 3
"""

COUNT = f"SELECT count(*) FROM noetl.event WHERE {_WINDOW}"

_TYPES = {
    "execution_id": "bigint", "catalog_id": "bigint", "parent_execution_id": "bigint", "playbook": "text",
    "status": "text", "last_event_type": "text", "last_node_name": "text", "last_event_id": "bigint",
    "start_time": "timestamptz", "end_time": "timestamptz", "state": "jsonb", "error": "text",
    "created_at": "timestamptz", "updated_at": "timestamptz",
}  # fmt: skip
EXECUTION_COLUMNS = tuple(_TYPES)
_LIST = ", ".join(EXECUTION_COLUMNS)
_LIST_OF_EXECUTION = ", ".join(f"execution.{name}" for name in EXECUTION_COLUMNS)
_ARRAYS = ", ".join(f"${place}::{type_}[]" for place, type_ in enumerate(_TYPES.values(), start=1))

EXECUTIONS = f"SELECT {_LIST} FROM noetl.execution WHERE execution_id = ANY($1::bigint[])"

PUT_EXECUTIONS = f"""
INSERT INTO noetl.execution ({_LIST})
SELECT {_LIST} FROM unnest({_ARRAYS}) AS projected ({_LIST})
ON CONFLICT (execution_id) DO UPDATE SET
    {", ".join(f"{name} = EXCLUDED.{name}" for name in EXECUTION_COLUMNS[1:])}
"""

MOVE_CHECKPOINTS = f"""
UPDATE noetl.projection_checkpoint
SET xact_id = $2::text::xid8, events = LEAST(events, {2**63 - 1} - $3::bigint) + $3, updated_at = clock_timestamp()
WHERE shard = ANY($1::int[])
"""

FORGET_SOME = "DELETE FROM noetl.execution WHERE execution_id = ANY($1::bigint[])"
FORGET_SHARDS = f"DELETE FROM noetl.execution WHERE execution_id IN ({_EXECUTIONS_OF} = ANY($1::int[]))"
FORGET = "DELETE FROM noetl.execution"  # not TRUNCATE: readers see the rows until the commit
RESET_CHECKPOINTS = "UPDATE noetl.projection_checkpoint SET xact_id = '0', events = 0"  # while they are locked

# A row of the projection and the checkpoint of its shard, from one snapshot; and whether there are events of any
# execution after the checkpoint.
ROW_AND_CHECKPOINT = f"""
SELECT checkpoint.xact_id::text AS checkpoint,
       checkpoint.xact_id IS NULL OR (
           SELECT xact_id FROM noetl.event later WHERE later.xact_id >= checkpoint.xact_id
           ORDER BY later.xact_id LIMIT 1) IS NOT NULL AS has_tail,  -- ordered, so that the index is used
       {_LIST_OF_EXECUTION}
FROM (SELECT $1::bigint AS execution_id) event
LEFT JOIN noetl.execution_shard shard USING (execution_id)
LEFT JOIN noetl.projection_checkpoint checkpoint ON checkpoint.shard = {_SHARD}
LEFT JOIN noetl.execution execution USING (execution_id)
"""

# The events of one execution among those committed after the checkpoint, which are counted up to the limit.
# ``seen`` is on every row: if it reaches the limit, the tail is longer.
TAIL = f"""
WITH event AS MATERIALIZED (
    SELECT * FROM noetl.event WHERE xact_id >= $2::text::xid8 ORDER BY xact_id, event_id LIMIT $3
), seen AS (SELECT count(*) AS seen FROM event)
SELECT seen.seen, part.* FROM seen
LEFT JOIN (
    SELECT {_PARTS}, {_DONE} AS done, {_CHANGES} AS is_change, COALESCE((event.meta ->> 'visit')::int, 1) AS visit
    FROM event WHERE execution_id = $1 AND ({_CHANGES} OR {_DONE} <> 0)
) part ON true
ORDER BY part.xact_id, part.event_id
"""

# The events of one execution up to an event in the order of ids.
EVENTS_UNTIL = f"""
SELECT {_PARTS} FROM noetl.event WHERE execution_id = $1 AND {_CHANGES} AND event.event_id <= $2
ORDER BY event.xact_id, event.event_id
"""
DONE_UNTIL = f"""
SELECT {_VISIT}, sum({_DONE})::bigint AS done FROM noetl.event
WHERE execution_id = $1 AND {_DONE} <> 0 AND event.event_id <= $2
GROUP BY 1, 2
"""

# The checkpoints of executions.
CHECKPOINTS = f"""
SELECT event.execution_id, COALESCE(checkpoint.xact_id, '0')::text AS xact_id
FROM (SELECT unnest($1::bigint[]) AS execution_id) event
LEFT JOIN noetl.execution_shard shard USING (execution_id)
LEFT JOIN noetl.projection_checkpoint checkpoint ON checkpoint.shard = {_SHARD}
"""

# The events of some executions below a checkpoint, one execution after the other.
EVENTS_BELOW = f"""
SELECT {_PARTS} FROM noetl.event
WHERE execution_id = ANY($1::bigint[]) AND event.xact_id < $2::text::xid8 AND {_CHANGES}
ORDER BY execution_id, event.xact_id, event.event_id
"""
DONE_BELOW = f"""
SELECT execution_id, {_VISIT}, sum({_DONE})::bigint AS done FROM noetl.event
WHERE execution_id = ANY($1::bigint[]) AND event.xact_id < $2::text::xid8 AND {_DONE} <> 0
GROUP BY 1, 2, 3
"""

# The events that change its row, and others that people want to see, in the transactions from $2 up to, without, $3.
SHOWN_BETWEEN = f"""
SELECT event.event_id, event.event_type, event.node_name, event.status, event.meta, event.error, event.created_at,
       event.current_index
FROM noetl.event
WHERE event.execution_id = $1 AND event.xact_id >= $2::text::xid8 AND event.xact_id < $3::text::xid8
  AND ({_CHANGES} OR event.event_type = ANY({_SHOWN}))
ORDER BY event.xact_id, event.event_id
"""

# The age in seconds of the oldest event that is not applied in its shard.
LAG = """
SELECT COALESCE(max(extract(epoch FROM clock_timestamp() - waiting.created_at)), 0)::float8
FROM noetl.projection_checkpoint checkpoint
LEFT JOIN LATERAL (
    SELECT created_at FROM noetl.event WHERE xact_id >= checkpoint.xact_id ORDER BY event.xact_id LIMIT 1
) waiting ON true
"""
