"""Loading playbooks: the text, its normalisation and the checks, with all problems reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from noetl_dagster.errors import Place, PlaybookError, Problem, ProblemKind
from noetl_dagster.playbook.checks.templates import check_code
from noetl_dagster.playbook.checks.unquoted import check_unquoted
from noetl_dagster.playbook.checks.values import check_values
from noetl_dagster.playbook.checks.workflow import check_playbook
from noetl_dagster.playbook.dialects.playbook import normalise
from noetl_dagster.playbook.document import NOT_UNDERSTOOD, Document, place_at
from noetl_dagster.playbook.graph import with_ends_as_assets
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.process.collector import collector_paused


def load_playbook(path: Path | str, *, lenient: bool = False) -> Playbook:
    """Loads a playbook file, or raises a PlaybookError with every error found, in file order.

    Args:
        lenient: unsupported tool kinds and unknown keys are warnings: a key is ignored, and a step whose kind is not
            supported fails when it is reached.
    """
    return required(*load_report(path, lenient=lenient))


def parse_playbook(
    text: str,
    *,
    file: str = "<playbook>",
    lenient: bool = False,
    workload: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    model: str | None = None,
) -> Playbook:
    """Loads a playbook from text, as :func:`load_playbook` does.

    Args:
        file: names the text in messages.
        workload: what an execution was started with, for settings that are templates.
        renamed: the keys that its code location gives to assets, by those that the text has.
        model: what :attr:`Playbook.stored` has written. The text is read only if this version does not understand it.
    """
    if model is not None:
        with suppress(ValueError):
            return Playbook.from_stored(model, text, file=file, renamed=renamed or {}, lenient=lenient)
    playbook = required(*parse_report(text, file=file, lenient=lenient, workload=workload))
    return playbook.model_copy(update={"renamed": dict(renamed)}) if renamed else playbook


def load_report(
    path: Path | str, *, lenient: bool = False, code: bool = False
) -> tuple[Playbook | None, list[Problem]]:
    """Returns the playbook, None if it has errors, and all problems in file order.

    Args:
        code: also check Python, and values in commands, SQL and paths.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        message = f"cannot be read: {error.strerror}; check the path"
        return None, [Problem(Place(str(path), 1), message, kind=ProblemKind.UNREADABLE_FILE)]
    except UnicodeDecodeError as error:
        message = f"cannot be read: not UTF-8 text ({error.reason}); save it as UTF-8"
        place = place_at(str(path), error.object, error.start)
        return None, [Problem(place, message, kind=ProblemKind.UNREADABLE_FILE)]
    return parse_report(text, file=str(path), lenient=lenient, code=code)


def parse_report(
    text: str,
    *,
    file: str = "<playbook>",
    lenient: bool = False,
    code: bool = False,
    workload: Mapping[str, Any] | None = None,
) -> tuple[Playbook | None, list[Problem]]:
    """Reports on text, as :func:`load_report` does."""
    with collector_paused():
        document = Document(text, file, lenient=lenient)
        playbook = normalise(document, text, workload=workload or {})
        problems = list(document.problems)
        if playbook is not None:
            playbook = with_ends_as_assets(playbook)
            problems += check_playbook(playbook, document)
        if playbook is not None and code:
            problems += check_code(playbook, document)
            problems += check_unquoted(playbook, document)
            problems += check_values(playbook, document)
    problems = sorted(dict.fromkeys(problems), key=lambda problem: (problem.place.line, problem.place.column))
    if playbook is None or any(problem.severity == "error" for problem in problems):
        return None, problems
    if lenient:
        ignored = (problem for problem in problems if problem.kind in NOT_UNDERSTOOD)
        warnings = tuple(f"line {problem.place.line}: {problem.message}" for problem in ignored)
        playbook = playbook.model_copy(update={"lenient": True, "warnings": warnings})
    return playbook, problems


def with_settings(playbook: Playbook, step: str, settings: Mapping[str, Any], workload: Mapping[str, Any]) -> Playbook:
    """Returns a playbook of one step with rendered settings, also in its workbook.

    Args:
        settings: by the names of :attr:`Step.settings`, as they were rendered when the step was entered.
        workload: of the execution.

    Raises:
        PlaybookError: one of them is none of what may stand there.
    """
    document = Document(playbook.source, playbook.file, lenient=playbook.lenient)
    read = normalise(document, playbook.source, workload=workload, settings=settings, only=step)
    read = required(read, document.problems)
    [rendered_step], compiled_step = read.steps, playbook.step(step)
    spec = rendered_step.spec.model_copy(update={"pool": compiled_step.spec.pool})  # no template, and maybe left out
    settled = compiled_step.model_copy(update={"spec": spec, "loop": rendered_step.loop, "tasks": rendered_step.tasks})
    return read.model_copy(update={"steps": (settled,)})


def required(playbook: Playbook | None, problems: list[Problem]) -> Playbook:
    """Returns the playbook of a report, or raises a PlaybookError with every error of it."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors or playbook is None:
        raise PlaybookError(errors)
    return playbook
