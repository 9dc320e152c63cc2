"""``run`` and ``resume``: a playbook's Dagster job in this process."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from noetl_dagster.cli.commands.executions import ExecutionId, Json, show
from noetl_dagster.cli.console import fail, notes, print_json, warn
from noetl_dagster.cli.progress import showing
from noetl_dagster.cli.session import Session, open_session
from noetl_dagster.engine.executions.overview import Overview, full_overview
from noetl_dagster.errors import ExecutionNotFoundError, ExecutionStateError, ServiceError
from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.launcher.foreground import drive
from noetl_dagster.playbook.catalog import SUFFIXES
from noetl_dagster.playbook.checks.templates import check_code
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.loader import load_report, required
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.event_loop import run_sync

Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE of the workload, VALUE in YAML; repeatable", metavar="KEY=VALUE"),
]


def run(
    playbook: Annotated[
        str, typer.Argument(help="playbook file, or path, path@2 or path@latest of a registered one")
    ],
    sets: Set = None,
    payload: Annotated[Path | None, typer.Option(help="YAML or JSON file of workload values")] = None,
    partition: Annotated[
        str | None,
        typer.Option(help="of a playbook with partitions: 2026-01-31, or 'day|place' of two dimensions"),
    ] = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Dagster's own log too")] = False,
    execution_id: Annotated[int | None, typer.Option(hidden=True, help="given by the HTTP API")] = None,
) -> None:
    """Run a playbook as its Dagster job; exit code 0 when it completes, 1 when it does not."""
    from_file = _of_file(Path(playbook))
    given = {**_payload(payload), **parse_sets(sets or [])}
    with open_session() as session:
        loaded = from_file or run_sync(session.engine.runtime.registered.load(playbook))
        _say_what_is_odd(loaded, given)
        begun = None
        if execution_id is None and (partition is not None or loaded.dagster.partitions):
            execution_id = begun = _of_partition(session, loaded, given, partition)
        try:
            ended = run_playbook(session, loaded, given, execution_id, quiet=as_json, verbose=verbose)
        except BaseException:
            if begun is not None:
                _withdraw(session, begun)
            raise
        _finish(session, ended, as_json)


def _of_file(path: Path) -> Playbook | None:
    """The playbook of a file; None where a registered one is meant."""
    if not path.is_file():
        if path.suffix in SUFFIXES:
            fail(f"{path}: no such file", code=2)
        return None
    found, problems = load_report(path)
    loaded = required(found, problems)
    for problem in problems:
        warn(str(problem))
    return loaded


def _say_what_is_odd(playbook: Playbook, workload: dict[str, Any]) -> None:
    for problem in check_code(playbook):
        warn(str(replace(problem, severity="warning")))
    _warn_of_unknown_keys(playbook, workload)


def resume(execution_id: ExecutionId, as_json: Json = False) -> None:
    """Go on with an execution that failed or whose process is gone; nothing that is done runs again."""
    with open_session() as session:
        engine = session.engine
        execution = run_sync(engine.runtime.load(execution_id))
        if execution.state.status in (ExecutionStatus.COMPLETED, ExecutionStatus.CANCELLED):
            raise ExecutionStateError(
                f"execution {execution_id} is {execution.state.status}; start a new one with 'noetl-dagster run'"
            )
        if run_sync(engine.liveness.is_driven(execution_id)):
            raise ExecutionStateError(
                f"execution {execution_id} is being driven by a living process; wait for it or end it first"
            )
        found = _drive(session, execution.playbook, execution_id, {}, resumed=True, quiet=as_json)
        _finish(session, found, as_json)


def run_playbook(
    session: Session,
    playbook: Playbook,
    workload: dict[str, Any],
    execution_id: int | None = None,
    *,
    quiet: bool = False,
    verbose: bool = False,
) -> Overview:
    """Runs a playbook under Dagster with live progress and returns how it ended.

    The execution is named on standard error at once, ``quiet`` or not, so that it can be resumed if it is killed.
    """
    execution_id = execution_id or session.engine.runtime.ids.next()
    return _drive(session, playbook, execution_id, workload, quiet=quiet, verbose=verbose)


def _of_partition(session: Session, playbook: Playbook, workload: dict[str, Any], key: str | None) -> int:
    """Begins an execution of a partition: it is in the log before its run."""
    from noetl_dagster.compiler.partitions import PlaybookPartitions

    partition = PlaybookPartitions(playbook).choose(workload, key)
    return run_sync(session.engine.lifecycle.create(playbook, workload, partition=partition)).id


def _withdraw(session: Session, execution_id: int) -> None:
    """Ends an execution whose run did not start, so that no other process starts it later."""
    engine = session.engine
    execution = run_sync(engine.runtime.load(execution_id))
    if execution.state.is_running and execution.state.run_id is None:
        run_sync(engine.lifecycle.fail(execution, "the run did not start"))


def parse_sets(sets: list[str]) -> dict[str, Any]:
    """``KEY=VALUE`` pairs; values are YAML, so that numbers and lists keep their type."""
    parsed: dict[str, Any] = {}
    for entry in sets:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            fail(f"--set {entry!r}: write KEY=VALUE", code=2)
        parsed[key] = _yaml(value, f"--set {entry!r}: the value")
    return parsed


def _yaml(text: str, what: str) -> Any:
    """A value as playbooks read it: a date is text."""
    document = Document(text, what)
    if document.problems:
        fail(f"{what} is not YAML: {document.problems[0].message}", code=2)
    return document.root


def _warn_of_unknown_keys(playbook: Playbook, workload: dict[str, Any]) -> None:
    """Keys that the playbook's workload lacks are allowed, since templates may ask for them, but rarely meant."""
    known = [str(key) for key in playbook.workload]
    for key in workload:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
            warn(f"warning: the workload has no key {key!r}; {hint}")


def _payload(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--payload {path}: {error}", code=2)
    values = _yaml(text, f"--payload {path}")
    if not isinstance(values, dict):
        fail(f"--payload {path}: it must hold a mapping of workload keys", code=2)
    return values


def _drive(
    session: Session,
    playbook: Playbook,
    execution_id: int,
    workload: dict[str, Any],
    *,
    resumed: bool = False,
    quiet: bool = False,
    verbose: bool = False,
) -> Overview:
    engine = session.engine
    verb = "resuming" if resumed else "running"
    notes.print(f"{verb} {playbook.name}, execution {execution_id}", highlight=False, soft_wrap=True)
    if session.settings.warm_commands and not verbose:
        error = _drive_warm(session, playbook, execution_id, workload, resumed=resumed, quiet=quiet)
    else:
        error = _drive_here(
            session, playbook, execution_id, workload, resumed=resumed, quiet=quiet, verbose=verbose
        )
    try:
        found = run_sync(full_overview(engine.runtime, execution_id))
    except ExecutionNotFoundError:
        found = None
    if found is None or (found.run_id is None and found.status == ExecutionStatus.RUNNING):
        fail(f"the Dagster run failed before its first step: {error}")
    return found


def _drive_warm(
    session: Session,
    playbook: Playbook,
    execution_id: int,
    workload: dict[str, Any],
    *,
    resumed: bool,
    quiet: bool,
) -> str | None:
    """Why the run failed in a warm process, if it did; where there is no room for it, in this one."""
    session.lead_to_dagster()
    try:
        with showing(session.engine, execution_id, quiet=quiet):
            return drive(session.settings, playbook, execution_id, workload, resumed=resumed)
    except ServiceError as error:
        warn(f"the run is driven here: {error}")
        return _drive_here(
            session, playbook, execution_id, workload, resumed=resumed, quiet=quiet, verbose=False
        )


def _drive_here(
    session: Session,
    playbook: Playbook,
    execution_id: int,
    workload: dict[str, Any],
    *,
    resumed: bool,
    quiet: bool,
    verbose: bool,
) -> str | None:
    """Why the run failed in this process, if it did."""
    from noetl_dagster.code_location.launch import (
        launch,  # Dagster: two seconds that a warm process has behind it
    )
    from noetl_dagster.compiler.runs import latest_run, report_lost_run

    with session.dagster() as instance:
        before = latest_run(instance, execution_id, playbook.name) if resumed else None
        if before is not None:
            report_lost_run(instance, before)
        with showing(session.engine, execution_id, quiet=quiet or verbose):
            launched = launch(
                playbook,
                session.noetl,
                instance,
                execution_id=execution_id,
                workload=workload,
                resumes=before,
                resumed=resumed,
                quiet=not verbose,
            )
    return f"{launched.run_id}: {launched.error}" if launched.error else None


def _finish(session: Session, found: Overview, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        show(session.engine, found)
        if found.status == ExecutionStatus.RUNNING:
            notes.print(f"it has not ended: noetl-dagster resume {found.execution_id}", highlight=False)
    raise typer.Exit(0 if found.status == ExecutionStatus.COMPLETED else 1)
