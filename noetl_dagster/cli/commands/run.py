"""``run`` and ``resume``: a playbook's Dagster job in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from noetl_dagster.cli.commands.check import Lenient
from noetl_dagster.cli.commands.executions import ExecutionId, show
from noetl_dagster.cli.console import Json, fail, note, note_page, print_json, warn
from noetl_dagster.cli.progress import showing
from noetl_dagster.cli.session import Session, open_session
from noetl_dagster.engine.executions.overview import Overview, full_overview
from noetl_dagster.engine.executions.runners import Runner, check_runner
from noetl_dagster.errors import ExecutionNotFoundError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.catalog import SUFFIXES
from noetl_dagster.playbook.checks.templates import check_code
from noetl_dagster.playbook.checks.values import check_values, trap_of
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.loader import load_report, required
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.workload import unknown_keys, wanted_type
from noetl_dagster.process.collector import importing
from noetl_dagster.process.environment import settings_withheld
from noetl_dagster.process.event_loop import run_sync


def run(
    playbook: Annotated[
        str,
        typer.Argument(help="file, or a registered playbook: path, path@2 or path@latest"),
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="workload value, text or YAML by the type of the default; may be repeated",
            metavar="KEY=VALUE",
        ),
    ] = None,
    payload: Annotated[Path | None, typer.Option(help="YAML or JSON file of workload values")] = None,
    partition: Annotated[
        str | None,
        typer.Option(help="key of the partition: 2026-01-31, or 'day|place' with two dimensions"),
    ] = None,
    runner: Annotated[
        Runner, typer.Option(help="engine: without a Dagster run; Dagster still receives the assets and checks")
    ] = Runner.DAGSTER,
    lenient: Lenient = False,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="print Dagster's own log too")] = False,
) -> None:
    """Run a playbook as its Dagster job; exit code 0 if it completes, else 1."""
    from_file = _of_file(Path(playbook), lenient=lenient)
    payload_values, texts = _payload(payload), _parse_sets(sets or [])
    with open_session() as session:
        loaded = from_file or run_sync(session.engine.runtime.registered.load(playbook, lenient=lenient))
        for problem in (*check_code(loaded), *check_values(loaded)):
            warn(str(replace(problem, severity="warning")))
        read = {key: _value_of(key, text, loaded.workload.get(key)) for key, text in texts.items()}
        workload = {**payload_values, **read}
        for text in unknown_keys(loaded.workload, workload):
            warn(f"warning: {text}")
        if runner is Runner.ENGINE:
            _finish(session, _run_without_dagster(session, loaded, workload, partition, quiet=as_json), as_json)
        ended = run_playbook(session, loaded, workload, partition=partition, quiet=as_json, verbose=verbose)
        _finish(session, ended, as_json)


def resume(execution_id: ExecutionId, as_json: Json = False) -> None:
    """Resume an execution that failed or lost its process; finished work is not repeated."""
    with open_session() as session:
        execution = run_sync(session.engine.lifecycle.load_resumable(execution_id))
        ended = run_playbook(session, execution.playbook, {}, execution_id, resumed=True, quiet=as_json)
        _finish(session, ended, as_json)


def run_playbook(
    session: Session,
    playbook: Playbook,
    workload: dict[str, Any],
    execution_id: int | None = None,
    *,
    partition: str | None = None,
    resumed: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> Overview:
    """Runs a playbook under Dagster with live progress, and returns how the execution ended.

    Standard error shows its id at once, even if ``quiet``, so that it can be resumed if this process is killed.
    """
    engine = session.engine
    execution_id = execution_id or engine.runtime.ids.next()
    note(f"{'resuming' if resumed else 'running'} {playbook.name}, execution {execution_id}")
    if not quiet:
        note_page(session.settings, execution_id)
    session.lead_to_dagster()
    with importing():  # only here, since it takes a second
        from dagster import DagsterInstance

        from noetl_dagster.code_location.launch import launch

    with DagsterInstance.get() as instance, showing(engine, execution_id, quiet=quiet or verbose):
        launched = launch(
            playbook,
            session.noetl,
            instance,
            execution_id=execution_id,
            workload=workload,
            partition_key=partition,
            resumed=resumed,
            quiet=not verbose,
        )
    try:
        overview = run_sync(full_overview(engine.runtime, execution_id))
    except ExecutionNotFoundError:
        overview = None
    if overview is None or (overview.run_id is None and overview.status == ExecutionStatus.RUNNING):
        fail(f"the Dagster run failed before its first step: {launched.run_id}: {launched.error}")
    return overview


def _run_without_dagster(
    session: Session, playbook: Playbook, workload: dict[str, Any], partition: str | None, *, quiet: bool
) -> Overview:
    """Drives an execution in this process, without a Dagster run, and reports it to Dagster."""
    check_runner(playbook, Runner.ENGINE)
    session.lead_to_dagster()
    with importing():
        from dagster import DagsterInstance

        from noetl_dagster.compiler.external_assets import services_of
        from noetl_dagster.compiler.partitions import PlaybookPartitions
        from noetl_dagster.compiler.reporting import DagsterReporter

    engine = session.engine
    chosen = PlaybookPartitions(playbook).choose(workload, partition)
    with DagsterInstance.get() as instance:
        reporter, services = DagsterReporter(engine, instance), services_of(engine.runtime, instance)
        origin = {"runner": Runner.ENGINE.value}
        execution = run_sync(engine.lifecycle.create(playbook, workload, partition=chosen, origin=origin))
        note(f"running {playbook.name}, execution {execution.id}")
        if not quiet:
            note_page(session.settings, execution.id)
        with showing(engine, execution.id, quiet=quiet), settings_withheld():
            run_sync(engine.drive(execution, release=False, services=services))
        run_sync(reporter.report([run_sync(engine.runtime.load(execution.id))], fresh=True))
    return run_sync(full_overview(engine.runtime, execution.id))


def _of_file(path: Path, *, lenient: bool) -> Playbook | None:
    """Loads the playbook of a file; None if the argument names a registered one."""
    if not path.is_file():
        if path.suffix in SUFFIXES:
            fail(f"{path}: no such file", code=2)
        return None
    playbook, problems = load_report(path, lenient=lenient)
    loaded = required(playbook, problems)
    for problem in problems:
        warn(str(problem))
    return loaded


def _parse_sets(sets: list[str]) -> dict[str, str]:
    parsed: dict[str, str] = {}
    for entry in sets:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            fail(f"--set {entry!r}: write KEY=VALUE", code=2)
        parsed[key] = value
    return parsed


def _value_of(key: str, text: str, default: Any) -> Any:
    """Reads the value of ``--set`` by the type of its default: for text as it is, unless it is quoted; else as YAML.

    A value that YAML takes for another one than people mean is refused: 0123 is 83, and 12:30 is 750.
    """
    wanted, what = wanted_type(default), f"--set {key}={text!r}"
    if wanted is str:
        quoted = Document(text, what) if text[:1] in ("'", '"') else None
        return quoted.root if quoted is not None and isinstance(quoted.root, str) and not quoted.problems else text
    value = _yaml(text, what)
    if wanted is not bool and (trap := trap_of(value, text.strip())) is not None:
        fail(f"{what}: {trap}", code=2)
    return value


def _payload(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--payload {path}: {error}", code=2)
    values = _yaml(text, f"--payload {path}")
    if not isinstance(values, dict):
        fail(f"--payload {path}: the file must contain a mapping of workload keys", code=2)
    return values


def _yaml(text: str, what: str) -> Any:
    """Reads a value as playbooks do: a date is text."""
    document = Document(text, what)
    if document.problems:
        fail(f"{what} cannot be read: {document.problems[0].message}", code=2)
    return document.root


def _finish(session: Session, overview: Overview, as_json: bool) -> None:
    if as_json:
        print_json(overview)
    else:
        show(overview)
        if overview.status == ExecutionStatus.RUNNING:
            note(f"it has not ended; to resume it: noetl-dagster resume {overview.execution_id}")
    raise typer.Exit(0 if overview.status == ExecutionStatus.COMPLETED else 1)
