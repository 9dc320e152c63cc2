"""The moments at which faults hit: after a time, or while an event of the log is on its way into it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psycopg2
import psycopg2.extensions

from tests.chaos.machine import Machine

SCHEMA = """
CREATE SCHEMA chaos;
CREATE SEQUENCE chaos.events;
CREATE TABLE chaos.moment (event bigint);
CREATE FUNCTION chaos.hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('chaos.events') IN (SELECT event FROM chaos.moment) THEN
        PERFORM pg_advisory_xact_lock_shared(4711, 1);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER hold BEFORE INSERT ON noetl.event FOR EACH ROW EXECUTE FUNCTION chaos.hold();
"""
"""Events are counted as they come. The transaction of the chosen one waits for the advisory lock (4711, 1)."""

WAITING = """
SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = 4711 AND NOT granted
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
COUNT = "SELECT last_value FROM chaos.events"


@dataclass(frozen=True, slots=True)
class Moment:
    """When a fault hits, counted from its preparation.

    Attributes:
        share: of the events or the time of an undisturbed run.
        at_event: the fault hits while an event is in its transaction, and not after a time.
        cuts: the session of that transaction ends too, as with its process; else the transaction may commit.
    """

    share: float
    at_event: bool
    cuts: bool = False


def hit_at(
    moment: Moment,
    machine: Machine,
    over: Callable[[], bool],
    events: int,
    seconds: float,
    inject: Callable[[], None],
) -> None:
    """Calls ``inject`` at a moment, unless the run ends before.

    Args:
        over: whether the run has ended.
        events: of an undisturbed run.
        seconds: of an undisturbed run.
    """
    if moment.at_event:
        with suppress(psycopg2.OperationalError), machine.database() as cursor:  # the fault may end the server
            _hit_at_event(moment, cursor, over, 1 + int(moment.share * events), inject)
        return
    deadline = time.monotonic() + moment.share * seconds
    while not over():
        if time.monotonic() > deadline:
            inject()
            return
        time.sleep(0.01)


def _hit_at_event(
    moment: Moment,
    cursor: psycopg2.extensions.cursor,
    over: Callable[[], bool],
    ahead: int,
    inject: Callable[[], None],
) -> None:
    cursor.execute("SELECT pg_advisory_lock(4711, 1)")  # until the session ends
    cursor.execute(COUNT)
    due = _number(cursor) + ahead
    cursor.execute("DELETE FROM chaos.moment; INSERT INTO chaos.moment VALUES (%s)", [due])
    while not over():
        cursor.execute(WAITING)
        if waiting := cursor.fetchall():
            inject()
            if moment.cuts:
                cursor.execute("SELECT pg_terminate_backend(%s)", waiting[0])
            return
        cursor.execute(COUNT)
        if _number(cursor) > due:  # it is in the log already, in spite of the lock of a server that was killed
            inject()
            return
        time.sleep(0.005)


def _number(cursor: psycopg2.extensions.cursor) -> int:
    row = cursor.fetchone()
    assert row is not None
    return int(row[0])
