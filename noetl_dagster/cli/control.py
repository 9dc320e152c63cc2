"""``project``, ``reap`` and ``maintain``: the control plane's upkeep without Dagster's daemon."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from noetl_dagster.cli.session import open_session
from noetl_dagster.events.projection import INTERVAL, Projection
from noetl_dagster.storage.loop import run_sync

Once = Annotated[bool, typer.Option("--once", help="do what is due and end")]


def project(
    once: Once = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="forget the projection and replay the log")
    ] = False,
) -> None:
    """Keep noetl.execution up to date until interrupted. Any number may run at once."""
    with open_session(quickly=True) as session:
        projection = Projection(session.engine.runtime.pool)
        if rebuild or once:
            taken = run_sync(projection.rebuild() if rebuild else projection.catch_up())
            typer.echo(f"{taken} events projected, {run_sync(projection.lag_seconds()):.1f} s behind")
            return
        typer.echo("projecting the event log; end with Ctrl-C")
        run_sync(projection.run(INTERVAL))


def reap(
    once: Once = False,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 10.0,
) -> None:
    """Give the commands of silent workers to others, until interrupted. Any number may run at once."""
    with open_session(quickly=True) as session:
        while True:
            typer.echo(str(run_sync(session.engine.reaper().reap())))
            if once:
                return
            time.sleep(interval)


def maintain() -> None:
    """Make the coming months' partitions, drop old ones (NOETL_RETENTION_DAYS), delete expired results."""
    with open_session() as session:
        typer.echo(str(run_sync(session.engine.maintenance().run())))
