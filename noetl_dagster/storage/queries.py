"""Every SQL statement of the result tables. JSON travels as text, whatever codecs a pool has set."""

_COLUMNS = """
    ref_id, ref, execution_id, source_step, name, kind, scope, store_tier, physical_uri, content_type,
    compression, bytes_size, sha256, rows, preview, extracted::text AS extracted, extra::text AS extra,
    parent_ref_id, expires_at
"""

# one statement for one reference or for thousands
INSERT_REFS = """
    INSERT INTO noetl.result_ref (
        ref_id, ref, execution_id, source_step, name, kind, scope, store_tier, physical_uri, content_type,
        compression, bytes_size, sha256, rows, preview, extracted, extra, parent_ref_id, expires_at
    )
    SELECT ref_id, ref, execution_id, source_step, name, kind, scope, store_tier, physical_uri, content_type,
           compression, bytes_size, sha256, rows, preview, extracted::jsonb, extra::jsonb, parent_ref_id,
           expires_at
    FROM unnest(
        $1::bigint[], $2::text[], $3::bigint[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[],
        $9::text[], $10::text[], $11::text[], $12::bigint[], $13::text[], $14::bigint[], $15::text[],
        $16::text[], $17::text[], $18::bigint[], $19::timestamptz[]
    ) AS given (
        ref_id, ref, execution_id, source_step, name, kind, scope, store_tier, physical_uri, content_type,
        compression, bytes_size, sha256, rows, preview, extracted, extra, parent_ref_id, expires_at
    )
    ON CONFLICT (ref_id) DO NOTHING
"""

FIND_BY_REF = f"SELECT {_COLUMNS} FROM noetl.result_ref WHERE ref = $1"

# the latest result of this name
FIND_BY_NAME = f"""
    SELECT {_COLUMNS} FROM noetl.result_ref
    WHERE execution_id = $1 AND source_step = $2 AND name = $3
    ORDER BY ref_id DESC LIMIT 1
"""

# the oldest expired references, without rows that another process has locked
LOCK_EXPIRED = f"""
    SELECT {_COLUMNS} FROM noetl.result_ref
    WHERE expires_at <= $1
    ORDER BY expires_at LIMIT $2
    FOR UPDATE SKIP LOCKED
"""

# objects of a store without a reference here: of ended executions, and with $3 also of unknown ones
UNRECORDED = """
    SELECT DISTINCT stored.ref_id
    FROM unnest($1::bigint[], $2::bigint[]) AS stored (execution_id, ref_id)
    LEFT JOIN noetl.execution ON execution.execution_id = stored.execution_id
    WHERE NOT EXISTS (SELECT FROM noetl.result_ref WHERE result_ref.ref_id = stored.ref_id)
      AND CASE WHEN execution.execution_id IS NOT NULL THEN execution.status <> 'RUNNING'
          ELSE $3 AND NOT EXISTS (SELECT FROM noetl.event WHERE event.execution_id = stored.execution_id) END
"""

# what should be in stores now, of one execution or of all, page by page
PAGE_OF_STORED = f"""
    SELECT {_COLUMNS} FROM noetl.result_ref
    WHERE ref_id > $1 AND ($2::bigint IS NULL OR execution_id = $2) AND store_tier = ANY($3::text[])
      AND kind <> 'manifest' AND (expires_at IS NULL OR expires_at > $4)
    ORDER BY ref_id LIMIT $5
"""

DELETE_REFS = "DELETE FROM noetl.result_ref WHERE ref_id = ANY($1::bigint[])"

INSERT_MANIFEST = "INSERT INTO noetl.manifest (manifest_id, strategy) VALUES ($1, $2)"

INSERT_PARTS = """
    INSERT INTO noetl.manifest_part (manifest_id, part_index, part_ref_id, bytes_size)
    SELECT $1, part_index, part_ref_id, bytes_size
    FROM unnest($2::bigint[], $3::bigint[], $4::bigint[]) AS given (part_index, part_ref_id, bytes_size)
"""

CLOSE_MANIFEST = """
    UPDATE noetl.manifest SET total_parts = $2, total_bytes = $3, total_rows = $4 WHERE manifest_id = $1
"""

FILL_MANIFEST_REF = """
    UPDATE noetl.result_ref SET bytes_size = $2, rows = $3, extra = $4::text::jsonb, preview = $5 WHERE ref_id = $1
"""

# one page of parts in order; a part without a row has a null ref_id
PAGE_OF_PARTS = f"""
    SELECT part_index, part_ref_id, part.*
    FROM noetl.manifest_part
    LEFT JOIN LATERAL (
        SELECT {_COLUMNS} FROM noetl.result_ref WHERE ref_id = part_ref_id
    ) AS part ON true
    WHERE manifest_id = $1 AND part_index > $2
    ORDER BY part_index LIMIT $3
"""

PUT_BLOB_PART = "INSERT INTO noetl.result_blob (key, part, data) VALUES ($1, $2, $3)"

GET_BLOB = "SELECT data FROM noetl.result_blob WHERE key = $1 ORDER BY part"

GET_BLOB_PART = "SELECT data FROM noetl.result_blob WHERE key = $1 AND part = $2"

PAGE_OF_BLOB_KEYS = """
    SELECT key FROM noetl.result_blob
    WHERE starts_with(key, $1) AND key > $2 AND part = 0
    ORDER BY key LIMIT 1000
"""

DELETE_BLOB = "DELETE FROM noetl.result_blob WHERE key = $1"
