"""``check`` and ``schema``: the playbook language, without running any playbook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import orjson
import typer

from noetl_dagster import __version__
from noetl_dagster.cli.console import fail
from noetl_dagster.errors import Place, PlaybookError, Problem, ProblemKind
from noetl_dagster.playbook.catalog import Catalog, find_playbooks, folders_of, names_version
from noetl_dagster.playbook.loader import load_report
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.schema import language_schema
from noetl_dagster.playbook.wording import is_template
from noetl_dagster.settings import get_settings

Lenient = Annotated[
    bool, typer.Option("--lenient", help="report unsupported tool kinds and unknown keys as warnings; keys are ignored")
]

Findings = Mapping[str, Sequence[Problem]]
"""The problems of each file that was checked."""

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


class ReportFormat(StrEnum):
    """The formats of findings."""

    TEXT = "text"
    GITHUB = "github"
    JSON = "json"
    SARIF = "sarif"


def report(findings: Findings, format: ReportFormat) -> str:
    """Returns all findings as one text, without a newline at the end."""
    problems = list(chain.from_iterable(findings.values()))
    match format:
        case ReportFormat.TEXT:
            texts = (map(str, of_file) if of_file else [f"{file}: ok"] for file, of_file in findings.items())
            return "\n".join((*chain.from_iterable(texts), *_summary(findings)))
        case ReportFormat.GITHUB:
            return "\n".join((*map(_workflow_command, problems), *_summary(findings)))
        case ReportFormat.JSON:
            return _json(
                [
                    {**asdict(one.place), "severity": one.severity, "kind": one.kind, "message": one.message}
                    for one in problems
                ]
            )
        case ReportFormat.SARIF:
            return _json(_sarif(problems))


def _summary(findings: Findings) -> Iterable[str]:
    """Yields the numbers of valid and invalid playbooks; nothing for a single playbook."""
    if len(findings) == 1:
        return
    # "error" comes before "warning" in the alphabet
    worst = Counter(min((one.severity for one in kinds), default="right") for kinds in findings.values())
    yield (
        f"{len(findings)} playbooks: {worst['right']} right, {worst['warning']} with warnings, "
        f"{worst['error']} with errors"
    )
    for severity in ("error", "warning"):
        kinds = [one.kind.value for one in chain(*findings.values()) if one.severity == severity]
        if kinds:
            counts = ", ".join(f"{kind} {count}" for kind, count in Counter(kinds).most_common())
            yield f"{severity}s: {counts}"


def _workflow_command(problem: Problem) -> str:
    """Returns a command that GitHub Actions turns into an annotation of the file."""
    place = problem.place
    properties = {"file": place.file, "line": place.line, "col": place.column, "title": problem.kind.value}
    parameters = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in properties.items())
    return f"::{problem.severity} {parameters}::{_escaped(problem.message)}"


def _escaped(text: str, also: str = "") -> str:
    for character in f"%\r\n{also}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _sarif(problems: Iterable[Problem]) -> dict[str, Any]:
    """Returns a log of the Static Analysis Results Interchange Format, version 2.1.0."""
    kinds = [kind.value for kind in ProblemKind]
    rules = [{"id": kind, "shortDescription": {"text": kind.replace("-", " ")}} for kind in kinds]
    results = []
    for problem in problems:
        place = problem.place
        location = {
            "artifactLocation": {"uri": _uri(place.file)},
            "region": {"startLine": place.line, "startColumn": place.column},
        }
        result = {
            "ruleId": problem.kind.value,
            "ruleIndex": kinds.index(problem.kind.value),
            "level": problem.severity,
            "message": {"text": problem.message},
            "locations": [{"physicalLocation": location}],
        }
        results.append(result)
    driver = {"name": "noetl-dagster", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _uri(file: str) -> str:
    """Returns a path below the working folder relative to it, as viewers of a repository expect."""
    path, here = Path(file).resolve(), Path.cwd()
    return quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()


def _json(document: Any) -> str:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


def check(
    paths: Annotated[list[Path], typer.Argument(help="playbook files, or folders of them")],
    lenient: Lenient = False,
    format: Annotated[
        ReportFormat,
        typer.Option(
            help="text: ``file:line:column: message``, and of several playbooks a summary; "
            "github: commands that annotate a pull request; json: a list; sarif: a log of SARIF 2.1.0"
        ),
    ] = ReportFormat.TEXT,
) -> None:
    """Find mistakes in playbooks without running them; exit code 1 on errors, and for a folder without playbooks."""
    files = {path: playbook_files(path) for path in paths}
    for path, playbooks in files.items():
        if not playbooks:
            fail(f"{path}: the folder has no playbooks: no visible .yaml or .yml file has the line 'kind: Playbook'")
    findings: dict[str, list[Problem]] = {}
    for file in chain.from_iterable(files.values()):
        playbook, problems = load_report(file, lenient=lenient, code=True)
        findings[str(file)] = [*problems, *(_missing(playbook, file) if playbook is not None else ())]
    typer.echo(report(findings, format))
    errors = any(problem.severity == "error" for of_file in findings.values() for problem in of_file)
    raise typer.Exit(1 if errors else 0)


def _missing(playbook: Playbook, file: Path) -> Iterator[Problem]:
    """Yields warnings about child playbooks that no folder has, and credentials that are in no file."""
    settings, credentials = get_settings(), None
    if settings.credentials_file is not None:
        from noetl_dagster.tools.access.credentials import credential_names

        credentials = credential_names(settings)
    for task in (*(task for step in playbook.steps for task in step.tasks), *playbook.workbook.values()):
        path, place = str(task.config.get("path")), task.place or Place(str(file), 1)
        is_open = is_template(path) or names_version(path) or "version" in task.config
        folders = folders_of(file.parent, settings.playbooks_path)
        if task.kind == "playbook" and not is_open and not any(_has(folder, path) for folder in folders):
            message = f"no folder has the child playbook {path!r}; it must have been registered"
            yield Problem(place, message, "warning", ProblemKind.MISSING_PLAYBOOK)
        name = task.auth if isinstance(task.auth, str) and not is_template(task.auth) else None
        if credentials is not None and name is not None and name not in credentials:
            message = f"{settings.credentials_file} has no credential {name!r}; it must be in the database"
            yield Problem(place, message, "warning", ProblemKind.MISSING_CREDENTIAL)


@cache
def _has(folder: Path, path: str) -> bool:
    try:
        return Catalog(folder).resolve(path).is_file()
    except PlaybookError as error:  # several files may claim the path
        return any(problem.kind is not ProblemKind.MISSING_PLAYBOOK for problem in error.problems)


def playbook_files(path: Path, *, code: int = 1) -> list[Path]:
    """Returns the file, or the playbooks of the folder; without either, ends the program with ``code``."""
    if not path.exists():
        fail(f"{path}: no such file or folder", code)
    return find_playbooks(path) if path.is_dir() else [path]


def schema() -> None:
    """Print the JSON Schema of the playbook language, for editors."""
    typer.echo(_json(language_schema()))
