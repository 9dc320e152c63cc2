-- Frames of cursor loops: rows that a loop has claimed in a playbook's own table, until all of them have ended or are
-- given back. Only of loops that say how rows are given back (loop.cursor.release).
CREATE TABLE IF NOT EXISTS noetl.cursor_frame (
    execution_id  bigint      NOT NULL,
    loop_id       text        NOT NULL,
    first_index   integer     NOT NULL,  -- of its commands: one for each row, or one for all
    step          text        NOT NULL,
    visit         integer     NOT NULL,
    rows          jsonb       NOT NULL,
    by_row        boolean     NOT NULL,
    lease_until   timestamptz NOT NULL,  -- the driver's heartbeats move it
    -- Transactions in the database of the playbook's table: of the claim, and of the release. What became of them is
    -- asked there, so that a row is neither forgotten nor given back twice when a process dies between two databases.
    claim_xid     bigint      NOT NULL,
    release_xid   bigint,
    PRIMARY KEY (execution_id, loop_id, first_index)
);
CREATE INDEX IF NOT EXISTS idx_cursor_frame_lease ON noetl.cursor_frame (lease_until);
