"""Every statement that the event log runs."""

_TYPES = {
    "execution_id": "bigint", "event_id": "bigint", "event_type": "text", "catalog_id": "bigint",
    "parent_event_id": "bigint", "parent_execution_id": "bigint", "node_name": "text", "node_type": "text",
    "status": "text", "duration": "float8", "context": "jsonb", "result": "jsonb", "meta": "jsonb", "error": "text",
    "current_index": "int", "current_item": "jsonb", "worker_id": "text", "created_at": "timestamptz",
}  # fmt: skip
COLUMNS = tuple(_TYPES)
"""Columns that a writer fills, in the order of :func:`noetl_dagster.events.log.as_row`."""

_LIST = ", ".join(COLUMNS)

ENDS = "('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed')"


def end_of(execution: str, command: str, event: str = "ended") -> str:
    """Returns the condition that an event ends a command, by the index ``uidx_event_command_end_command_id``."""
    is_named = f"{event}.execution_id = {execution} AND {event}.meta ->> 'command_id' = {command}"
    return f"{is_named} AND {event}.meta ? 'command_id' AND {event}.event_type IN {ENDS}"


_END_OF_COMMAND = end_of("$1", "$2", "event")
_CHUNK_OF_VISIT = """
execution_id = $1 AND node_name = $2 AND meta ->> 'visit' = $3 AND event_type = 'call.partial'"""
_OF_VISIT = "execution_id = $1 AND node_name = $2 AND meta ->> 'visit' = $3 AND meta ->> 'epoch' = $4"


def insert_new(first: int, condition: str = "true") -> str:
    """Returns SQL that inserts many events without those that a unique index refuses, and returns the inserted ids.

    Args:
        first: number of the parameter with the first column; each parameter is an array.
        condition: one for all of them, evaluated before the first insert.
    """
    arrays = ", ".join(f"${place}::{type_}[]" for place, type_ in enumerate(_TYPES.values(), start=first))
    return _insert(f"SELECT {_LIST} FROM unnest({arrays}) AS new ({_LIST}) WHERE {condition}")


def _insert(source: str) -> str:
    return f"INSERT INTO noetl.event ({_LIST}) {source} ON CONFLICT DO NOTHING RETURNING event_id"


INSERT_NEW = insert_new(first=1)

# The first event, unless a unique index refuses it, and only with it the others.
_ARRAYS = ", ".join(f"${place}::{type_}[]" for place, type_ in enumerate(_TYPES.values(), start=1))
INSERT_WITH_FIRST = f"""
WITH given AS (SELECT * FROM unnest({_ARRAYS}) WITH ORDINALITY AS new ({_LIST}, number)),
first AS ({_insert(f"SELECT {_LIST} FROM given WHERE number = 1")}),
others AS ({_insert(f"SELECT {_LIST} FROM given WHERE number > 1 AND EXISTS (SELECT FROM first)")})
SELECT event_id FROM first
"""

# Returns which of the given executions are cancelled.
CLOSED = "SELECT id FROM unnest($1::bigint[]) AS id WHERE NOT noetl.is_open(id)"

# The same as INSERT_NEW, unless one of the given executions is cancelled.
INSERT_NEW_GATED = insert_new(first=2, condition=f"NOT EXISTS ({CLOSED})")

# Inserts one event in the cheapest way, unless a unique index refuses it.
INSERT_ONE = _insert(f"VALUES ({', '.join(f'${place}' for place in range(1, len(COLUMNS) + 1))})")

# Inserts one event, unless a unique index or the cancellation of its execution refuses it.
_VALUES = ", ".join(f"${place}::{type_}" for place, type_ in enumerate(_TYPES.values(), start=1))
INSERT_GATED = _insert(f"SELECT {_VALUES} WHERE noetl.is_open($1::bigint)")

# Locks an execution for this transaction: no other one issues, claims or resumes anything of it until it ends.
CLOSE_GATE = "SELECT noetl.close_gate($1)"

# Which of the given events are in the log.
PRESENT = """
SELECT event_id FROM noetl.event
JOIN unnest($1::bigint[], $2::bigint[]) AS wanted (execution_id, event_id) USING (execution_id, event_id)
"""

STATE_EVENTS = """event_type IN (
    'playbook.initialized', 'playbook.completed', 'playbook.failed', 'workflow.initialized',
    'workflow.completed', 'workflow.failed', 'execution.resumed', 'execution.cancelled',
    'step.enter', 'step.exit', 'step.skipped', 'check.evaluated', 'loop.started', 'loop.done',
    'loop.fanout.started', 'loop.fanin.completed', 'warning')"""
"""The events that the state of an execution is folded from: the condition of the index ``idx_event_state``."""

# These events, in the order of their ids.
LIFECYCLE = f"SELECT {_LIST} FROM noetl.event WHERE execution_id = $1 AND {STATE_EVENTS} ORDER BY event_id"

# The latest outcome of each check of an execution, in the order in which they were evaluated.
CHECKS = """
SELECT * FROM (
    SELECT DISTINCT ON (node_name, meta ->> 'check')
           event_id, node_name, meta ->> 'check' AS name, status, error, context -> 'facts' AS facts,
           meta ->> 'severity' AS severity, (meta ->> 'blocking')::boolean AS blocking
    FROM noetl.event
    WHERE execution_id = $1 AND event_type = 'check.evaluated'
    ORDER BY node_name, meta ->> 'check', event_id DESC) AS latest
ORDER BY event_id
"""

_OF_ASSET = "event_type = 'step.exit' AND status = 'COMPLETED' AND meta ? 'asset' AND meta ->> 'asset' = $1"

# The latest result of an asset; of one partition of it.
_LATEST_RESULT = """
SELECT execution_id, event_id, result, meta ->> 'partition' AS partition FROM noetl.event
WHERE {which} ORDER BY event_id DESC LIMIT 1
"""
ASSET_RESULT = _LATEST_RESULT.format(which=_OF_ASSET)
PARTITION_RESULT = _LATEST_RESULT.format(which=f"{_OF_ASSET} AND meta ? 'partition' AND meta ->> 'partition' = $2")

# The latest result of every partition of an asset.
ASSET_PARTITIONS = f"""
SELECT DISTINCT ON (meta ->> 'partition') result, meta ->> 'partition' AS partition FROM noetl.event
WHERE {_OF_ASSET} AND meta ? 'partition'
ORDER BY meta ->> 'partition', event_id DESC
"""

# Which partitions of an asset there are.
ASSET_SPAN = f"""
SELECT count(*) AS results, count(DISTINCT meta ->> 'partition') AS partitions,
       min(meta ->> 'partition') AS first, max(meta ->> 'partition') AS last
FROM noetl.event WHERE {_OF_ASSET}
"""

# A watermark is valid once the rows up to it are stored for good: at once if it moved with a sink; if the rows went to
# later steps, when the execution has completed, and within that execution even before.
# A claim is no value.
_COUNTS = """(NOT meta -> 'watermark' ? 'claim' AND (NOT meta -> 'watermark' ? 'pending' OR EXISTS (
    SELECT FROM noetl.event done
    WHERE done.execution_id = event.execution_id AND done.event_type = 'playbook.completed'){own}))"""
_FURTHEST = """
    (meta #>> '{watermark,since}')::bigint DESC, meta #> '{watermark,number}' DESC NULLS LAST,
    (meta #>> '{watermark,text}') COLLATE "C" DESC NULLS LAST"""
_WATERMARK = "execution_id, event_id, node_name, created_at, meta -> 'watermark' AS watermark"

# How far a playbook has loaded under a name, in a partition ('' for none), including this execution's own progress.
_OF_PLACE = """meta ? 'watermark' AND meta #>> '{watermark,playbook}' = $1 AND meta #>> '{watermark,name}' = $2
  AND meta #>> '{watermark,partition}' = $3"""
WATERMARK = f"""
SELECT {_WATERMARK} FROM noetl.event
WHERE {_OF_PLACE} AND {_COUNTS.format(own=" OR execution_id = $4")}
ORDER BY {_FURTHEST} LIMIT 1
"""

# How far other executions than $4 have loaded.
WATERMARK_OF_OTHERS = f"""
SELECT {_WATERMARK} FROM noetl.event
WHERE {_OF_PLACE} AND execution_id <> $4 AND {_COUNTS.format(own="")}
ORDER BY {_FURTHEST} LIMIT 1
"""

# While a transaction decides who claims a watermark, no other one does, and none commits rows up to it.
_PLACE_KEYS = "hashtext('noetl.watermark'), hashtext(concat_ws('/', $1::text, $2::text, $3::text))"
WATERMARK_LOCK = f"SELECT pg_advisory_xact_lock({_PLACE_KEYS})"
WATERMARK_LOCK_SHARED = f"SELECT pg_advisory_xact_lock_shared({_PLACE_KEYS})"

# The execution that claimed a watermark last. Claims have negative values of since: the latest is the first of all.
WATERMARK_CLAIMANT = f"""
SELECT execution_id FROM noetl.event
WHERE {_OF_PLACE} AND (meta #>> '{{watermark,since}}')::bigint < 0
ORDER BY (meta #>> '{{watermark,since}}')::bigint LIMIT 1
"""

# The claims of an execution ($4) on a watermark.
WATERMARK_CLAIMS = f"""
SELECT node_name, (meta ->> 'visit')::int AS visit FROM noetl.event
WHERE {_OF_PLACE} AND (meta #>> '{{watermark,since}}')::bigint < 0 AND execution_id = $4
"""

# For which executions the steps of an execution wait that could not claim a watermark.
WAITS = """
SELECT DISTINCT ON (node_name, meta ->> 'visit') (meta ->> 'waits_for')::bigint AS execution_id
FROM noetl.event AS waiting
WHERE execution_id = $1 AND event_type = 'warning' AND meta ? 'waits_for' AND NOT EXISTS (
    SELECT FROM noetl.event AS claimed
    WHERE claimed.execution_id = $1 AND claimed.event_type = 'state.claimed' AND claimed.node_name = waiting.node_name
      AND claimed.meta ->> 'visit' = waiting.meta ->> 'visit' AND claimed.event_id > waiting.event_id)
ORDER BY node_name, meta ->> 'visit', event_id DESC
"""

# Whether a visit of a step has results that stay when it begins again.
HAS_RESULTS = """
SELECT EXISTS (
    SELECT FROM noetl.event WHERE execution_id = $1 AND node_name = $2 AND (meta ->> 'visit')::int = $3
      AND event_type IN ('command.completed', 'loop.shard.done', 'call.partial'))
"""

# How often recovery has resumed an execution, the meta of its latest start, the Unix time of its last event, and the
# seconds since then.
IDLE = """
SELECT opened.*, extract(epoch FROM created_at)::float8 AS since,
       extract(epoch FROM clock_timestamp() - created_at)::float8 AS seconds
FROM (SELECT count(*) FILTER (WHERE meta ? 'recovery') AS recoveries,
             (array_agg(meta ORDER BY event_id DESC))[1] AS latest
      FROM noetl.event WHERE execution_id = $1 AND event_type IN ('playbook.initialized', 'execution.resumed')) opened,
     (SELECT created_at FROM noetl.event WHERE execution_id = $1 ORDER BY event_id DESC LIMIT 1) last
"""

# How far a playbook has loaded under each name and in each partition.
WATERMARKS = f"""
SELECT DISTINCT ON (meta #>> '{{watermark,name}}', meta #>> '{{watermark,partition}}') {_WATERMARK}
FROM noetl.event
WHERE meta ? 'watermark' AND meta #>> '{{watermark,playbook}}' = $1 AND {_COUNTS.format(own="")}
ORDER BY meta #>> '{{watermark,name}}', meta #>> '{{watermark,partition}}', {_FURTHEST}
"""

# The watermarks whose latest value is in an old partition of the log, given by the bounds of its execution ids.
WATERMARKS_BETWEEN = f"""
SELECT * FROM (
    SELECT DISTINCT ON (meta #>> '{{watermark,playbook}}', meta #>> '{{watermark,name}}',
                        meta #>> '{{watermark,partition}}') {_WATERMARK}
    FROM noetl.event
    WHERE meta ? 'watermark' AND {_COUNTS.format(own="")}
    ORDER BY meta #>> '{{watermark,playbook}}', meta #>> '{{watermark,name}}',
             meta #>> '{{watermark,partition}}', {_FURTHEST}) AS latest
WHERE execution_id >= $1 AND execution_id < $2
"""

# How far the commands of a visit went.
REACHED = """
SELECT DISTINCT meta -> 'reached' AS value FROM noetl.event
WHERE execution_id = $1 AND node_name = $2 AND meta ? 'reached' AND (meta ->> 'visit')::int = $3
"""

# All events of an execution after a given one, for people and for replays.
EVENTS = f"""
SELECT {_LIST} FROM noetl.event
WHERE execution_id = $1 AND event_id > $2
ORDER BY event_id
LIMIT $3
"""

# Events of one execution in the order of their commits, see ``commit_order``. Each row also has the horizon: the
# transactions below it have all ended. Without events there is one row.
_AFTER_POSITION = """
(xact_id, event_id) > ($2::text::xid8, $3::bigint) AND xact_id < pg_snapshot_xmin(pg_current_snapshot())"""
_HORIZON = "pg_snapshot_xmin(pg_current_snapshot())::text AS horizon"
HORIZON = f"SELECT {_HORIZON}"
_COMMITTED = f"SELECT {_LIST}, xact_id::text AS xact_id, xact_id AS place"

# Those in the next window of the log, which contains the events of all executions. ``seen`` counts these.
COMMITTED_IN_WINDOW = f"""
WITH tail AS MATERIALIZED (
    SELECT {_LIST}, xact_id FROM noetl.event WHERE {_AFTER_POSITION} ORDER BY xact_id, event_id LIMIT $5
), seen AS (
    SELECT (SELECT count(*) FROM tail) AS seen, last.xact_id::text AS last_xact_id, last.event_id AS last_event_id
    FROM (SELECT) one LEFT JOIN (
        SELECT xact_id, event_id FROM tail ORDER BY xact_id DESC, event_id DESC LIMIT 1) last ON true
)
SELECT {_HORIZON}, seen.*, part.* FROM seen
LEFT JOIN ({_COMMITTED} FROM tail WHERE execution_id = $1 ORDER BY place, event_id LIMIT $4) part ON true
ORDER BY part.place, part.event_id
"""

# Those of an execution with few events.
COMMITTED_OF_SMALL = f"""
WITH own AS MATERIALIZED (SELECT {_LIST}, xact_id FROM noetl.event WHERE execution_id = $1)
SELECT {_HORIZON}, part.* FROM (SELECT) one
LEFT JOIN ({_COMMITTED} FROM own WHERE {_AFTER_POSITION} ORDER BY place, event_id LIMIT $4) part ON true
ORDER BY part.place, part.event_id
"""

IS_LARGE = (
    "SELECT count(*) > $2::bigint FROM (SELECT FROM noetl.event WHERE execution_id = $1 LIMIT $2::bigint + 1) few"
)
FIRST_TRANSACTION = "SELECT min(xact_id)::text FROM noetl.event WHERE execution_id = $1"
TRANSACTION_OF = "SELECT xact_id::text FROM noetl.event WHERE execution_id = $1 AND event_id = $2"

# Whether the execution had ended before a transaction.
HAS_ENDED = """
SELECT event_type IN ('playbook.completed', 'playbook.failed', 'execution.cancelled') FROM noetl.event
WHERE execution_id = $1 AND xact_id < $2::text::xid8 AND event_type IN (
    'playbook.initialized', 'execution.resumed', 'playbook.completed', 'playbook.failed', 'execution.cancelled')
ORDER BY event.xact_id DESC, event.event_id DESC LIMIT 1
"""

# The ends of a loop's iterations, by index and attempt. There are several loop ids if the loop was resumed.
LOOP_ENDS = """
SELECT current_index, (meta ->> 'attempt')::int AS attempt, result, context
FROM noetl.event
WHERE execution_id = $1 AND meta ->> 'loop_id' = ANY($2::text[]) AND meta ? 'loop_id'
  AND event_type IN ('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed',
                     'retry_sequence_completed')
  AND (event_type IN ('loop.shard.done', 'loop.shard.failed') OR NOT meta ? 'shard_id')
  AND current_index >= $3 AND current_index < $4
ORDER BY current_index, event_id
"""

# The stored parts of a step's sink, of every command of a visit that completed.
SINK_PARTS = """
SELECT meta -> 'sink' AS place FROM noetl.event
WHERE execution_id = $1 AND node_name = $2 AND meta ? 'sink' AND (meta ->> 'visit')::int = $3
  AND event_type IN ('command.completed', 'loop.shard.done')
ORDER BY event_id
"""

# Whether an execution wrote parts of a sink.
HAS_SINK_PARTS = "SELECT EXISTS (SELECT FROM noetl.event WHERE execution_id = $1 AND meta ? 'sink')"

# The index after the last iteration of a loop: of a cursor, how many rows or frames it has claimed so far.
LOOP_NEXT_INDEX = """
SELECT COALESCE(max(current_index) + 1, 0) FROM noetl.event
WHERE execution_id = $1 AND meta ->> 'loop_id' = ANY($2::text[]) AND meta ? 'loop_id'
  AND event_type IN ('loop.item', 'command.issued')
"""

# Whether a result, which has not expired, was stored and is not recorded any more: its bytes are missing.
# A scalar subquery: each reference by index.
_IS_LOST = """COALESCE((result #>> '{reference,execution_id}')::bigint = execution_id
    AND COALESCE((result #>> '{reference,expires_at}')::timestamptz > now(), true) AND (
        SELECT ref_id FROM noetl.result_ref WHERE ref_id = (result #>> '{reference,ref_id}')::bigint) IS NULL, false)"""

# Which iterations of a loop were issued and how they ended, for a resumed loop; $5: some of their results are lost.
LOOP_ATTEMPTS = f"""
SELECT current_index, max((meta ->> 'attempt')::int) AS attempt,
       bool_or(event_type = 'command.completed' AND NOT ($5 AND {_IS_LOST})) AS done,
       bool_or(event_type = 'loop.shard.done' AND NOT ($5 AND {_IS_LOST})) AS shard_done,
       max((meta ->> 'attempt')::int) FILTER (WHERE event_type <> 'command.issued') AS ended
FROM noetl.event
WHERE execution_id = $1 AND meta ->> 'loop_id' = ANY($2::text[]) AND meta ? 'loop_id'
  AND event_type IN
    ('command.issued', 'command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed')
  AND current_index >= $3 AND current_index < $4
GROUP BY current_index
"""

# The chunks of a visit of a step, from one number to another one.
CHUNKS = f"""
SELECT (meta ->> 'chunk_index')::int AS chunk_index, (meta ->> 'row_count')::bigint AS row_count,
       (meta -> 'has_more')::bool AS has_more, result
FROM noetl.event
WHERE {_CHUNK_OF_VISIT}
  AND (meta ->> 'chunk_index')::int >= $4 AND (meta ->> 'chunk_index')::int < $5
ORDER BY (meta ->> 'chunk_index')::int
"""

# By step, the number of its chunks and of their rows.
CHUNK_COUNTS = """
SELECT node_name, count(*) AS chunks, sum((meta ->> 'row_count')::bigint)::bigint AS rows
FROM noetl.event WHERE execution_id = $1 AND event_type = 'call.partial' GROUP BY node_name
"""

# By step that receives chunks, the step that produces them.
TAKERS = """
SELECT DISTINCT node_name AS taker, meta ->> 'source' AS source
FROM noetl.event WHERE execution_id = $1 AND event_type = 'loop.started' AND meta ? 'source'
"""

# The iteration that produced each chunk of a visit.
CHUNK_ITERATIONS = f"""
SELECT (meta ->> 'chunk_index')::int AS chunk_index, current_index FROM noetl.event WHERE {_CHUNK_OF_VISIT}
"""

# Where a call continues whose chunks are in the log.
CHUNKS_RECORDED = f"""
SELECT (meta ->> 'chunk_index')::int AS chunk_index, (meta -> 'has_more')::bool AS has_more,
       meta ->> 'command_id' AS command_id, result, context
FROM noetl.event
WHERE {_CHUNK_OF_VISIT} AND (context ->> 'ended')::int = $4
ORDER BY (meta ->> 'chunk_index')::int
"""

# How a command ended, if it did.
COMMAND_END = f"""
SELECT event_type, result, context, error, (meta ->> 'attempt')::int AS attempt
FROM noetl.event WHERE {_END_OF_COMMAND}
"""

# Whether the result of a command is lost.
COMMAND_LOST = f"SELECT {_IS_LOST} FROM noetl.event WHERE {_END_OF_COMMAND}"

# Whether a command is over: it has ended, or its execution was cancelled.
COMMAND_OVER = f"""
SELECT EXISTS (SELECT FROM noetl.event WHERE {_END_OF_COMMAND})
    OR EXISTS (SELECT FROM noetl.event WHERE execution_id = $1 AND event_type = 'execution.cancelled')
"""

# Commands that were begun and have not ended, each by the latest event of its beginning: claimed ones and, of
# cursor loops, issued ones too, for their rows were claimed.
UNENDED = f"""
WITH begun AS (
    SELECT {_LIST} FROM noetl.event WHERE execution_id = $1 AND event_type = 'command.claimed'
    UNION ALL
    SELECT {_LIST} FROM noetl.event
    WHERE execution_id = $1 AND event_type = 'command.issued' AND meta ? 'loop_id' AND meta ->> 'loop_id' IN (
        SELECT meta ->> 'loop_id' FROM noetl.event
        WHERE execution_id = $1 AND event_type = 'loop.started' AND meta ->> 'mode' = 'cursor')
)
SELECT DISTINCT ON (begun.meta ->> 'command_id') {_LIST}
FROM begun
WHERE NOT EXISTS (
    SELECT FROM noetl.event ended WHERE {end_of("$1", "begun.meta ->> 'command_id'")})
ORDER BY begun.meta ->> 'command_id', begun.event_id DESC
"""

# When a retry that was issued is due, in Unix seconds.
COMMAND_DUE = """
SELECT (meta ->> 'not_before')::float
FROM noetl.event
WHERE execution_id = $1 AND meta ->> 'command_id' = $2 AND event_type = 'command.issued'
  AND meta ? 'command_id'
"""

# The latest result of each step that has ended, and its watermark.
STEP_RESULTS = """
SELECT DISTINCT ON (node_name) node_name, result, meta -> 'watermark' AS watermark
FROM noetl.event
WHERE execution_id = $1 AND event_type = 'step.exit' AND result IS NOT NULL
ORDER BY node_name, event_id DESC
"""

# Whether the pages that end with a command were aggregated.
SEQUENCE_ENDED = """
SELECT true
FROM noetl.event
WHERE execution_id = $1 AND meta ->> 'command_id' = $2 AND event_type = 'retry_sequence_completed'
  AND meta ? 'command_id'
"""

# The event by which a visit ended in an epoch.
STEP_EXIT = f"SELECT {_LIST} FROM noetl.event WHERE {_OF_VISIT} AND event_type = 'step.exit'"

# The outcomes of a visit's checks in an epoch.
STEP_CHECKS = f"""
SELECT {_LIST} FROM noetl.event WHERE {_OF_VISIT} AND event_type = 'check.evaluated' ORDER BY event_id
"""

# The latest process that took a turn of a visit in an epoch.
STEP_TURNS = f"""
SELECT (meta ->> 'turn')::int AS turn, event_id, worker_id, context FROM noetl.event
WHERE {_OF_VISIT} AND event_type = 'step.enter' AND meta ? 'turn'
ORDER BY 1 DESC LIMIT 1
"""

# Whether a shard or iteration of a loop has failed for good: what fail_fast stops at.
LOOP_FAILED = """
SELECT EXISTS (
    SELECT 1 FROM noetl.event
    WHERE execution_id = $1 AND meta ->> 'loop_id' = $2 AND meta ? 'loop_id'
      AND event_type IN ('command.failed', 'loop.shard.failed') AND meta ->> 'final' = 'true')
"""


def done_by(event: str) -> str:
    """Returns SQL for the change of the number of successful iterations by an event of a loop.

    A shard of several commands succeeds with its own event. For other iterations the first success counts, until
    an attempt that follows it, such as the next page, fails.
    """
    return f"""CASE
        WHEN {event}.event_type = 'loop.shard.done' THEN 1
        WHEN {event}.meta ? 'shard_id' THEN 0
        WHEN {event}.event_type = 'command.completed' THEN CASE WHEN {event}.meta ? 'follows' THEN 0 ELSE 1 END
        WHEN {event}.event_type = 'command.failed' AND {event}.meta ? 'follows' THEN -1
        ELSE 0 END"""


# By loop, how many iterations ended within the last thousand events of an execution, and the seconds since the
# oldest of these: milliseconds to read, however long the log. Events before a resumption, or before the loop's own
# start, do not count.
LOOP_RATES = f"""
WITH recent AS MATERIALIZED (
    SELECT event_type, meta, created_at FROM noetl.event WHERE execution_id = $1
    ORDER BY event_id DESC LIMIT 1000
), since AS (
    SELECT COALESCE(max(created_at) FILTER (WHERE event_type = 'execution.resumed'), min(created_at)) AS moment
    FROM recent
)
SELECT recent.meta ->> 'loop_id' AS loop_id,
       COALESCE(SUM({done_by("recent")} + CASE
           WHEN recent.event_type IN ('command.failed', 'loop.shard.failed') AND recent.meta ->> 'final' = 'true'
           THEN 1 ELSE 0 END), 0)::bigint AS ended,
       EXTRACT(EPOCH FROM clock_timestamp() - GREATEST(since.moment, max(recent.created_at) FILTER (
           WHERE recent.event_type IN ('loop.started', 'loop.fanout.started'))))::float8 AS seconds
FROM recent CROSS JOIN since
WHERE recent.meta ? 'loop_id' AND recent.created_at >= since.moment
GROUP BY 1, since.moment
"""

# The child execution that a command started.
CHILD_OF_COMMAND = """
SELECT execution_id FROM noetl.event
WHERE parent_execution_id = $1 AND event_type = 'playbook.initialized' AND meta ->> 'parent_command' = $2
ORDER BY execution_id DESC LIMIT 1
"""

# Children of an execution that have not ended, without their own children.
RUNNING_CHILDREN = """
SELECT child.execution_id FROM noetl.event child
WHERE child.parent_execution_id = $1 AND child.event_type = 'playbook.initialized'
  AND NOT EXISTS (
    SELECT 1 FROM noetl.event ended
    WHERE ended.execution_id = child.execution_id
      AND ended.event_type IN ('playbook.completed', 'execution.cancelled'))
"""

# Cancellations and resumptions of executions, for their drivers.
INTERRUPTIONS = """
SELECT execution_id, event_type, (meta ->> 'epoch')::int AS epoch, error FROM noetl.event
WHERE execution_id = ANY($1::bigint[]) AND event_type IN ('execution.cancelled', 'execution.resumed')
ORDER BY event_id
"""

# A registered text keeps its row; another one gets a row of its own.
CATALOG_PUT = """
WITH known AS (
    SELECT catalog_id FROM noetl.catalog WHERE path = $2 AND sha256 = $3 ORDER BY version DESC LIMIT 1
), made AS (
    INSERT INTO noetl.catalog (catalog_id, path, sha256, content, meta, model)
    SELECT $1, $2, $3, $4, $5, $6 WHERE NOT EXISTS (SELECT FROM known)
    ON CONFLICT (path, sha256) WHERE version = 0 DO UPDATE SET path = EXCLUDED.path
    RETURNING catalog_id
)
SELECT catalog_id FROM known UNION ALL SELECT catalog_id FROM made
"""
CATALOG_SOURCE = "SELECT content, path, model FROM noetl.catalog WHERE catalog_id = $1"
TEXT_OF_EXECUTION = """
SELECT path, version, sha256 FROM noetl.catalog WHERE catalog_id = (
    SELECT catalog_id FROM noetl.event WHERE execution_id = $1 AND event_type = 'playbook.initialized' LIMIT 1)
"""

# One transaction at a time assigns the next version of a path.
CATALOG_LOCK = "SELECT pg_advisory_xact_lock(hashtext('noetl.catalog'), hashtext($1))"
CATALOG_REGISTER = """
INSERT INTO noetl.catalog (catalog_id, path, version, kind, content, payload, meta, model, sha256)
VALUES ($1, $2, $3, 'Playbook', $4, $5, $6, $7, $8)
RETURNING *
"""

# A version of a path; without a number the latest, and texts that only ran, as version 0, come last.
CATALOG_VERSION = """
SELECT * FROM noetl.catalog
WHERE path = $1 AND ($2::int IS NULL OR version = $2) AND version >= $3
ORDER BY version DESC, catalog_id DESC LIMIT 1
"""
CATALOG_VERSIONS = """
SELECT catalog_id, path, version, kind, meta, sha256, created_at FROM noetl.catalog
WHERE path = $1 AND version > $2
ORDER BY version DESC LIMIT $3
"""
CATALOG_LATEST = """
SELECT DISTINCT ON (path) catalog_id, path, version, kind, meta, sha256, created_at FROM noetl.catalog
WHERE version > 0 AND path > $1
ORDER BY path, version DESC LIMIT $2
"""
CATALOG_NEAR = "SELECT DISTINCT path FROM noetl.catalog WHERE version > 0 ORDER BY path LIMIT 1000"

NEXT_NODE = "SELECT nextval('noetl.snowflake_node')"
