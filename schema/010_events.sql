-- The event log: the only truth about every execution. Append-only.
-- Range-partitioned by execution_id, which grows with time: dropping a partition is the retention policy.

CREATE SCHEMA IF NOT EXISTS noetl;

CREATE TABLE IF NOT EXISTS noetl.event (
    execution_id         bigint           NOT NULL,
    event_id             bigint           NOT NULL,
    event_type           text             NOT NULL,
    catalog_id           bigint,
    parent_event_id      bigint,
    parent_execution_id  bigint,
    node_name            text,
    node_type            text,
    status               text,
    duration             double precision,            -- seconds
    context              jsonb,
    result               jsonb,
    meta                 jsonb            NOT NULL DEFAULT '{}',
    error                text,
    current_index        integer,
    current_item         jsonb,
    worker_id            text,
    created_at           timestamptz      NOT NULL DEFAULT clock_timestamp(),
    xact_id              xid8             NOT NULL DEFAULT pg_current_xact_id(),  -- commit-order reads
    PRIMARY KEY (execution_id, event_id),
    CONSTRAINT event_result_shape CHECK (
        result IS NULL
        OR (jsonb_typeof(result) = 'object' AND result ? 'status'
            AND result - '{status,context,reference,data,extracted}'::text[] = '{}'::jsonb)
    )
) PARTITION BY RANGE (execution_id);

-- Catches executions outside of every partition made ahead. Normally empty.
CREATE TABLE IF NOT EXISTS noetl.event_default PARTITION OF noetl.event DEFAULT;

-- A command is issued at most once.
CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_command_issued_command_id
    ON noetl.event (execution_id, (meta ->> 'command_id'))
    WHERE event_type = 'command.issued' AND meta ? 'command_id';

-- A command ends at most once, however many workers ran it.
CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_command_end_command_id
    ON noetl.event (execution_id, (meta ->> 'command_id'))
    WHERE event_type IN ('command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed')
      AND meta ? 'command_id';

CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_loop_done_loop_id
    ON noetl.event (execution_id, (meta ->> 'loop_id'))
    WHERE event_type = 'loop.done' AND meta ? 'loop_id';

CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_loop_fanin_completed_loop_id
    ON noetl.event (execution_id, (meta ->> 'loop_id'))
    WHERE event_type = 'loop.fanin.completed' AND meta ? 'loop_id';

-- A visit of a step ends at most once in each epoch (an epoch is one start or resumption of the execution).
CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_step_exit_visit
    ON noetl.event (execution_id, node_name, (meta ->> 'visit'), (meta ->> 'epoch'))
    WHERE event_type = 'step.exit';

-- One driver at a time works on a visit: the one whose turn it is. A turn is taken over from a dead process.
CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_step_enter_turn
    ON noetl.event (execution_id, node_name, (meta ->> 'visit'), (meta ->> 'epoch'), (meta ->> 'turn'))
    WHERE event_type = 'step.enter' AND meta ? 'turn';

-- An issued command that is taken over from a silent worker is taken over once for each claim number.
CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_command_claim
    ON noetl.event (execution_id, (meta ->> 'command_id'), (meta ->> 'claim'))
    WHERE event_type = 'command.claimed' AND meta ? 'claim';

-- An execution ends at most once in each epoch.
CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_terminal_epoch
    ON noetl.event (execution_id, (meta ->> 'epoch'))
    WHERE event_type IN ('playbook.completed', 'playbook.failed', 'execution.cancelled');

-- An epoch of an execution without a Dagster run is reported to Dagster at most once.
CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_reported_epoch
    ON noetl.event (execution_id, (meta ->> 'epoch'))
    WHERE event_type = 'execution.reported';

CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_resumed_epoch
    ON noetl.event (execution_id, (meta ->> 'epoch'))
    WHERE event_type IN ('playbook.initialized', 'execution.resumed');

-- Fan-in counts and loop recovery; by index, so that one slice of a large loop is found among all the others.
CREATE INDEX IF NOT EXISTS idx_event_loop_id_type
    ON noetl.event (execution_id, (meta ->> 'loop_id'), event_type, current_index)
    WHERE meta ? 'loop_id';

-- The slowest iterations. Those that take less time than it costs to find them are not in it.
CREATE INDEX IF NOT EXISTS idx_event_slow ON noetl.event (execution_id, node_name, duration, event_id)
    WHERE duration >= 0.1;

-- The few events that make up the state of an execution.
CREATE INDEX IF NOT EXISTS idx_event_state
    ON noetl.event (execution_id, event_id)
    WHERE event_type IN (
        'playbook.initialized', 'playbook.completed', 'playbook.failed', 'workflow.initialized',
        'workflow.completed', 'workflow.failed', 'execution.resumed', 'execution.cancelled',
        'step.enter', 'step.exit', 'step.skipped', 'check.evaluated', 'loop.started', 'loop.done',
        'loop.fanout.started', 'loop.fanin.completed', 'warning');
DROP INDEX IF EXISTS noetl.idx_event_lifecycle;  -- the same without checks

-- A check of a visit's result is evaluated at most once in each epoch.
CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_check_visit
    ON noetl.event (execution_id, node_name, (meta ->> 'visit'), (meta ->> 'epoch'), (meta ->> 'check'))
    WHERE event_type = 'check.evaluated';

-- A chunk of a visit's result is told of at most once, whatever attempt of its command made it.
CREATE UNIQUE INDEX IF NOT EXISTS uidx_event_chunk
    ON noetl.event (execution_id, node_name, (meta ->> 'visit'), ((meta ->> 'chunk_index')::int))
    WHERE event_type = 'call.partial';

-- Results of assets, the latest first: what another playbook reads.
CREATE INDEX IF NOT EXISTS idx_event_asset
    ON noetl.event ((meta ->> 'asset'), event_id)
    WHERE event_type = 'step.exit' AND status = 'COMPLETED' AND meta ? 'asset';
CREATE INDEX IF NOT EXISTS idx_event_asset_partition
    ON noetl.event ((meta ->> 'asset'), (meta ->> 'partition'), event_id)
    WHERE event_type = 'step.exit' AND status = 'COMPLETED' AND meta ? 'asset' AND meta ? 'partition';

-- Executions of a partition.
CREATE INDEX IF NOT EXISTS idx_event_execution_partition
    ON noetl.event ((context -> 'partition' ->> 'key'), execution_id)
    WHERE event_type = 'playbook.initialized' AND context ? 'partition';

-- Children of an execution.
CREATE INDEX IF NOT EXISTS idx_event_parent_execution ON noetl.event (parent_execution_id)
    WHERE event_type = 'playbook.initialized' AND parent_execution_id IS NOT NULL;

-- Claims and ends of commands, for the reaper and for resumed steps.
CREATE INDEX IF NOT EXISTS idx_event_command_id
    ON noetl.event (execution_id, (meta ->> 'command_id'))
    WHERE event_type IN ('command.claimed', 'command.heartbeat');

-- Claims of the pool by step, the latest first: how long commands waited, and which ones to look at.
CREATE INDEX IF NOT EXISTS idx_event_pool_claim ON noetl.event (execution_id, node_name, event_id)
    WHERE event_type = 'command.claimed' AND meta ? 'waited';

-- Where the parts of sinks are.
CREATE INDEX IF NOT EXISTS idx_event_sink ON noetl.event (execution_id, node_name, event_id)
    WHERE meta ? 'sink';

-- How far playbooks have loaded their sources, the furthest first; since: a value set by hand goes before older ones.
CREATE INDEX IF NOT EXISTS idx_event_watermark ON noetl.event (
    (meta #>> '{watermark,playbook}'), (meta #>> '{watermark,name}'), (meta #>> '{watermark,partition}'),
    ((meta #>> '{watermark,since}')::bigint) DESC, (meta #> '{watermark,number}') DESC NULLS LAST,
    (meta #>> '{watermark,text}') COLLATE "C" DESC NULLS LAST)
    WHERE meta ? 'watermark';

-- How far the commands of a step have loaded.
CREATE INDEX IF NOT EXISTS idx_event_reached ON noetl.event (execution_id, node_name, event_id)
    WHERE meta ? 'reached';

-- What running commands say of their progress.
CREATE INDEX IF NOT EXISTS idx_event_note ON noetl.event (execution_id, event_id)
    WHERE event_type = 'command.heartbeat' AND meta ? 'note';

-- Events by the transaction that wrote them, for readers that must not skip a late commit.
CREATE INDEX IF NOT EXISTS idx_event_xact_id ON noetl.event (xact_id, event_id);

-- Node numbers of snowflake identifiers: each process takes the next one.
CREATE SEQUENCE IF NOT EXISTS noetl.snowflake_node MINVALUE 0 MAXVALUE 1023 START 0 CYCLE;
