"""Data that tries to become a command, a statement or a path."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noetl_dagster.errors import (
    CredentialError,
    PlaybookError,
    Problem,
    ProblemKind,
    TemplateError,
    ToolError,
)
from noetl_dagster.playbook.catalog import Catalog, find_playbooks
from noetl_dagster.playbook.loader import load_report, parse_report
from noetl_dagster.playbook.models import Sink, Task
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.playbook.templates.scope import Scope
from noetl_dagster.settings import get_settings
from noetl_dagster.tools.access.keychain import Keychain
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.sinks.parts import PartSinks
from tests.serving import served

ROWS = [{"n": 1}]


async def with_name(run: Any, kind: str, name: str, **config: Any) -> Any:
    """Runs a task whose texts have NAME where the playbook writes a template, which renders to ``name``."""

    def put(value: Any, text: str) -> Any:
        if isinstance(value, dict):
            return {key: put(item, text) for key, item in value.items()}
        return value.replace("NAME", text) if isinstance(value, str) else value

    task = Task(name="copy", kind=kind, config=put(config, "{{ row.name }}"))
    return await run(kind, task=task, **put(config, name))


LEAVING = [
    ("out/NAME.jsonl", "../../escaped"),
    ("out/NAME.jsonl", "deep/../../../escaped"),
    ("out/NAME.jsonl", "link/escaped"),
    ("NAME.jsonl", "../escaped"),
    ("NAME", "{tmp}/escaped.jsonl"),
    ("NAME", "file://{tmp}/escaped.jsonl"),
    ("/NAME", "{tmp}/escaped.jsonl"),
    ("{tmp}/flows/out/NAME.jsonl", "../../escaped"),
    ("file://{tmp}/flows/out/NAME.jsonl", "../../escaped"),
    ("s3://lake/visits/NAME.jsonl", "../../other"),
]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a playbook, with a link that leads out of it."""
    (tmp_path / "flows" / "out").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "flows" / "out" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "flows"


async def test_a_transfer_stays_in_its_folder(run: Any, strict: ToolContext, folder: Path, tmp_path: Path) -> None:
    (folder / "rows.jsonl").write_text('{"n":1}\n')
    before = files_below(tmp_path)
    refused = r"target\.path: .*(leaves its folder|an absolute path that a template made)"
    for place, text in LEAVING:
        path, name = place.format(tmp=tmp_path), text.format(tmp=tmp_path)
        with pytest.raises(ToolError, match=refused):
            await with_name(run, "transfer", name, source={"path": "rows.jsonl"}, target={"path": path}, folder="flows")
        with pytest.raises(ToolError, match=r"source\.path: "):
            await with_name(run, "transfer", name, source={"path": path}, target={"path": "copy.jsonl"}, folder="flows")
        assert files_below(tmp_path) == before, place


async def test_a_sink_stays_in_its_folder(strict: ToolContext, folder: Path, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    for path, name in LEAVING:
        text, values = path.format(tmp=tmp_path).replace("NAME", "{{ name }}"), {"name": name.format(tmp=tmp_path)}
        for sink in (Sink(tool="file", path=text), Sink(tool="duckdb", database=text, table="rows")):
            with pytest.raises(ToolError, match=r"leaves its folder|an absolute path that a template made"):
                await PartSinks(strict).stage(sink, ROWS, values, name="1.each.1.1", own={}, folder=str(folder))
            assert files_below(tmp_path) == before, path


@pytest.mark.parametrize("path", ["visits/{{ name }}", "{{ name }}"])
async def test_a_key_stays_below_its_prefix(strict: ToolContext, path: str) -> None:
    sinks, own = PartSinks(strict), {"name": "1.each.1.1", "own": {}, "folder": "."}
    with pytest.raises(ToolError, match=r"its key has '\.\.'"):
        await sinks.stage(Sink(tool="minio", path=path), ROWS, {"name": "../../exec/1"}, **own)
    place = await sinks.stage(Sink(tool="minio", path=path), ROWS, {"name": "a/b"}, **own)
    assert place is not None
    assert place.path == path.replace("{{ name }}", "a/b")


async def test_a_database_stays_in_its_folder(run: Any, strict: ToolContext, folder: Path, tmp_path: Path) -> None:
    config = {"database": "NAME.duckdb", "command": "CREATE TABLE t (n int)", "folder": "flows"}
    with pytest.raises(ToolError, match="leaves its folder"):
        await with_name(run, "duckdb", "../escaped", **config)
    with pytest.raises(ToolError, match=r"target\.database: .*leaves its folder"):
        await with_name(
            run,
            "transfer",
            "../escaped",
            source={"path": "rows.jsonl"},
            target={"kind": "duckdb", "database": "NAME.duckdb", "table": "t"},
            folder="flows",
        )
    await with_name(run, "duckdb", "inside", **config)
    assert {name for name in files_below(tmp_path) if "duckdb" in name} == {"flows/inside.duckdb"}


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("out/NAME.jsonl", "ward 7", "out/ward 7.jsonl"),
        ("out/NAME.jsonl", "deep/er", "out/deep/er.jsonl"),
        ("out/NAME.jsonl", "a/../b", "out/b.jsonl"),
        ("NAME", "copy.jsonl", "copy.jsonl"),
        ("../NAME.jsonl", "beside", "../beside.jsonl"),
        ("{tmp}/flows/NAME.jsonl", "whole", "whole.jsonl"),
    ],
)
async def test_paths_below_a_folder_are_as_before(
    run: Any, strict: ToolContext, folder: Path, tmp_path: Path, path: str, name: str, found: str
) -> None:
    (folder / "rows.jsonl").write_text('{"n":1}\n')
    target = {"path": path.format(tmp=tmp_path)}
    (folder / found).parent.mkdir(parents=True, exist_ok=True)
    await with_name(run, "transfer", name, source={"path": "rows.jsonl"}, target=target, folder="flows")
    assert (folder / found).read_text() == '{"n":1}\n'


async def test_templates_may_name_absolute_paths_below_permitted_folders(
    run: Any, strict: ToolContext, folder: Path, tmp_path: Path
) -> None:
    strict.settings = strict.settings.model_copy(update={"file_folders": (tmp_path / "elsewhere",)})
    (folder / "rows.jsonl").write_text('{"n":1}\n')
    source = {"path": "rows.jsonl"}
    target = {"path": "NAME"}
    await with_name(run, "transfer", f"{tmp_path}/elsewhere/copy.jsonl", source=source, target=target, folder="flows")
    assert (tmp_path / "elsewhere" / "copy.jsonl").exists()
    with pytest.raises(ToolError, match="NOETL_FILE_FOLDERS"):
        await with_name(
            run, "transfer", f"{tmp_path}/elsewhere/../copy.jsonl", source=source, target=target, folder="flows"
        )


async def test_scripts_are_below_permitted_folders(run: Any, strict: ToolContext, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.py").write_text("result = 'hush'")
    (folder / "link.py").symlink_to(tmp_path / "secret.py")
    for uri in ("/etc/passwd", "file:///etc/passwd", f"{tmp_path}/secret.py", f"{folder}/link.py"):
        for kind in ("python", "shell", "postgres"):
            with pytest.raises(ToolError, match="NOETL_FILE_FOLDERS") as caught:
                await run(kind, script=uri, folder="flows")
            assert caught.value.kind == "schema"
    strict.settings = strict.settings.model_copy(update={"file_folders": (tmp_path,)})
    (folder / "job.py").write_text("result = 1")
    assert (await run("python", script=f"{folder}/job.py", folder="flows")).data == 1


@pytest.mark.parametrize("path", ["../child", "{tmp}/child", "{tmp}/child.yaml", "link", "out/../../child"])
def test_a_child_playbook_is_below_permitted_folders(
    folder: Path, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data may name the child, and its code would run."""
    text = "kind: Playbook\nmetadata: {name: child, path: none}\nworkflow: [{step: start, tool: {kind: noop}}]\n"
    for file in (tmp_path / "child.yaml", folder / "inside.yaml"):
        file.write_text(text)
    (folder / "link.yaml").symlink_to(tmp_path / "child.yaml")
    monkeypatch.setenv("NOETL_FILE_FOLDERS", "")
    get_settings.cache_clear()
    with pytest.raises(PlaybookError, match="outside of the permitted folders"):
        Catalog(folder).resolve(path.format(tmp=tmp_path))
    assert Catalog(folder).resolve("inside") == folder / "inside.yaml"
    assert Catalog(folder).resolve("out/../inside").samefile(folder / "inside.yaml")
    monkeypatch.setenv("NOETL_FILE_FOLDERS", str(tmp_path))
    get_settings.cache_clear()
    assert Catalog(folder).resolve(path.format(tmp=tmp_path)).samefile(tmp_path / "child.yaml")
    get_settings.cache_clear()


async def test_an_error_does_not_quote_a_script(run: Any, folder: Path) -> None:
    (folder / "key.bin").write_bytes(b"\xff\xfehush")
    with pytest.raises(ToolError) as caught:
        await run("python", script="key.bin", folder="flows")
    assert str(caught.value) == "script 'key.bin' of step stage is not text in UTF-8"


async def test_a_registered_playbook_runs_commands_in_a_folder_that_exists(
    run: Any, strict: ToolContext, folder: Path, tmp_path: Path
) -> None:
    """Its file is its catalog path, whose folder is on no disk."""
    strict.settings = strict.settings.model_copy(update={"playbooks_path": folder})
    found = (await run("shell", cmds="pwd; echo done", folder="no/such/path")).data
    assert found["stdout"] == f"{folder}\ndone\n"
    strict.settings = strict.settings.model_copy(update={"playbooks_path": tmp_path / "none"})
    assert (await run("shell", cmds="pwd", folder="no/such/path")).data["stdout"] == f"{Path.cwd()}\n"


@pytest.fixture
async def bomb() -> AsyncIterator[str]:
    """The address of 64 MiB of zeros that take 64 KB on the wire."""
    content = gzip.compress(bytes(64 << 20), 9)

    async def answer(request: Request) -> Response:
        return Response(content, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    app = Starlette(routes=[Route("/bomb", answer, methods=["GET", "POST"])])
    with served(app) as url:
        yield f"{url}/bomb"


async def test_a_script_that_expands_is_refused(run: Any, strict: ToolContext, bomb: str) -> None:
    with pytest.raises(ToolError, match="more than 33554432 bytes"):
        await run("python", script=bomb)


async def test_a_token_that_expands_is_refused(strict: ToolContext, bomb: str) -> None:
    keychain = Keychain(strict.credentials)
    scope = Scope(execution_id=1, workload={}, ctx={}, steps={})
    with pytest.raises(CredentialError, match="more than 33554432 bytes"):
        await keychain.open([{"name": "api", "endpoint": bomb}], scope, strict.results.get)


async def test_a_large_script_of_a_file_is_refused(run: Any, strict: ToolContext, folder: Path) -> None:
    strict.settings = strict.settings.model_copy(update={"http_body_bytes": 1024})
    await asyncio.to_thread((folder / "job.py").write_text, "#" * 1025)
    with pytest.raises(ToolError, match="1025 bytes, more than 1024"):
        await run("python", script="job.py", folder="flows")


HOSTILE = ["a b", "'", '"', "$(touch owned)", "`touch owned`", "; touch owned #", "-n", "*", "\\", "é\n", "", "a'b'c"]


async def test_a_quoted_value_is_one_word_of_a_shell(run: Any, tmp_path: Path) -> None:
    (tmp_path / "count").write_text('#!/bin/sh\nprintf "%s|" "$#" "$@"\n')
    for value in HOSTILE:
        text = compile_value("sh ./count {{ value | shell_quote }} end").render({"value": value})
        assert (await run("shell", cmds=text)).data["stdout"] == f"2|{value}|end|"
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["a b", "$HOME", 3], "'a b' '$HOME' 3"),
        (None, "''"),
        (True, "true"),
        (1.5, "1.5"),
        ({"a": "it's"}, """'{"a":"it'"'"'s"}'"""),
        ([], ""),
    ],
)
def test_values_of_other_types_are_quoted(value: Any, text: str) -> None:
    assert compile_value("echo {{ value | shell_quote }}").render({"value": value}) == f"echo {text}"


PARTS = [
    ("ward 7", "ward 7"),
    ("Müller & Söhne", "Müller & Söhne"),
    ("2026-01-01T00:00", "2026-01-01T00:00"),
    (7, "7"),
    ("..", "%2E."),
    ("../../etc/passwd", "%2E.%2F..%2Fetc%2Fpasswd"),
    (".hidden", "%2Ehidden"),
    ("a/b", "a%2Fb"),
    ("a%2Fb", "a%252Fb"),
    ("a\\b", "a%5Cb"),
    ("a\0b\n", "a%00b%0A"),
    ("a?b#c*", "a%3Fb%23c%2A"),
]


async def test_a_path_part_is_one_file_of_its_folder(
    run: Any, strict: ToolContext, folder: Path, tmp_path: Path
) -> None:
    (folder / "rows.jsonl").write_text('{"n":1}\n')
    sink, source = Sink(tool="file", path="sunk/{{ value | path_part }}/rows"), {"path": "rows.jsonl"}
    for value, part in PARTS:
        assert compile_value("{{ value | path_part }}").render({"value": value}) == part
        before = files_below(tmp_path)
        await with_name(run, "transfer", part, source=source, target={"path": "out/NAME.jsonl"}, folder="flows")
        assert files_below(tmp_path) - before == {f"flows/out/{part}.jsonl"}
        staged: dict[str, Any] = {"name": "1.each.1.1", "own": {}, "folder": str(folder)}
        await PartSinks(strict).stage(sink, ROWS, {"value": value}, **staged)
        assert (folder / "sunk" / part / "rows" / "_staged" / "1.each.1.1.parquet").exists()


@pytest.mark.parametrize("value", ["", None, [], ["a"], {"a": 1}])
def test_a_path_part_is_never_empty(value: Any) -> None:
    with pytest.raises(TemplateError, match="path_part: one name is needed"):
        compile_value("out/{{ value | path_part }}").render({"value": value})


def test_a_command_has_no_null_character() -> None:
    with pytest.raises(TemplateError, match="NUL"):
        compile_value("{{ value | shell_quote }}").render({"value": "a\0b"})


PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: quoting, path: quoting}
workload: {table: visits, name: x}
workflow:
  - step: load
    tool: {kind: python, code: "result = {'name': 'x', 'n': 1}"}
    next: {arcs: [{step: use}]}
  - step: use
    loop: {in: "{{ load.rows }}", iterator: row}
    tool:
      TASK
"""

UNQUOTED = [
    ('{kind: shell, cmds: "echo {{ row.name }}"}', "{{ row.name }}", "shell_quote"),
    ('{kind: shell, cmds: ["ls", "echo {{ load.name | upper }}"]}', "{{ load.name | upper }}", "shell_quote"),
    ('{kind: shell, cmds: "echo {{ workload.name }}"}', "{{ workload.name }}", "shell_quote"),
    ('{kind: shell, cmds: "echo {{ name }}"}', "{{ name }}", "shell_quote"),
    ('{kind: shell, cmds: "echo {{ row.a | int + row.b }}"}', "{{ row.a | int + row.b }}", "shell_quote"),
    ('{kind: shell, cmds: "{% if row.n %}echo {{ row.name }}{% endif %}"}', "{{ row.name }}", "shell_quote"),
    ('{kind: container, image: x, command: "echo {{ row.name }}"}', "{{ row.name }}", "shell_quote"),
    ('{kind: container, image: x, command: [bash, "-c", "echo {{ row.name }}"]}', "{{ row.name }}", "shell_quote"),
    ("{kind: postgres, command: \"SELECT * FROM t WHERE a = '{{ row.name }}'\"}", "{{ row.name }}", "sql_literal"),
    ('{kind: postgres, command: "DELETE FROM {{ row.table }}"}', "{{ row.table }}", "sql_identifier"),
    ('{kind: duckdb, command: "SELECT {{ workload.name }}"}', "{{ workload.name }}", "sql_literal"),
    ('{kind: spark, command: "SELECT {{ row.name | tojson }}"}', "{{ row.name | tojson }}", "sql_literal"),
    (
        '{kind: transfer, source: {kind: postgres, query: "SELECT {{ row.n }}"}, target: {path: a.jsonl}}',
        "{{ row.n }}",
        "sql_literal",
    ),
    (
        '{kind: transfer, source: {path: a.jsonl}, target: {path: "out/{{ row.name }}.jsonl"}}',
        "{{ row.name }}",
        "path_part",
    ),
    ('{kind: duckdb, database: "{{ row.name }}.duckdb", command: "SELECT 1"}', "{{ row.name }}", "path_part"),
    ('{kind: python, script: "jobs/{{ row.name }}.py"}', "{{ row.name }}", "path_part"),
    ('{kind: s3, operation: delete, prefix: "out/{{ row.name }}"}', "{{ row.name }}", "path_part"),
    ('{kind: gcs, source: "{{ row.name }}.csv", key: a}', "{{ row.name }}", "path_part"),
    ('{kind: noop, sink: {tool: file, path: "out/{{ row.name }}"}}', "{{ row.name }}", "path_part"),
    ('{kind: noop, sink: {tool: postgres, command: "INSERT INTO t VALUES ({{ row.n }})"}}', "{{ row.n }}", "sql_lit"),
    ("{kind: shell, cmds: \"docker ps --format '{{.Names}}' {{ row.name }}\"}", "{{ row.name }}", "shell_quote"),
    ("{kind: shell, cmds: \"echo '{{ row.name | shell_quote }}'\"}", "shell_quote }}", "take the quotes away"),
    ("{kind: shell, cmds: 'echo \"of {{ row.name | shell_quote }}\"'}", "shell_quote }}", "take the quotes away"),
    ("{kind: postgres, command: \"SELECT '%{{ row.n | sql_literal }}'\"}", "sql_literal }}", "take the quotes away"),
]

QUOTED = [
    "{kind: shell, cmds: \"echo {{ row.name | shell_quote }} 'a b' {{ row.b | shell_quote }}\"}",
    '{kind: shell, cmds: "echo {{ row.n | int }} {{ load | length }} {{ _index }} {{ execution_id }} {{ 3 * 4 }}"}',
    "{kind: shell, cmds: \"echo {{ 'yes' if row.n > 3 else 'no' }} $NAME\", env: {NAME: '{{ row.name }}'}}",
    '{kind: shell, cmds: "{% for n in range(3) %}echo {{ n }};{% endfor %}"}',
    '{kind: shell, cmds: "{% set it = row.name | shell_quote %}echo {{ it }}"}',
    '{kind: shell, code: "echo {{ row.name }}"}',
    "{kind: shell, cmds: \"docker ps --format '{{.Names}}'\"}",
    '{kind: container, image: x, command: [echo, "{{ row.name }}"]}',
    '{kind: postgres, command: "SELECT * FROM {{ workload.table }} WHERE a = :name", params: {name: "{{ row.name }}"}}',
    '{kind: postgres, command: "SELECT {{ row.a | sql_literal }}, {{ row.b | sql_identifier }}"}',
    '{kind: postgres, command: "SELECT 1 WHERE a IN {{ row.a | sql_list }} -- it\'s {{ row.n | sql_literal }}"}',
    "{kind: postgres, command: \"SELECT 'it''s', {{ row.a | sql_literal }} WHERE day = '{{ partition.key }}'\"}",
    '{kind: transfer, source: {path: "{{ row.path }}"}, target: {path: "out/{{ row.name | path_part }}.jsonl"}}',
    '{kind: transfer, source: {path: "{{ workload.name }}/a.jsonl"}, target: {path: a.jsonl}}',
    '{kind: http, url: "http://api/{{ row.name }}"}',
    '{kind: noop, sink: {tool: file, path: "out/{{ row.n | int }}"}}',
]


def unquoted(task: str) -> list[Problem]:
    playbook, problems = parse_report(PLAYBOOK.replace("TASK", task), file="quoting.yaml", code=True)
    assert playbook is not None, problems
    return [problem for problem in problems if problem.kind is ProblemKind.UNQUOTED_TEMPLATE]


@pytest.mark.parametrize(("task", "source", "remedy"), UNQUOTED)
def test_an_unquoted_template_is_a_warning(task: str, source: str, remedy: str) -> None:
    [found] = unquoted(task)
    assert (found.severity, found.place.line) == ("warning", 13)
    assert source in found.message
    assert remedy in found.message


@pytest.mark.parametrize("task", QUOTED)
def test_quoted_templates_are_no_warnings(task: str) -> None:
    assert unquoted(task) == []


LARGE = [
    "{% set a = b %}{% set b = a %}{{ a }}",
    "".join(f"{{% set a{n} = a{n + 1} ~ a{n + 1} %}}" for n in range(300)) + "{{ a0 }}",
    "echo " + "'{{ row.name | shell_quote }} " * 1_000,
    "echo " + "{{ row.name }} " * 1_000,
]


@pytest.mark.parametrize("text", LARGE, ids=range(len(LARGE)))
def test_the_check_is_fast_for_large_texts(text: str) -> None:
    started = time.perf_counter()
    unquoted(orjson.dumps({"kind": "shell", "cmds": text}).decode())
    assert time.perf_counter() - started < 5


def test_a_variable_that_is_set_again_and_again_is_looked_at_once() -> None:
    text = "{% set a = row.b %}" + "{% set a = a | upper %}" * 3 + "{{ a }} {% set b = a | int %}{{ b }}"
    [found] = unquoted(orjson.dumps({"kind": "shell", "cmds": text}).decode())
    assert "the value of {{ a }} becomes" in found.message


def test_a_warning_names_the_line_of_the_template() -> None:
    text = "kind: postgres\n      command: |\n        SELECT 1\n        WHERE a = '{{ row.name }}'\n          AND {{ row.b }}"
    assert [found.place.line for found in unquoted(text)] == [16, 17]


@pytest.mark.parametrize("folder", ["playbooks", "examples"])
def test_our_own_playbooks_quote(folder: str) -> None:
    for file in find_playbooks(Path(folder)):
        assert not [one for one in load_report(file, code=True)[1] if one.kind is ProblemKind.UNQUOTED_TEMPLATE]
