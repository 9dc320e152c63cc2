"""Every statement of the transport: the queue, the claims, dead letters, workers."""

from noetl_dagster.events.queries import end_of, insert_new

MISSED_REPORTS = 3
"""A worker that misses this many reports counts as lost."""


def no_worker(pool: str) -> str:
    """Returns the warning about a pool without workers for which commands wait."""
    return f"no worker of pool {pool} reports; start one with 'noetl-dagster worker --pool {pool}'"


# Which of the executions are in the log.
KNOWN_EXECUTIONS = """
SELECT DISTINCT execution_id FROM noetl.event
WHERE execution_id = ANY($1::bigint[]) AND event_type = 'playbook.initialized'
"""

# Checks the senders of events and applies their consequences; see schema/060_pool.sql.
SETTLE = f"SELECT runs, taken FROM noetl.settle({', '.join(f'${place}' for place in range(1, 21))})"

_IF_OPEN = "(event_type <> 'command.claimed' OR execution_id NOT IN (SELECT id FROM closed))"
_IF_TAKEN = "(NOT $1 OR event_id IN (SELECT unnest(taken) FROM settled))"

# Appends events ($22 and on) after their consequences. Rows of the queue are locked first, as in claims, cancellations
# and the reaper; before them the executions whose commands are claimed ($21), as when commands are issued. Claims of
# cancelled executions are omitted, and events that settling does not take. Returns the new ids, and what settling does.
TAKE = f"""
WITH closed AS MATERIALIZED (SELECT id FROM unnest($21::bigint[]) AS id WHERE NOT noetl.is_open(id)),
settled AS MATERIALIZED ({SETTLE} WHERE (SELECT count(*) FROM closed) >= 0),
new AS ({insert_new(first=22, condition=f"(SELECT count(*) FROM settled) = 1 AND {_IF_TAKEN} AND {_IF_OPEN}")})
SELECT (SELECT array_agg(event_id) FROM new) AS inserted, runs, taken FROM settled
"""

# Puts issued commands into the queue, leaving out those that have ended and those of cancelled executions;
# returns the queued ones. $1 to $3 are the commands, each with the position of what it shares with others in $4 to $11.
# Scalar subqueries look each command up by index: a join of a large batch might read the whole log.
ENQUEUE = f"""
WITH closed AS MATERIALIZED (
    SELECT id FROM (SELECT DISTINCT id FROM unnest($4::bigint[]) AS id ORDER BY id) asked
    WHERE NOT noetl.is_open(id)
), wanted AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::jsonb[], $3::bigint[]) WITH ORDINALITY
        AS own (command_id, context, share, position)
    JOIN unnest($4::bigint[], $5::text[], $6::text[], $7::int[], $8::int[], $9::float8[], $10::text[], $11::jsonb[])
        WITH ORDINALITY AS common (execution_id, node_name, tool_kind, max_attempts, priority, weight, pool, shared,
                                   share) USING (share)
), latest AS MATERIALIZED (
    SELECT execution_id, priority, pool, noetl.last_turn(execution_id, priority, pool) AS turn
    FROM (SELECT DISTINCT execution_id, priority, pool FROM wanted) asked
)
INSERT INTO noetl.queue
    (execution_id, command_id, event_id, node_name, tool_kind, max_attempts, context, shared, priority, turn, pool)
SELECT wanted.execution_id, wanted.command_id, COALESCE((
           SELECT issued.event_id FROM noetl.event issued
           WHERE issued.execution_id = wanted.execution_id AND issued.event_type = 'command.issued'
             AND issued.meta ->> 'command_id' = wanted.command_id AND issued.meta ? 'command_id'), 0),
       wanted.node_name, wanted.tool_kind, wanted.max_attempts, wanted.context, wanted.shared,
       wanted.priority, latest.turn + sum(GREATEST(round(1000 / wanted.weight), 1)::bigint) OVER (
           PARTITION BY wanted.execution_id, wanted.priority, wanted.pool ORDER BY wanted.position),
       wanted.pool
FROM wanted
JOIN latest ON latest.execution_id = wanted.execution_id AND latest.priority = wanted.priority
    AND latest.pool = wanted.pool
WHERE wanted.execution_id NOT IN (SELECT id FROM closed) AND (
    SELECT ended.event_id FROM noetl.event ended WHERE {end_of("wanted.execution_id", "wanted.command_id")}) IS NULL
ON CONFLICT DO NOTHING
RETURNING command_id, event_id
"""

# How commands ended.
COMMAND_ENDS = f"""
SELECT command_id, result, context, duration
FROM unnest($1::bigint[], $2::text[]) AS wanted (execution_id, command_id), LATERAL (
    SELECT result, context, duration FROM noetl.event
    WHERE {end_of("wanted.execution_id", "wanted.command_id", "event")} LIMIT 1) ended
"""

# Claims as many commands as there are ids in $2, only those of $6 and $7 if given; see schema/060_pool.sql.
CLAIM = """
SELECT worker, execution_id, node_name, tool_kind, waited, version, answer
FROM noetl.claim($1, $2, $3, $4, $5, $6::bigint[], $7::text[])
"""

# Returns claims that a worker has not begun to the queue; they do not count as attempts.
GIVE_BACK = """
UPDATE noetl.queue SET status = 'queued', worker_id = NULL, lease_until = NULL, claim_event_id = NULL,
    available_at = now(), max_attempts = max_attempts + 1
WHERE worker_id = $1 AND status = 'leased' AND claim_event_id = ANY($2::bigint[]) AND pool = $3
RETURNING command_id
"""

# Whether one of the workers $1 (null: any but those of $3) in one of the pools $2 (null: any) holds a command. Where
# they are given, it must be of the execution $4, have the id $5, and be of the playbook $6.
HOLDS = """
SELECT EXISTS (
    SELECT FROM noetl.queue
    WHERE worker_id IS NOT NULL AND (worker_id = ANY($1::text[]) OR ($1 IS NULL AND worker_id <> ALL($3::text[])))
      AND ($2::text[] IS NULL OR pool = ANY($2)) AND ($4::bigint IS NULL OR execution_id = $4)
      AND ($5::text IS NULL OR command_id = $5)
      AND ($6::bigint IS NULL OR COALESCE(context -> 'catalog_id', shared -> 'catalog_id') #>> '{}' = $6::text))
"""

_QUEUED = """
SELECT execution_id, command_id, event_id, attempts, shared || context AS context, status, worker_id,
       noetl.state_version(execution_id) AS state_version
FROM noetl.queue
"""

# Which events ($1) name a watermark ($4) other than that with which their step began.
FOREIGN_WATERMARKS = """
SELECT event_id FROM unnest($1::bigint[], $2::bigint[], $3::text[], $4::jsonb[])
    AS sent (event_id, execution_id, node_name, place)
WHERE NOT EXISTS (
    SELECT FROM noetl.event AS entered
    WHERE entered.execution_id = sent.execution_id AND entered.node_name = sent.node_name
      AND entered.event_type = 'step.enter' AND entered.context -> 'watermark' @> sent.place)
"""

# A command of the queue, by its id or by that of its command.issued event; the latter reads the whole queue.
QUEUED_COMMAND = f"{_QUEUED} WHERE execution_id = $1 AND command_id = $2"
QUEUED_EVENT = f"{_QUEUED} WHERE event_id = $1 LIMIT 1"

# Workers, with their pools, whose claims end within $2 seconds, because no heartbeat has arrived for a long time.
HOLDERS = """
SELECT DISTINCT worker_id, pool FROM noetl.queue
WHERE execution_id = ANY($1::bigint[]) AND status = 'leased' AND lease_until < now() + make_interval(secs => $2)
"""

# Ends the leases of lost workers ($2, by their pools $3), and those of workers ($4, $5) that were claimed before the
# present process of that name started ($6).
EXPIRE_LOST = """
UPDATE noetl.queue SET lease_until = now()
WHERE execution_id = ANY($1::bigint[]) AND status = 'leased' AND lease_until > now()
  AND ((worker_id, pool) IN (SELECT * FROM unnest($2::text[], $3::text[])) OR EXISTS (
      SELECT FROM unnest($4::text[], $5::text[], $6::bigint[]) AS life (worker_id, pool, since)
      WHERE life.worker_id = queue.worker_id AND life.pool = queue.pool AND queue.claim_event_id < life.since))
"""

# Which commands ($2) of executions ($1) the queue does not have; each looked up by index.
WITHOUT_ROW = """
SELECT command_id FROM unnest($1::bigint[], $2::text[]) AS mine (execution_id, command_id)
WHERE (SELECT queue.event_id FROM noetl.queue
       WHERE queue.execution_id = mine.execution_id AND queue.command_id = mine.command_id) IS NULL
"""

# Whether a command of the executions waits for a worker of a pool.
SOME_WAIT = """
SELECT EXISTS (
    SELECT FROM unnest($1::bigint[]) AS mine (execution_id)
    CROSS JOIN LATERAL (
        SELECT FROM noetl.queue
        WHERE queue.execution_id = mine.execution_id AND queue.pool = $2 AND queue.status = 'queued'
        ORDER BY queue.priority, queue.turn LIMIT 1  -- so that its own index is taken, not one of all that waits
    ) AS first)
"""

WITHDRAW = "DELETE FROM noetl.queue WHERE execution_id = $1 AND command_id = $2 AND status = 'queued'"

# Takes every command of an execution out of the queue, locking rows in the order in which settling does it.
WITHDRAW_ALL = """
WITH locked AS MATERIALIZED (
    SELECT command_id FROM noetl.queue WHERE execution_id = $1 ORDER BY command_id FOR UPDATE
)
DELETE FROM noetl.queue USING locked WHERE execution_id = $1 AND queue.command_id = locked.command_id
"""

# By pool and tool kind, how many commands wait and run, and for how many seconds the one that has waited longest does.
QUEUE_DEPTH = """
SELECT pool, tool_kind, COUNT(*) FILTER (WHERE status = 'queued') AS queued,
       COUNT(*) FILTER (WHERE status = 'leased') AS active,
       extract(epoch FROM now() - min(available_at) FILTER (WHERE status = 'queued'))::float8 AS oldest
FROM noetl.queue
GROUP BY pool, tool_kind
"""

PUT_DEAD_LETTER = """
INSERT INTO noetl.dead_letter (source, subject, payload, error, deliveries, message_id)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (source, message_id) DO UPDATE SET deliveries = EXCLUDED.deliveries, error = EXCLUDED.error
"""
DEAD_LETTER_COUNT = "SELECT count(*) FROM noetl.dead_letter"

# The newest $2 dead letters, with the first $3 bytes of each; only those with an id below $1, if it is given.
DEAD_LETTERS = """
SELECT dead_letter_id, subject, error, deliveries, created_at, octet_length(payload) AS size,
       substring(payload FROM 1 FOR $3::int) AS preview
FROM noetl.dead_letter WHERE $1::bigint IS NULL OR dead_letter_id < $1
ORDER BY dead_letter_id DESC LIMIT $2
"""
DEAD_LETTER = "SELECT subject, payload, message_id, created_at FROM noetl.dead_letter WHERE dead_letter_id = $1"
LOCK_DEAD_LETTER = "SELECT dead_letter_id FROM noetl.dead_letter WHERE dead_letter_id = $1 FOR UPDATE"
DELETE_DEAD_LETTER = "DELETE FROM noetl.dead_letter WHERE dead_letter_id = $1"
KEEP_DEAD_LETTER = """
UPDATE noetl.dead_letter SET error = $2, deliveries = deliveries + 1 WHERE dead_letter_id = $1 RETURNING dead_letter_id
"""

# The capacities of workers as they report them, each named once. Every process of the API hears them, and the first
# writes them. If a worker of that name reports for another pool, and has missed fewer than $5 reports, its capacity is
# not written; returns the name and that pool.
PUT_WORKERS = """
WITH given AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::jsonb[], $4::jsonb[]) AS given (worker_id, status, capacity, meta)
), other AS MATERIALIZED (
    SELECT known.worker_id, known.capacity ->> 'pool' AS pool
    FROM given JOIN noetl.runtime known USING (worker_id)
    WHERE known.capacity ->> 'pool' <> given.capacity ->> 'pool' AND known.status <> 'stopped'
      AND known.heartbeat > now() - make_interval(secs => $5 * (known.capacity ->> 'interval')::float8)
), put AS (
    INSERT INTO noetl.runtime AS known (worker_id, kind, status, capacity, meta, heartbeat)
    SELECT worker_id, 'worker', status, capacity, meta, now() FROM given
    WHERE worker_id NOT IN (SELECT worker_id FROM other)
    ORDER BY worker_id  -- every process locks rows in this order
    ON CONFLICT (worker_id) DO UPDATE SET status = EXCLUDED.status, capacity = EXCLUDED.capacity,
        meta = known.meta || EXCLUDED.meta, heartbeat = now()
    WHERE (known.status, known.capacity) IS DISTINCT FROM (EXCLUDED.status, EXCLUDED.capacity)
       OR NOT known.meta @> EXCLUDED.meta OR known.heartbeat < now() - interval '1 second'
)
SELECT worker_id, pool FROM other
"""
WORKERS = """
SELECT worker_id, status, capacity, meta, started_at, heartbeat,
       extract(epoch FROM now() - heartbeat)::float8 AS age
FROM noetl.runtime WHERE kind = 'worker' AND heartbeat > now() - make_interval(secs => $1)
ORDER BY worker_id
"""
