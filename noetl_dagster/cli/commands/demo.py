"""``demo``: the patient flow on real services, and its results."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from noetl_dagster import embedded
from noetl_dagster.cli.commands.executions import check_table
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
DATA_TYPES = ("assessments", "conditions", "medications", "vital_signs", "demographics")

VALIDATION = f"""
SELECT facility_id, seeded, {", ".join(DATA_TYPES)}, records, complete
FROM patient_flow.validation WHERE execution_id = $1 ORDER BY facility_id
"""

RESULTS = """
SELECT source_step AS step, store_tier AS tier, count(*) AS results, sum(bytes_size)::bigint AS bytes,
       min(physical_uri) AS first
FROM noetl.result_ref WHERE execution_id = $1 AND store_tier NOT IN ('eventlog', 'db')
GROUP BY source_step, store_tier ORDER BY min(ref_id)
"""


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
        pool, execution_id = session.engine.runtime.pool, int(overview.execution_id)
        validation = run_sync(pool.fetch(VALIDATION, execution_id))
        results = run_sync(pool.fetch(RESULTS, execution_id))
        _show(session, overview, validation, results)
    raise typer.Exit(0 if overview.status == ExecutionStatus.COMPLETED else 1)


def records_api(
    host: Annotated[str, typer.Option(help="address that it listens on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port, which is printed")] = 8765,
    seed: Annotated[int, typer.Option(help="the seed of the records")] = 0,
    faults: Annotated[float, typer.Option(min=0.0, max=1.0, help="share of attempts that fail")] = 0.0,
    facilities: Annotated[int, typer.Option(min=1, help="number of listed facilities")] = 5,
    patients: Annotated[int, typer.Option(min=1, help="patients of each listed facility")] = 100,
) -> None:
    """Serve simulated clinical records until interrupted."""
    options = [f"--host={host}", f"--port={port}", f"--seed={seed}", f"--faults={faults}"]
    command = [sys.executable, "-m", "records_api", *options, f"--facilities={facilities}", f"--patients={patients}"]
    os.chdir(shipped_folder("examples"))
    os.execv(sys.executable, command)


def _show(session: Session, overview: Overview, validation: list[Any], results: list[Any]) -> None:
    right = [Column(name.replace("_", " "), justify="right") for name in (*DATA_TYPES, "records")]
    table = Table("facility", *right, "complete", title="patients per facility and data type")
    for row in validation:
        counts = [f"{row[name]}/{row['seeded']}" for name in DATA_TYPES]
        complete = "yes" if row["complete"] else "NO"
        table.add_row(str(row["facility_id"]), *counts, str(row["records"]), complete)
    console.print(table)
    right = [Column("results", justify="right"), Column("size", justify="right")]
    where = Table("step", "tier", *right, Column("in", overflow="fold"), title="where the large results are")
    for row in results:
        folder = row["first"].rstrip("/").rsplit("/", 1)[0] + "/"
        where.add_row(row["step"], row["tier"], str(row["results"]), f"{row['bytes'] / 1e6:.2f} MB", folder)
    console.print(where)
    console.print(check_table(overview))
    if overview.error:
        console.print(overview.error, style="red", markup=False)
    console.print(
        f"execution [bold]{overview.execution_id}[/] {overview.status} in {overview.seconds:.1f} s; "
        f"Dagster run {overview.run_id}\n"
        f"services and data: {session.settings.home.resolve()}\n"
        f"every event:       noetl-dagster events {overview.execution_id}\n"
        f"its page:          noetl-dagster serve\n"
        f"                   then {execution_url(session.settings, overview.execution_id)}\n"
        'in Dagster\'s UI:   eval "$(noetl-dagster services env)"; dagster dev -m noetl_dagster.definitions\n'
        "                   then Runs (the graph) and Assets (the lineage)",
        highlight=False,
    )
