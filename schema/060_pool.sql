-- Claims from the queue: many commands at once, executions in turn.

-- The highest turn that was claimed, in any pool: a new execution begins here, not at zero.
CREATE SEQUENCE IF NOT EXISTS noetl.queue_turn MINVALUE 0 START 0;

-- Like noetl.is_open, without waiting: also false while a cancellation is being written. For callers that hold locks.
CREATE OR REPLACE FUNCTION noetl.is_open_now(execution bigint) RETURNS boolean
    LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
BEGIN
    RETURN pg_try_advisory_xact_lock_shared(hashtext('noetl.gate'), hashint8(execution)) AND NOT EXISTS (
        SELECT FROM noetl.event WHERE execution_id = execution AND event_type = 'execution.cancelled');
END $$;

-- The turn after which the next commands of an execution are queued: the last of its own waiting commands, but no
-- earlier than the first waiting command of the same pool or, if none waits, than the last that was claimed.
CREATE OR REPLACE FUNCTION noetl.last_turn(execution bigint, class integer, place text) RETURNS bigint
    LANGUAGE sql STABLE AS $$
    SELECT GREATEST(
        (SELECT max(turn) FROM noetl.queue
         WHERE execution_id = execution AND status = 'queued' AND pool = place AND priority = class),
        COALESCE(
            (SELECT turn FROM noetl.queue
             WHERE status = 'queued' AND pool = place AND priority = class ORDER BY turn LIMIT 1),
            (SELECT last_value FROM noetl.queue_turn)))
$$;

-- The version of an execution's state, by which workers cache it: changes with every event of the state.
CREATE OR REPLACE FUNCTION noetl.state_version(execution bigint) RETURNS text
    LANGUAGE sql STABLE AS $$
    SELECT count(*) || '-' || max(event_id) FROM noetl.event
    WHERE execution_id = execution AND event_type IN (
        'playbook.initialized', 'playbook.completed', 'playbook.failed', 'workflow.initialized',
        'workflow.completed', 'workflow.failed', 'execution.resumed', 'execution.cancelled',
        'step.enter', 'step.exit', 'step.skipped', 'loop.started', 'loop.done', 'loop.fanout.started',
        'loop.fanin.completed', 'warning')
$$;

-- Applies the consequences of events: ended commands leave the queue and are announced to the processes that wait for
-- them, heartbeats extend the leases of their commands. ``runs``: by step and tool kind, how long the removed commands
-- ran. Rows are locked in the order of the primary key; every transaction locks rows of the queue before it writes events.
--
-- If ``checked``, the events come from workers, and count only if their sender holds the command: the queue must have it
-- with the same worker, claim, step and meta (``own_keys`` of an event's meta are its own), in one of the ``pools`` (null:
-- any). A command whose lease has expired is still held by its last worker until another one claims it. ``taken``: the ids
-- of the events that count. Of a command that its holder has ended, chunks that arrive late count too.
CREATE OR REPLACE FUNCTION noetl.settle(
        checked boolean, pools text[], own_keys text[],
        ended_ids bigint[], ended_of bigint[], ended text[], ended_steps text[], ended_workers text[],
        ended_claims bigint[], ended_meta jsonb, durations float8[],
        other_ids bigint[], other_of bigint[], other text[], other_steps text[], other_workers text[],
        other_claims bigint[], other_meta jsonb, beats boolean[], lease float8,
        OUT runs jsonb, OUT taken bigint[])
    LANGUAGE plpgsql VOLATILE
    -- by the primary key, whatever the queue held when it was planned
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
    SET enable_nestloop = off AS $$
DECLARE
    notices int;
BEGIN
    IF cardinality(ended) > 0 AND cardinality(other) > 0 THEN  -- each statement locks in order, the two together do not
        PERFORM FROM noetl.queue WHERE execution_id = ANY(ended_of || other_of) AND command_id = ANY(ended || other)
        ORDER BY execution_id, command_id FOR UPDATE;
    END IF;
    IF checked AND cardinality(other) > 0 THEN
        SELECT array_agg(id) INTO taken
        FROM ROWS FROM (
            unnest(other_ids, other_of, other, other_steps, other_workers, other_claims, beats),
            jsonb_array_elements(other_meta)) AS one (id, execution, command, step, worker, claim, beat, meta)
        WHERE (SELECT queue.event_id FROM noetl.queue
               WHERE queue.execution_id = execution AND command_id = command AND worker_id = worker
                 AND claim_event_id = claim AND node_name = step AND context -> 'meta' = one.meta
                 AND (pools IS NULL OR pool = ANY(pools))) IS NOT NULL
           OR (NOT beat AND (
               SELECT past.event_id FROM noetl.event past
               WHERE past.execution_id = execution AND past.meta ->> 'command_id' = command AND past.meta ? 'command_id'
                 AND past.event_type IN ('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed')
                 AND past.worker_id = worker AND COALESCE(past.parent_event_id, 0) = claim
                 AND past.node_name = step AND past.meta - own_keys = one.meta) IS NOT NULL);
    END IF;
    IF cardinality(ended) > 0 THEN
        WITH gone AS (
            DELETE FROM noetl.queue
            WHERE execution_id = ANY(ended_of) AND command_id = ANY(ended)
              -- no join, which might read the whole queue
              AND CASE WHEN checked THEN
                  (pools IS NULL OR pool = ANY(pools))
                  AND (execution_id, command_id, worker_id, claim_event_id, node_name, context -> 'meta') IN (
                      SELECT * FROM ROWS FROM (
                          unnest(ended_of, ended, ended_workers, ended_claims, ended_steps),
                          jsonb_array_elements(ended_meta)) AS one)
              ELSE (execution_id, command_id) IN (SELECT * FROM unnest(ended_of, ended)) END IS TRUE
            RETURNING execution_id, command_id, worker_id, claim_event_id, node_name, tool_kind,
                context -> 'meta' AS own_meta
        ), told AS (
            -- in lists below the 8,000 bytes of a notification; no command id has 3,000
            SELECT pg_notify('noetl_command_ends', jsonb_agg(command_id)::text) FROM (
                SELECT command_id,
                    sum(octet_length(to_json(command_id)::text) + 2) OVER (ORDER BY command_id) / 4000 AS part
                FROM gone) parts
            GROUP BY part
        ), held AS MATERIALIZED (
            SELECT id, node_name, tool_kind, duration
            FROM gone JOIN ROWS FROM (
                unnest(ended_ids, ended_of, ended, ended_workers, ended_claims, ended_steps, durations),
                jsonb_array_elements(ended_meta))
                AS one (id, execution_id, command_id, worker, claim, step, duration, meta) USING (execution_id, command_id)
            WHERE NOT checked
               OR (worker, claim, step, one.meta) = (worker_id, claim_event_id, node_name, own_meta)
        )
        SELECT (SELECT count(*) FROM told), (
            SELECT jsonb_agg(jsonb_build_array(node_name, tool_kind, seconds)) FROM (
                SELECT node_name, tool_kind, array_agg(duration) AS seconds
                FROM held WHERE duration IS NOT NULL
                GROUP BY node_name, tool_kind) lists),
            CASE WHEN checked THEN taken || (SELECT array_agg(id) FROM held) END
        INTO notices, runs, taken;
    END IF;
    IF true = ANY(beats) THEN
        UPDATE noetl.queue SET lease_until = now() + make_interval(secs => lease)
        WHERE execution_id = ANY(other_of) AND command_id = ANY(other) AND status = 'leased'
          AND ((execution_id, command_id, worker_id) IN (
              SELECT execution, command, worker FROM unnest(other_ids, other_of, other, other_workers, beats)
                  AS one (id, execution, command, worker, beat) WHERE beat AND (NOT checked OR id = ANY(taken)))) IS TRUE;
    END IF;
END $$;

DO $$ BEGIN
    IF to_regtype('noetl.queue_place') IS NULL THEN
        CREATE TYPE noetl.queue_place AS (
            execution_id bigint, command_id text, priority integer, turn bigint, event_id bigint, last boolean);
    END IF;
END $$;

-- Claims up to as many commands as there are ``ids``, in one transaction: by priority, then by turn, none that another
-- claim holds, has ended or belongs to a cancelled execution. ``workers`` are the workers of the ids: the ids of one worker
-- are one claim, and the commands go to the claims in the order of their ids here. The ids become those of the
-- command.claimed events; a claim that is sent again with the same ids, with whatever other claims, returns the same
-- answer, without commands that the worker no longer holds. ``limits`` bounds the commands by tool kind; ``own_pool`` is
-- the pool of the workers and of the commands; ``wanted_of`` and ``wanted``, if given, are the executions and ids of the
-- only commands to claim, which limits do not bound.
-- Returns one row per worker, step and shared context; ``answer`` is the JSON of its commands.
CREATE OR REPLACE FUNCTION noetl.claim(
        workers text[], ids bigint[], lease float8, limits jsonb, own_pool text, wanted_of bigint[], wanted text[])
    RETURNS TABLE (worker text, execution_id bigint, node_name text, tool_kind text, waited float8[], version text,
                   answer text)
    LANGUAGE plpgsql VOLATILE
    -- planned once per session, whatever the tables hold then: every lookup uses an index
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off
    SET enable_mergejoin = off AS $$
#variable_conflict use_column
DECLARE
    capacity int;
    claims int;
    lasts int;
    answered text[];  -- workers whose claims have been made before
    open_ids bigint[];
    open_workers text[];
    picked noetl.queue_place[];
    bound record;
    latest bigint;
    reached bigint := 0;
    lowest bigint := (SELECT min(claim_id) FROM unnest(ids) AS claim_id);
    highest bigint := (SELECT max(claim_id) FROM unnest(ids) AS claim_id);
BEGIN
    -- a claim that is sent twice, or whose ids another worker uses, waits, and then sees what the first one did
    PERFORM pg_advisory_xact_lock(hashtext('noetl.claims'), lock)
    FROM (SELECT DISTINCT hashint8(min(id)) AS lock FROM unnest(ids, workers) AS given (id, name)
          GROUP BY name ORDER BY lock) locks;
    answered := ARRAY(SELECT DISTINCT worker_id FROM noetl.queue
                      WHERE worker_id = ANY(workers) AND status = 'leased'
                        AND claim_event_id BETWEEN lowest AND highest AND claim_event_id = ANY(ids));
    SELECT count(*), count(DISTINCT name) INTO capacity, claims
    FROM unnest(workers) AS name WHERE name <> ALL(answered);
    -- separate, simple statements lock the rows
    IF wanted IS NOT NULL THEN
        SELECT array_agg(one) INTO picked FROM (
            SELECT (execution_id, command_id, priority, turn, event_id, false)::noetl.queue_place AS one FROM noetl.queue
            WHERE execution_id = ANY(wanted_of) AND command_id = ANY(wanted)
              AND status = 'queued' AND pool = own_pool AND available_at <= now()
            ORDER BY execution_id, command_id
            LIMIT capacity FOR UPDATE SKIP LOCKED) named;
    ELSE
        SELECT array_agg(one) INTO picked FROM (
            SELECT (execution_id, command_id, priority, turn, event_id,
                    attempts > 0 AND attempts >= max_attempts - 1)::noetl.queue_place AS one FROM noetl.queue
            WHERE status = 'queued' AND pool = own_pool AND available_at <= now()
              AND NOT limits ? tool_kind
            ORDER BY priority DESC, turn, event_id
            LIMIT capacity FOR UPDATE SKIP LOCKED) unbounded;
        FOR bound IN SELECT key AS kind, value::int AS most FROM jsonb_each_text(limits) LOOP
            SELECT picked || array_agg(one) INTO picked FROM (
                SELECT (execution_id, command_id, priority, turn, event_id,
                    attempts > 0 AND attempts >= max_attempts - 1)::noetl.queue_place AS one FROM noetl.queue
                WHERE status = 'queued' AND pool = own_pool AND available_at <= now()
                  AND tool_kind = bound.kind
                ORDER BY priority DESC, turn, event_id
                LIMIT LEAST(bound.most, capacity) FOR UPDATE SKIP LOCKED) fit;
        END LOOP;
    END IF;
    -- the commands claimed with these ids have ended since, or were taken from the worker: an id serves once
    answered := answered || ARRAY(
        SELECT workers[array_position(ids, event_id)]
        FROM (SELECT DISTINCT execution_id AS id FROM unnest(picked)) asked
        CROSS JOIN LATERAL (
            SELECT event_id FROM noetl.event
            WHERE execution_id = id AND event_id BETWEEN lowest AND highest AND event_id = ANY(ids)
            OFFSET 0) AS used);
    lasts := (SELECT count(*) FROM unnest(picked) WHERE last);
    -- the first ids of the claims come first, as many as there are last attempts
    SELECT array_agg(id ORDER BY first > lasts, place), array_agg(name ORDER BY first > lasts, place), count(*),
        count(DISTINCT name)
    INTO open_ids, open_workers, capacity, claims
    FROM (
        SELECT id, name, place, CASE WHEN nth = 1 THEN row_number() OVER (PARTITION BY nth ORDER BY place)
                                     ELSE lasts + 1 END AS first
        FROM (
            SELECT *, row_number() OVER (PARTITION BY name ORDER BY place) AS nth
            FROM unnest(ids, workers) WITH ORDINALITY AS given (id, name, place)
            WHERE name <> ALL(answered)) counted) open;
    FOR worker, execution_id, node_name, tool_kind, waited, version, answer, latest IN
    WITH chosen AS MATERIALIZED (
        -- a claim gets at most one command with one attempt left, so that one that kills its workers fails alone
        SELECT * FROM (
            SELECT *, row_number() OVER (PARTITION BY last ORDER BY priority DESC, turn, event_id) AS place
            FROM unnest(picked)) ranked
        WHERE NOT last OR place <= claims
        ORDER BY priority DESC, turn, event_id LIMIT capacity
    ), alive AS MATERIALIZED (
        SELECT id FROM (SELECT DISTINCT execution_id AS id FROM chosen) asked WHERE noetl.is_open_now(id)
    ), over AS MATERIALIZED (
        -- a scalar subquery: each command by index, where a join might read the whole log
        SELECT execution_id, command_id FROM chosen WHERE (
            SELECT ended.event_id FROM noetl.event ended
            WHERE ended.execution_id = chosen.execution_id AND ended.meta ->> 'command_id' = chosen.command_id
              AND ended.meta ? 'command_id' AND ended.event_type IN
                ('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed')) IS NOT NULL
    ), removed AS (
        DELETE FROM noetl.queue USING over
        WHERE queue.execution_id = over.execution_id AND queue.command_id = over.command_id
    ), named AS MATERIALIZED (
        SELECT execution_id, command_id, open_ids[position] AS claim_id, open_workers[position] AS claimant
        FROM (
            SELECT *, row_number() OVER (ORDER BY last DESC, priority DESC, turn, event_id) AS position
            FROM chosen
            WHERE execution_id IN (SELECT id FROM alive)
              AND (execution_id, command_id) NOT IN (SELECT execution_id, command_id FROM over)) placed
    ), leased AS (
        UPDATE noetl.queue SET status = 'leased', worker_id = named.claimant, claim_event_id = named.claim_id,
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
                'waited', round(extract(epoch FROM now() - available_at), 4),
                'claim', CASE WHEN attempts > 1 THEN attempts END)),
            (context ->> 'index')::int, worker_id
        FROM leased
        ON CONFLICT DO NOTHING  -- a command that a resumed driver queues again may count its claims again
    ), held AS MATERIALIZED (
        SELECT * FROM leased
        UNION ALL
        SELECT * FROM noetl.queue
        WHERE answered <> '{}' AND worker_id = ANY(answered) AND status = 'leased' AND claim_event_id = ANY(ids)
    ), versions AS MATERIALIZED (
        SELECT id, noetl.state_version(id) AS state_version
        FROM (SELECT DISTINCT execution_id AS id FROM held) asked
    )
    SELECT worker_id, execution_id, node_name, tool_kind,
        array_agg(extract(epoch FROM now() - available_at)::float8), state_version,
        json_build_object(
            'execution_id', execution_id::text, 'tool_kind', tool_kind, 'state_version', state_version,
            'shared', shared,
            'commands', json_agg(json_build_object(
                'command_id', command_id, 'event_id', event_id::text, 'claim_event_id', claim_event_id::text,
                'claim', attempts, 'context', context) ORDER BY turn, event_id))::text,
        max(turn)
    FROM held JOIN versions ON versions.id = execution_id
    GROUP BY worker_id, execution_id, state_version, shared, node_name, tool_kind

    LOOP
        reached := GREATEST(reached, latest);
        RETURN NEXT;
    END LOOP;
    IF reached > (SELECT last_value FROM noetl.queue_turn) THEN
        PERFORM setval('noetl.queue_turn', reached);
    END IF;
END $$;
