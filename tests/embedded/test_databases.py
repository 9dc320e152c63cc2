"""A database that goes from test to test looks like the template each time, or is not used again."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg2
import pytest

from noetl_dagster.embedded.isolation import database_url
from noetl_dagster.settings import Settings
from tests.databases import Databases

UNDONE = """
CREATE SCHEMA other;
CREATE TABLE other.numbers (n int);
CREATE TABLE gained (n serial PRIMARY KEY);
INSERT INTO gained DEFAULT VALUES;
INSERT INTO kvs (key, value) VALUES ('a', 'b');
CREATE VIEW seen AS SELECT n FROM gained;
CREATE MATERIALIZED VIEW stored AS SELECT n FROM gained;
CREATE TEMP TABLE passing (n int);
SELECT nextval('noetl.queue_turn');
"""
LEFT = """
SELECT (SELECT count(*) FROM kvs), (SELECT is_called FROM noetl.queue_turn), (SELECT is_called FROM kvs_id_seq),
       to_regclass('gained'), to_regclass('seen'), to_regclass('stored'), to_regnamespace('other')
"""
NOT_UNDONE = {
    "a column": "ALTER TABLE noetl.queue ADD COLUMN extra int",
    "a row of the template": "DELETE FROM noetl.schema_version",
    "an option of a table": "ALTER TABLE noetl.queue SET (fillfactor = 50)",
}


@pytest.fixture
def own(services: Settings, databases: Databases) -> Any:
    """Databases of this test alone, so that it knows which one it gets."""
    owner = Databases(services, databases.administrator, databases.template)
    yield owner
    owner.close()


def test_what_a_test_adds_is_gone(services: Settings, own: Databases) -> None:
    with own.one() as first:
        _execute(services, first, UNDONE)
    with own.one() as second:
        assert _execute(services, second, LEFT) == (0, False, False, None, None, None, None)
    assert own.created == 1
    with pytest.raises(psycopg2.OperationalError, match="does not exist"):
        _execute(services, first, "SELECT 1")


def test_one_that_cannot_be_restored_is_not_used_again(services: Settings, own: Databases) -> None:
    for created, (what, statement) in enumerate(NOT_UNDONE.items(), 1):
        with own.one() as name:
            _execute(services, name, statement)
        assert own.created == created, what


def _execute(services: Settings, name: str, statements: str) -> Any:
    with closing(psycopg2.connect(database_url(services, name))) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(statements)
        return cursor.fetchone() if cursor.description else None
