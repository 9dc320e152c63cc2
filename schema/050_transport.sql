-- What workers need beside the log: the context of a queued command, and messages that were put aside.

-- What a worker is told about a command (see docs/protocol.md); gone with the row when the command ends.
ALTER TABLE noetl.queue ADD COLUMN IF NOT EXISTS context jsonb NOT NULL DEFAULT '{}';
-- The command.claimed event of the current lease: a claim that is sent twice is recognised by it.
ALTER TABLE noetl.queue ADD COLUMN IF NOT EXISTS claim_event_id bigint;
-- The worker whose own subject the command was sent to; null: any worker.
ALTER TABLE noetl.queue ADD COLUMN IF NOT EXISTS target text;

-- Where a message stands in its source, so that one that is delivered again is put aside once.
ALTER TABLE noetl.dead_letter ADD COLUMN IF NOT EXISTS message_id text;
CREATE UNIQUE INDEX IF NOT EXISTS uidx_dead_letter_message ON noetl.dead_letter (source, message_id);
