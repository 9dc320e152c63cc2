-- Tables of the control plane. noetl.execution is a projection: it can always be rebuilt from noetl.event.

CREATE TABLE IF NOT EXISTS noetl.execution (
    execution_id         bigint PRIMARY KEY,
    catalog_id           bigint,
    parent_execution_id  bigint,
    playbook             text,
    status               text        NOT NULL DEFAULT 'RUNNING'
        CHECK (status IN ('RUNNING', 'COMPLETED', 'FAILED', 'CANCELLED')),
    last_event_type      text,
    last_node_name       text,
    last_event_id        bigint,
    start_time           timestamptz,
    end_time             timestamptz,
    state                jsonb       NOT NULL DEFAULT '{}',
    error                text,
    created_at           timestamptz NOT NULL DEFAULT now(),
    updated_at           timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS idx_execution_status ON noetl.execution (status, execution_id);
CREATE INDEX IF NOT EXISTS idx_execution_parent ON noetl.execution (parent_execution_id)
    WHERE parent_execution_id IS NOT NULL;

-- How far each projection shard has read: everything below xact_id is in the projection.
CREATE TABLE IF NOT EXISTS noetl.projection_checkpoint (
    shard       integer     PRIMARY KEY,
    xact_id     xid8        NOT NULL,
    events      bigint      NOT NULL DEFAULT 0,
    updated_at  timestamptz NOT NULL DEFAULT now()
);

-- Which projection shard an execution belongs to, where it is not the one of its hash.
CREATE TABLE IF NOT EXISTS noetl.execution_shard (
    execution_id  bigint  PRIMARY KEY,
    shard         integer NOT NULL
);

-- Named positions of other readers of the log (sensors, exporters).
CREATE TABLE IF NOT EXISTS noetl.checkpoint (
    name        text        PRIMARY KEY,
    position    jsonb       NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT now()
);

-- Texts of playbooks: those that were registered, numbered from 1 for each path, and as version 0 those that ran
-- from files. What an execution runs is the row of its catalog_id, whose content never changes.
CREATE TABLE IF NOT EXISTS noetl.catalog (
    catalog_id  bigint      PRIMARY KEY,
    path        text        NOT NULL,
    version     integer     NOT NULL DEFAULT 0,
    kind        text        NOT NULL DEFAULT 'Playbook',
    content     text        NOT NULL,
    payload     jsonb,                                 -- the content as JSON, of registered ones
    meta        jsonb       NOT NULL DEFAULT '{}',     -- its metadata
    model       text,                                  -- its canonical model as JSON, in the order of the text
    sha256      text        NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX IF NOT EXISTS uidx_catalog_version ON noetl.catalog (path, version) WHERE version > 0;
CREATE UNIQUE INDEX IF NOT EXISTS uidx_catalog_run ON noetl.catalog (path, sha256) WHERE version = 0;
CREATE INDEX IF NOT EXISTS idx_catalog_sha256 ON noetl.catalog (path, sha256, version);

-- Commands that wait for a worker or run. A row lives from issue to end; the log keeps the history.
CREATE TABLE IF NOT EXISTS noetl.queue (
    execution_id    bigint      NOT NULL,
    command_id      text        NOT NULL,
    event_id        bigint      NOT NULL,
    node_name       text        NOT NULL,
    tool_kind       text        NOT NULL,
    pool            text        NOT NULL DEFAULT 'default',  -- whose workers may claim the command
    status          text        NOT NULL DEFAULT 'queued' CHECK (status IN ('queued', 'leased')),
    priority        integer     NOT NULL DEFAULT 0,
    -- Position among the commands of its priority, in thousandths: executions take turns by weight
    -- (start-time fair queueing, Goyal et al. 1996).
    turn            bigint      NOT NULL DEFAULT 0,
    attempts        integer     NOT NULL DEFAULT 0,
    max_attempts    integer     NOT NULL DEFAULT 3,
    available_at    timestamptz NOT NULL DEFAULT now(),
    lease_until     timestamptz,
    worker_id       text,
    claim_event_id  bigint,     -- the command.claimed event of the lease: recognises a claim that is sent twice
    shared          jsonb       NOT NULL DEFAULT '{}',  -- the part of the context that commands of a loop share
    context         jsonb       NOT NULL DEFAULT '{}',  -- the command's own part, which overrides the shared one
    created_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (execution_id, command_id)
);
CREATE INDEX IF NOT EXISTS idx_queue_claim ON noetl.queue (worker_id, claim_event_id) WHERE worker_id IS NOT NULL;
DROP INDEX IF EXISTS noetl.idx_queue_worker;  -- the same without claims
CREATE INDEX IF NOT EXISTS idx_queue_pool_turn ON noetl.queue (pool, priority DESC, turn, event_id)
    WHERE status = 'queued';
CREATE INDEX IF NOT EXISTS idx_queue_execution_pool ON noetl.queue (execution_id, pool, priority, turn)
    WHERE status = 'queued';
-- Rows live for milliseconds, so dead rows are vacuumed early.
ALTER TABLE noetl.queue SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
                             autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 5000);

-- Worker processes, as their heartbeats report them.
CREATE TABLE IF NOT EXISTS noetl.runtime (
    worker_id   text        PRIMARY KEY,
    kind        text        NOT NULL DEFAULT 'worker',
    status      text        NOT NULL DEFAULT 'ready',
    capacity    jsonb       NOT NULL DEFAULT '{}',
    meta        jsonb       NOT NULL DEFAULT '{}',
    started_at  timestamptz NOT NULL DEFAULT now(),
    heartbeat   timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE IF NOT EXISTS noetl.schedule (
    path        text        PRIMARY KEY,
    cron        text        NOT NULL,
    timezone    text        NOT NULL DEFAULT 'UTC',
    workload    jsonb       NOT NULL DEFAULT '{}',
    enabled     boolean     NOT NULL DEFAULT true,
    updated_at  timestamptz NOT NULL DEFAULT now()
);

-- Messages that could not be applied to the log; never dropped silently.
CREATE TABLE IF NOT EXISTS noetl.dead_letter (
    dead_letter_id  bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source          text        NOT NULL,
    subject         text,
    payload         bytea       NOT NULL,
    error           text        NOT NULL,
    deliveries      integer     NOT NULL DEFAULT 1,
    message_id      text,       -- position in the source: a message that is delivered again is stored once
    created_at      timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX IF NOT EXISTS uidx_dead_letter_message ON noetl.dead_letter (source, message_id);

-- Whether commands of an execution may still be issued, queued and claimed. The call keeps the execution from being
-- cancelled until the calling transaction ends: its writes are committed before the execution.cancelled event, or not
-- at all. Volatile, so that it looks into the log after it has waited for the lock.
CREATE OR REPLACE FUNCTION noetl.is_open(execution bigint) RETURNS boolean
    LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(hashtext('noetl.gate'), hashint8(execution));
    RETURN NOT EXISTS (
        SELECT FROM noetl.event WHERE execution_id = execution AND event_type = 'execution.cancelled');
END $$;

-- Waits until no other transaction issues commands of an execution, and keeps others from it until this one ends.
CREATE OR REPLACE FUNCTION noetl.close_gate(execution bigint) RETURNS void
    LANGUAGE sql VOLATILE AS $$
    SELECT pg_advisory_xact_lock(hashtext('noetl.gate'), hashint8(execution))
$$;
