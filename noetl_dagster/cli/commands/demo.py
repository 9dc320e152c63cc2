"""``demo``: the patient flow on real services."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from noetl_dagster import embedded
from noetl_dagster.cli.commands.executions import show
from noetl_dagster.cli.commands.run import run_playbook
from noetl_dagster.cli.console import announce_start, console, fail
from noetl_dagster.cli.doctor.checks import find_java
from noetl_dagster.cli.session import Session, open_session
from noetl_dagster.engine.executions.addresses import execution_url
from noetl_dagster.engine.executions.overview import Overview
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.extras import shipped_folder
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.settings import get_settings

SIZES: dict[str, dict[str, int]] = {
    "small": {"facilities": 2, "patients": 20, "batch_size": 5},
    "medium": {"facilities": 5, "patients": 100, "batch_size": 10},
    "full": {"facilities": 10, "patients": 1000, "batch_size": 25},
}
FLOW = "patient_flow.yaml"


def demo(
    size: Annotated[str, typer.Option(help=", ".join(SIZES))] = "medium",
    playbook: Annotated[Path | None, typer.Option(help="file of the patient flow; default: the packaged one")] = None,
) -> None:
    """Run the patient flow on a simulated records API with faults."""
    if size not in SIZES:
        fail(f"--size {size}: choose one of {', '.join(SIZES)}", code=2)
    java = run_sync(find_java(get_settings()))
    if java.remedy:
        fail(
            f"the demo uses Spark, which needs Java: {java.what}; {java.remedy}. "
            "What runs without Java: noetl-dagster init my_project"
        )
    settings = embedded.ensure(get_settings(), announce=announce_start)
    for name, value in embedded.demo_environment(settings).items():
        os.environ.setdefault(name, value)
    get_settings.cache_clear()
    with open_session() as session:
        overview = run_playbook(
            session, load_playbook(playbook or shipped_folder("playbooks") / FLOW), dict(SIZES[size])
        )
        _show(session, overview)
    raise typer.Exit(0 if overview.status == ExecutionStatus.COMPLETED else 1)


def _show(session: Session, overview: Overview) -> None:
    show(overview)
    console.print(
        f"Dagster run:       {overview.run_id}\n"
        f"services and data: {session.settings.home.resolve()}\n"
        f"every event:       noetl-dagster events {overview.execution_id}\n"
        f"its page:          noetl-dagster serve\n"
        f"                   then {execution_url(session.settings, overview.execution_id)}\n"
        'in Dagster\'s UI:   eval "$(noetl-dagster services env)"; dagster dev -m noetl_dagster.definitions\n'
        "                   then Runs (the graph) and Assets (the lineage)",
        highlight=False,
    )
