-- Credentials stored by name. The data is a Fernet token of a JSON object; the key is NOETL_CREDENTIAL_KEY
-- and never stands in the database.

CREATE SCHEMA IF NOT EXISTS noetl;

CREATE TABLE IF NOT EXISTS noetl.credential (
    name       text PRIMARY KEY,
    type       text NOT NULL,
    data       bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE noetl.credential IS 'Named credentials of tools, encrypted with the key of NOETL_CREDENTIAL_KEY';
COMMENT ON COLUMN noetl.credential.type IS
    'postgres, http, bearer, basic, header, s3, gcs, nats, duckdb or secret';
COMMENT ON COLUMN noetl.credential.data IS 'Fernet token (AES-128-CBC, HMAC-SHA256) of the JSON object';

-- Tokens that playbooks' keychains ask for, shared by all processes until they expire (docs/reference/credentials.md).
CREATE TABLE IF NOT EXISTS noetl.keychain (
    name         text        NOT NULL,            -- of the entry, and a keyed digest of what it asks
    execution_id bigint      NOT NULL DEFAULT 0,  -- 0: of every execution
    data         bytea       NOT NULL,            -- Fernet token, as in noetl.credential
    expires_at   timestamptz NOT NULL,            -- a little before the token itself does
    created_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (name, execution_id)
);
CREATE INDEX IF NOT EXISTS idx_keychain_expires_at ON noetl.keychain (expires_at);
