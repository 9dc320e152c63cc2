"""Fixtures for tests of playbooks on real servers: ``pytest_plugins = ["noetl_dagster.testing"]``.

PostgreSQL, NATS and an S3 store of ``noetl-dagster[embedded]`` start with the first test that asks, in
``.noetl-test`` below pytest's root folder (``NOETL_TEST_HOME``), are shared by everything that tests there at the
same time, and stop with the last. Gives the fixture ``noetl`` to the tests of others: a database, bucket and subjects
of each test. Stands on ``code_location``, ``compiler``, ``embedded``, ``playbook`` and ``resources``.
"""

from noetl_dagster.testing.fixtures import NoetlTest, noetl, noetl_services, noetl_settings

__all__ = ["NoetlTest", "noetl", "noetl_services", "noetl_settings"]
