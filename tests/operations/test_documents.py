"""What the pages about operations name is there: values of the chart, settings, commands, files, headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from typer.core import TyperGroup

from noetl_dagster.cli.app import COMMANDS, LazyCommand
from noetl_dagster.cli.health import Health
from noetl_dagster.service.metrics import Metrics
from noetl_dagster.settings import Settings
from tests.helm.chart import KIND, manifests, pods_of
from tests.operations.test_alerts import _sections
from tests.service.test_metrics import QUIET

PROJECT = Path(__file__).parents[2]
CHART = PROJECT / "helm/noetl-dagster"
PAGES = sorted(
    {PROJECT / "README.md", *(PROJECT / "docs").rglob("*.md"), *(PROJECT / "examples").glob("*/*.md")}
    - {PROJECT / "docs/reference/cli.md"}  # made from the commands, with their help
)
TEXTS = {page: page.read_text() for page in PAGES}
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = yaml.safe_load((CHART / "values.schema.json").read_text())

OF_SPARK = re.compile(r"spark\.(driver|executor|kubernetes|sql|connect|log|hadoop|python|local|ui)\.")
"""Spark's own names begin like the chart's value ``spark``."""
OF_DAGSTER = {"dagster.pools", "dagster.partitions", "dagster.Definitions.merge"}
"""Keys of a playbook, and a function of Dagster's, begin like the chart's value ``dagster``."""


def test_values_are_the_charts() -> None:
    assert not {(page.name, name) for page in PAGES for name in values_named(TEXTS[page]) if not exists(name)}


def test_a_value_that_there_is_not_is_found() -> None:
    text = "`api.replica` and `api.replicas`\n```sh\nhelm upgrade x y --set ingest.replicaz=3,api.replicas=2\n```\n"

    assert [name for name in values_named(text) if not exists(name)] == ["ingest.replicaz", "api.replica"]
    assert exists("workers.pools.large.slots")
    assert not exists("workers.pools.large.slot")


def test_blocks_of_values_are_taken_by_the_charts_schema() -> None:
    blocks = re.findall(r'```yaml title="values.yaml"\n(.*?)```', "".join(TEXTS.values()), re.DOTALL)

    taken = jsonschema.Draft202012Validator(SCHEMA)
    assert blocks
    for block in blocks:
        taken.validate(laid_over(VALUES, yaml.safe_load(block)))
    with pytest.raises(jsonschema.ValidationError):
        taken.validate(laid_over(VALUES, {"spark": {"mod": "kubernetes"}}))


def test_settings_are_read() -> None:
    # streams of NATS, credentials that are named by variables, the token of a foreign worker, the input of a script, the
    # mark of processes, tests
    others = re.compile(r"NOETL_(WORKER_EVENTS|COMMANDS|CREDENTIAL_|TOKEN$|INPUT$|PROCESSES$|TEST_HOME$)")
    ours = {f"NOETL_{name.upper()}" for name in Settings.model_fields}
    named = {(page.name, name) for page in PAGES for name in re.findall(r"\bNOETL_[A-Z][A-Z_]*[A-Z]\b", TEXTS[page])}
    assert not {(page, name) for page, name in named if name not in ours and not others.match(name)}


def test_commands_are_there() -> None:
    lines = [(page.name, line) for page in PAGES for line in commands_named(TEXTS[page])]
    assert not {(page, problem) for page, line in lines if (problem := command_problem(line))}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("noetl-dagster mising", "there is no command mising"),
        ("noetl-dagster verify --jsn", "verify has no option --jsn"),
        ("noetl-dagster services upp", "services has no command upp"),
        ("make tests", "there is no make tests"),
        ("scripts/locks", "there is no scripts/locks"),
        ("python -m benchmarks.size", "there is no benchmarks.size"),
    ],
)
def test_a_command_that_there_is_not_is_found(line: str, problem: str) -> None:
    (found,) = commands_named(f"```sh\n{line}\n```")

    assert command_problem(found) == problem


def test_links_lead_somewhere() -> None:
    wrong = set()
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXTS[page]):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in _sections(target.read_text())):
                wrong.add((page.name, link))
    assert not wrong


def test_components_and_files_of_the_chart_are_there() -> None:
    text = "".join(TEXTS.values())
    components = {"run"} | {pods.component for pods in pods_of(manifests(KIND))}

    for name in re.findall(r"app\.kubernetes\.io/component=([\w-]+)", text):
        assert name in components
    for kind, name in re.findall(r"\b(deploy|service|job)/noetl-noetl-dagster-([\w-]+)", text):
        assert name in components, f"{kind} {name}"
    for name in re.findall(r"(?:-f |`)((?:helm/)[\w./-]+)", text):
        assert (PROJECT / name).exists(), name


def test_the_page_of_metrics_lists_every_metric() -> None:
    rows = re.findall(r"^\| `(noetl_\w+)` \| (\w+)", (PROJECT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    health = Health(Settings())  # of processes without an API
    families: list[Metric] = [*text_string_to_metric_families(Metrics().text(QUIET).decode()), *health.collect()]
    there = {
        (f"{one.name}_total" if one.type == "counter" else one.name, one.type)
        for one in families
        if one.name.startswith("noetl_")
    }

    assert set(rows) == there
    assert len(rows) == len(there)


def values_named(text: str) -> Iterator[str]:
    """Dotted names of values: of ``--set``, and in code whose first word is one of the chart's own."""
    for assignment in re.findall(r"--set(?:-string)?[ =]([\w.,=\[\]-]+)", text):
        for one in assignment.split(","):
            name = one.partition("=")[0]
            if "." in name:
                yield name
    for name in re.findall(r"(?<!`)`([a-zA-Z]+(?:\.[a-zA-Z]+)+)`", text):
        of_chart = name.partition(".")[0] in VALUES and not OF_SPARK.match(name) and name not in OF_DAGSTER
        if of_chart and not name.endswith((".yaml", ".json")):
            yield name


def exists(name: str) -> bool:
    """Whether the schema takes a value of this name."""
    return _has(SCHEMA, name.split("."))


def _has(schema: dict[str, Any], parts: list[str]) -> bool:
    while "$ref" in schema:
        schema = SCHEMA["$defs" if "$defs" in SCHEMA else "definitions"][schema["$ref"].rpartition("/")[2]]
    if not parts:
        return True
    if "anyOf" in schema:
        return any(_has(one, parts) for one in schema["anyOf"])
    own, further = schema.get("properties", {}), schema.get("additionalProperties", True)
    if parts[0] in own:
        return _has(own[parts[0]], parts[1:])
    if isinstance(further, dict):
        return _has(further, parts[1:])
    return bool(further) and not own and schema.get("type") != "null"


def laid_over(under: Any, over: Any) -> Any:
    """As Helm merges values."""
    if isinstance(under, dict) and isinstance(over, dict):
        return {key: laid_over(under.get(key), over[key]) if key in over else under[key] for key in under | over}
    return over


def commands_named(text: str) -> Iterator[list[str]]:
    """The words of each command of ours, in blocks and in code."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"(?<!`)`([^`\n]+)`", text)
    for line in lines:
        match = re.search(
            r"(?:^|[\s/])(noetl-dagster) +[a-z]|^(make) [a-z]|^(scripts/)\w|(?:^|\s)(?:\S*python) -m (benchmarks)\.",
            line,
        )
        if match:
            start = match.start(match.lastindex or 0)
            yield re.split(r"\s+#|\s+&&|[;|)\"]", line[start:])[0].split()


def command_problem(words: list[str]) -> str | None:
    """What is wrong with a command; None: nothing."""
    match words[0]:
        case "make":
            known = re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
            return None if words[1] in known else f"there is no make {words[1]}"
        case "noetl-dagster":
            return _problem_of_ours(words[1:])
        case script if script.startswith("scripts/"):
            return None if (PROJECT / script).exists() else f"there is no {script}"
        case module:
            path = PROJECT / f"{module.replace('.', '/')}.py"
            return None if path.exists() else f"there is no {module}"


def _problem_of_ours(words: list[str]) -> str | None:
    name, *rest = words
    if name not in COMMANDS:
        return f"there is no command {name}"
    command = LazyCommand(name, *COMMANDS[name]).load()
    if isinstance(command, TyperGroup):
        if not rest or rest[0] not in command.commands:
            return f"{name} has no command {rest[0] if rest else ''}"
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    for option in (word.partition("=")[0] for word in rest if re.match(r"--\w", word)):
        if option not in known:
            return f"{name} has no option {option}"
    return None
