-- Results: where every value that is too large for an event lives.
-- Idempotent: may be applied any number of times.

CREATE SCHEMA IF NOT EXISTS noetl;

-- One row a stored result. The bytes are in the tier; the row says where, how large and how encoded.
CREATE TABLE IF NOT EXISTS noetl.result_ref (
    ref_id         bigint      PRIMARY KEY,
    ref            text        NOT NULL,
    execution_id   bigint      NOT NULL,
    source_step    text        NOT NULL,
    name           text        NOT NULL,
    kind           text        NOT NULL DEFAULT 'object',
    scope          text        NOT NULL DEFAULT 'execution',
    store_tier     text        NOT NULL,
    physical_uri   text        NOT NULL,
    content_type   text        NOT NULL DEFAULT 'application/json',
    compression    text        NOT NULL DEFAULT 'none',
    bytes_size     bigint      NOT NULL DEFAULT 0,
    sha256         text,
    rows           bigint,
    preview        text,
    extracted      jsonb       NOT NULL DEFAULT '{}',
    extra          jsonb       NOT NULL DEFAULT '{}',
    parent_ref_id  bigint,
    expires_at     timestamptz,
    created_at     timestamptz NOT NULL DEFAULT now()
);

ALTER TABLE noetl.result_ref ADD COLUMN IF NOT EXISTS parent_ref_id bigint;

-- Replaced only when they differ: a check that is added again locks and reads the whole table.
DO $$
DECLARE
    wanted text;
    present text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY[
        'store_tier:memory,kv,disk,object,s3,gcs,db,duckdb,eventlog,minio,pvc',
        'kind:object,dataset,manifest',
        'scope:step,execution,workflow,permanent'
    ] LOOP
        SELECT description INTO present
        FROM pg_constraint
        LEFT JOIN pg_description ON objoid = pg_constraint.oid AND classoid = 'pg_constraint'::regclass
        WHERE conrelid = 'noetl.result_ref'::regclass
          AND conname = format('result_ref_%s_check', split_part(wanted, ':', 1));
        IF present IS DISTINCT FROM wanted THEN
            EXECUTE format(
                'ALTER TABLE noetl.result_ref DROP CONSTRAINT IF EXISTS result_ref_%1$s_check, '
                'ADD CONSTRAINT result_ref_%1$s_check CHECK (%1$I = ANY (string_to_array(%2$L, '','')))',
                split_part(wanted, ':', 1), split_part(wanted, ':', 2));
            EXECUTE format('COMMENT ON CONSTRAINT result_ref_%s_check ON noetl.result_ref IS %L',
                           split_part(wanted, ':', 1), wanted);
        END IF;
    END LOOP;
END $$;

CREATE UNIQUE INDEX IF NOT EXISTS uidx_result_ref_ref ON noetl.result_ref (ref);
-- the latest result of a step, and of one name in it
CREATE INDEX IF NOT EXISTS idx_result_ref_step
    ON noetl.result_ref (execution_id, source_step, name, ref_id DESC);
CREATE INDEX IF NOT EXISTS idx_result_ref_expiry
    ON noetl.result_ref (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS idx_result_ref_parent
    ON noetl.result_ref (parent_ref_id) WHERE parent_ref_id IS NOT NULL;

COMMENT ON COLUMN noetl.result_ref.store_tier IS
    'memory (one process), kv (NATS KV), disk (folder of this machine), object (read as disk), s3, gcs, '
    'db (noetl.result_blob), duckdb (local DuckDB file), eventlog (inline in the reference), '
    'minio (s3 with an endpoint), pvc (shared volume)';
COMMENT ON COLUMN noetl.result_ref.physical_uri IS
    's3://bucket/key, gs://bucket/key, file:///mount/exec/{execution}/{step}/{name}, kv://bucket/key, '
    'db://result_blob/key, duckdb://file/key, data: (eventlog) or memory://key';
COMMENT ON COLUMN noetl.result_ref.bytes_size IS 'stored bytes, after compression';
COMMENT ON COLUMN noetl.result_ref.sha256 IS 'hex digest of the stored bytes; null for datasets and manifests';

-- A result made of other results, in order. Parts are never merged in memory to build it.
CREATE TABLE IF NOT EXISTS noetl.manifest (
    manifest_id  bigint      PRIMARY KEY REFERENCES noetl.result_ref (ref_id) ON DELETE CASCADE,
    strategy     text        NOT NULL CHECK (strategy IN ('append', 'replace', 'merge', 'concat')),
    total_parts  bigint      NOT NULL DEFAULT 0,
    total_bytes  bigint      NOT NULL DEFAULT 0,
    total_rows   bigint,
    created_at   timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE IF NOT EXISTS noetl.manifest_part (
    manifest_id  bigint  NOT NULL REFERENCES noetl.manifest (manifest_id) ON DELETE CASCADE,
    part_index   bigint  NOT NULL,
    part_ref_id  bigint  NOT NULL,
    bytes_size   bigint  NOT NULL DEFAULT 0,
    PRIMARY KEY (manifest_id, part_index)
);

-- Bytes of the db tier, in parts of a few megabytes so that no value is ever whole in memory.
CREATE TABLE IF NOT EXISTS noetl.result_blob (
    key         text         NOT NULL,
    part        integer      NOT NULL,
    data        bytea        NOT NULL,
    created_at  timestamptz  NOT NULL DEFAULT now(),
    PRIMARY KEY (key, part)
);

-- results are compressed before they get here, or not at all
ALTER TABLE noetl.result_blob ALTER COLUMN data SET STORAGE EXTERNAL;
