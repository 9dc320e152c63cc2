-- Which version of the schema this is. Without the row: one from before there were numbers.
CREATE TABLE IF NOT EXISTS noetl.schema_version (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    number     integer NOT NULL,
    digest     text NOT NULL,     -- of the texts of schema/*.sql
    works_from integer NOT NULL,  -- processes whose own schema has a smaller number may not work with it
    applied_at timestamptz NOT NULL DEFAULT now()
);
