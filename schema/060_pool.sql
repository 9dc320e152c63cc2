-- The queue as the pool of workers takes from it: many commands in one claim, executions in turn.

-- What the commands of a loop share of their contexts; a command's own context lies over it.
ALTER TABLE noetl.queue ADD COLUMN IF NOT EXISTS shared jsonb NOT NULL DEFAULT '{}';
-- When a command's turn is among those of its priority, in thousandths: executions take turns by weight
-- (start-time fair queueing, Goyal et al. 1996).
ALTER TABLE noetl.queue ADD COLUMN IF NOT EXISTS turn bigint NOT NULL DEFAULT 0;

-- The furthest turn that was claimed: an execution that comes anew begins here, not at the beginning of time.
CREATE SEQUENCE IF NOT EXISTS noetl.queue_turn MINVALUE 0 START 0;

DROP INDEX IF EXISTS noetl.idx_queue_status_available;
CREATE INDEX IF NOT EXISTS idx_queue_turn ON noetl.queue (priority DESC, turn, event_id) WHERE status = 'queued';
CREATE INDEX IF NOT EXISTS idx_queue_execution_turn ON noetl.queue (execution_id, turn);

-- Rows live for milliseconds: what they leave behind is cleared away early.
ALTER TABLE noetl.queue SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
                             autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 5000);

-- As noetl.is_open, without waiting: false too while a cancellation is being written. For who holds locks already.
CREATE OR REPLACE FUNCTION noetl.is_open_now(execution bigint) RETURNS boolean
    LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
BEGIN
    RETURN pg_try_advisory_xact_lock_shared(hashtext('noetl.gate'), hashint8(execution)) AND NOT EXISTS (
        SELECT FROM noetl.event WHERE execution_id = execution AND event_type = 'execution.cancelled');
END $$;

-- The turn after which the next commands of an execution come: its own last one, but no earlier than those
-- that wait now, or than the last that was claimed.
CREATE OR REPLACE FUNCTION noetl.last_turn(execution bigint, class integer) RETURNS bigint
    LANGUAGE sql STABLE AS $$
    SELECT GREATEST(
        (SELECT max(turn) FROM noetl.queue WHERE execution_id = execution AND priority = class),
        COALESCE(
            (SELECT turn FROM noetl.queue WHERE status = 'queued' AND priority = class ORDER BY turn LIMIT 1),
            (SELECT last_value FROM noetl.queue_turn)))
$$;

-- The execution's state as a worker caches it: changes with every event that the state is folded from.
CREATE OR REPLACE FUNCTION noetl.state_version(execution bigint) RETURNS text
    LANGUAGE sql STABLE AS $$
    SELECT count(*) || '-' || max(event_id) FROM noetl.event
    WHERE execution_id = execution AND event_type IN (
        'playbook.initialized', 'playbook.completed', 'playbook.failed', 'workflow.initialized',
        'workflow.completed', 'workflow.failed', 'execution.resumed', 'execution.cancelled',
        'step.enter', 'step.exit', 'step.skipped', 'loop.started', 'loop.done', 'loop.fanout.started',
        'loop.fanin.completed', 'warning')
$$;

-- Claims up to as many commands as there are names, in one transaction: by priority, then by turn, none that
-- another claim holds, has ended, or belongs to a cancelled execution. The names become the ids of the
-- command.claimed events; asking again with the same ones gives the same answer. ``limits`` bounds commands by
-- tool kind. Gives one row for the commands of a step that share their context: ``answer`` is their JSON.
CREATE OR REPLACE FUNCTION noetl.claim_many(worker text, names bigint[], lease float8, limits jsonb)
    RETURNS TABLE (execution_id bigint, node_name text, tool_kind text, waited float8[], answer text)
    LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    bounded text[] := ARRAY(SELECT jsonb_object_keys(limits));
    latest bigint;
    reached bigint := 0;
BEGIN
    -- the same request sent twice waits for itself, and then sees what the first one did
    PERFORM pg_advisory_xact_lock(hashtext('noetl.claims'), hashint8(names[1]));
    FOR execution_id, node_name, tool_kind, waited, answer, latest IN
    WITH before AS MATERIALIZED (
        SELECT * FROM noetl.queue
        WHERE worker_id = worker AND status = 'leased' AND claim_event_id = ANY(names)
    ), room AS (
        SELECT CASE WHEN EXISTS (SELECT FROM before) THEN 0 ELSE cardinality(names) END AS places
    ), unbounded AS MATERIALIZED (
        SELECT execution_id, command_id, priority, turn, event_id FROM noetl.queue
        WHERE status = 'queued' AND available_at <= now() AND (target IS NULL OR target = worker)
          AND tool_kind <> ALL(bounded)
        ORDER BY priority DESC, turn, event_id
        LIMIT (SELECT places FROM room) FOR UPDATE SKIP LOCKED
    ), fit AS MATERIALIZED (
        SELECT found.* FROM jsonb_each_text(limits) AS bound (kind, most), LATERAL (
            SELECT execution_id, command_id, priority, turn, event_id FROM noetl.queue
            WHERE status = 'queued' AND available_at <= now() AND (target IS NULL OR target = worker)
              AND tool_kind = bound.kind
            ORDER BY priority DESC, turn, event_id
            LIMIT LEAST(bound.most::int, (SELECT places FROM room)) FOR UPDATE SKIP LOCKED) found
    ), picked AS MATERIALIZED (
        SELECT * FROM (SELECT * FROM unbounded UNION ALL SELECT * FROM fit) either
        ORDER BY priority DESC, turn, event_id LIMIT (SELECT places FROM room)
    ), alive AS MATERIALIZED (
        SELECT id FROM (SELECT DISTINCT execution_id AS id FROM picked) asked WHERE noetl.is_open_now(id)
    ), over AS (
        SELECT execution_id, command_id FROM picked WHERE EXISTS (
            SELECT FROM noetl.event ended
            WHERE ended.execution_id = picked.execution_id AND ended.meta ->> 'command_id' = picked.command_id
              AND ended.meta ? 'command_id' AND ended.event_type IN
                ('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed'))
    ), removed AS (
        DELETE FROM noetl.queue USING over
        WHERE queue.execution_id = over.execution_id AND queue.command_id = over.command_id
    ), named AS MATERIALIZED (
        SELECT execution_id, command_id,
               names[row_number() OVER (ORDER BY priority DESC, turn, event_id)] AS name
        FROM picked
        WHERE execution_id IN (SELECT id FROM alive)
          AND (execution_id, command_id) NOT IN (SELECT execution_id, command_id FROM over)
    ), leased AS (
        UPDATE noetl.queue SET status = 'leased', worker_id = worker, claim_event_id = named.name,
            attempts = attempts + 1, lease_until = now() + make_interval(secs => lease)
        FROM named
        WHERE queue.execution_id = named.execution_id AND queue.command_id = named.command_id
        RETURNING queue.*
    ), claimed AS (
        INSERT INTO noetl.event (execution_id, event_id, event_type, node_name, status, catalog_id,
            parent_execution_id, meta, current_index, worker_id)
        SELECT execution_id, claim_event_id, 'command.claimed', node_name, 'RUNNING',
            (COALESCE(context -> 'catalog_id', shared -> 'catalog_id') #>> '{}')::bigint,
            (COALESCE(context -> 'parent_execution_id', shared -> 'parent_execution_id') #>> '{}')::bigint,
            (context -> 'meta') || jsonb_strip_nulls(jsonb_build_object(
                'waited', round(extract(epoch FROM now() - created_at), 4),
                'claim', CASE WHEN attempts > 1 THEN attempts END)),
            (context ->> 'index')::int, worker
        FROM leased
    ), held AS MATERIALIZED (
        SELECT * FROM before UNION ALL SELECT * FROM leased
    ), version AS MATERIALIZED (
        SELECT id, noetl.state_version(id) AS state_version
        FROM (SELECT DISTINCT execution_id AS id FROM held) asked
    )
    SELECT execution_id, node_name, tool_kind,
        array_agg(extract(epoch FROM now() - created_at)::float8),
        json_build_object(
            'execution_id', execution_id::text, 'tool_kind', tool_kind, 'state_version', state_version,
            'shared', shared,
            'commands', json_agg(json_build_object(
                'command_id', command_id, 'event_id', event_id::text, 'claim_event_id', claim_event_id::text,
                'claim', attempts, 'context', context) ORDER BY turn, event_id))::text,
        max(turn)
    FROM held JOIN version ON version.id = execution_id
    GROUP BY execution_id, state_version, shared, node_name, tool_kind

    LOOP
        reached := GREATEST(reached, latest);
        RETURN NEXT;
    END LOOP;
    IF reached > (SELECT last_value FROM noetl.queue_turn) THEN
        PERFORM setval('noetl.queue_turn', reached);
    END IF;
END $$;
