"""Secrets in errors, events, metadata for Dagster and log lines: each row is a way in which one was seen there."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from cryptography.fernet import Fernet
from dagster import DagsterInstance, serialize_value
from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noetl_dagster.compiler.runs import EXECUTION_TAG
from noetl_dagster.engine.engine import Engine
from noetl_dagster.events.state import ExecutionState
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.process.redaction import SECRETS, Redactor
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.service.problems import problem_response
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.credential_types import CredentialType
from tests.definitions import definitions_of
from tests.playbooks import playbook, text_of
from tests.serving import served

PIN = '0pen-Sesame/"q\\uote" & m\u00f6re+42'
TOKEN = "tok_live_4eC39HqLyjWDarjtT1zdp7dc0123456789abcdefghijklmn"
LINE = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
KEY = f"-----BEGIN PRIVATE KEY-----\n{LINE}\n-----END PRIVATE KEY-----\n"

FORMS = [
    *(TOKEN, TOKEN[:24], LINE, "0pen-Sesame", PIN, repr(PIN)[1:-1], json.dumps(PIN)[1:-1]),
    *(json.dumps(PIN, ensure_ascii=False)[1:-1], quote(PIN), quote(PIN, safe=""), quote(TOKEN)),
    *(base64.b64encode(one.encode()).decode().rstrip("=") for one in (PIN, TOKEN, f"me:{PIN}")),
]
"""Texts that must be nowhere."""

WORKFLOW = """
    keychain:
      - {name: vault, credential: vault}
      - {name: env, provider: file, map: {key: private-key}}
    workload: {api: ""}
    workflow:
"""

STEPS = {
    "bind": "{kind: postgres, auth: main, query: 'SELECT $1::int', params: ['{{ keychain.vault.pin }}']}",
    "long_bind": "{kind: postgres, auth: main, query: 'SELECT $1::int', params: ['{{ keychain.vault.session }}']}",
    "cast": "{kind: postgres, auth: main, query: 'SELECT $1::text::int', params: ['{{ keychain.vault.session }}']}",
    "literal": "{kind: postgres, auth: main, query: \"SELECT '{{ keychain.vault.session }}'::int\"}",
    "duckdb": "{kind: duckdb, query: 'SELECT ''{{ keychain.vault.session }}''::INTEGER'}",
    "template": "{kind: python, input: {x: '{{ keychain.vault[keychain.vault.pin].y }}'}, code: 'return 1'}",
    "raised": "{kind: python, input: {x: '{{ keychain.vault.pin }}'}, code: 'raise ValueError(x)'}",
    "bytes": "{kind: python, input: {x: '{{ keychain.vault.pin }}'}, code: 'raise ValueError(x.encode())'}",
    "encoded": (
        "{kind: python, input: {x: '{{ keychain.vault.pin }}'}, code: "
        "'import base64; raise ValueError(base64.b64encode(x.encode()).decode())'}"
    ),
    "line": "{kind: python, input: {x: '{{ keychain.env.key }}'}, code: 'raise ValueError(x.splitlines()[1])'}",
    "own_process": (
        "{kind: python, spec: {isolation: subprocess}, input: {x: '{{ keychain.vault.pin }}'}, "
        "code: 'raise ValueError(repr(x))'}"
    ),
    "shell": "{kind: shell, env: {P: '{{ keychain.vault.pin }}'}, cmds: 'echo \"$P\" >&2; exit 3'}",
    "refused": "{kind: http, method: post, url: '{{ api }}/refused', json: {pin: '{{ keychain.vault.pin }}'}}",
    "address": "{kind: http, url: '{{ api }}/refused', params: {pin: '{{ keychain.vault.pin }}'}}",
    "unreachable": "{kind: http, url: 'http://127.0.0.1:1/{{ keychain.vault.pin | urlencode }}'}",
    "echoed_login": "{kind: http, method: post, url: '{{ api }}/refused', auth: login}",
    "no_file": "{kind: shell, script: '/nowhere/{{ keychain.vault.session }}.sh'}",
}
"""Steps that fail with an error that quotes a secret."""

RESULTS = {
    "returned": (
        "{kind: python, input: {x: '{{ keychain.vault.pin }}'}, code: 'return {\"a\": [{\"b\": x}]}'}",
        "data.a[0].b",
    ),
    "selected": (
        "{kind: postgres, auth: main, query: 'SELECT $1::text AS pin', params: ['{{ keychain.vault.pin }}']}",
        "data.rows[0].pin",
    ),
    "answered": ("{kind: http, url: '{{ api }}/echo', auth: login}", "data.data.authorization"),
    "kept": (
        "[{name: a, kind: python, input: {x: '{{ keychain.vault.session }}'}, code: return x}, "
        "{name: b, kind: noop, result: 1, set: {ctx.kept: '{{ a }}'}}]",
        "ctx.kept",
    ),
    "large": (
        "{kind: python, input: {x: '{{ keychain.vault.session }}'}, "
        'code: \'return [{"a": x, "b": str(n)} for n in range(500)]\'}',
        "data[0].a",
    ),
}
"""Steps whose results contain a secret, and the field."""


def workflow() -> str:
    """Each step follows the one before, whether that failed or not; the last fails without an arc."""
    tools = {**STEPS, **{name: tool for name, (tool, _) in RESULTS.items()}}
    lines, names = [], [*tools, "printed", "named", "checked", "last"]
    tools["printed"] = "{kind: python, input: {x: '{{ keychain.vault.pin }}'}, code: 'print(x)'}"
    tools["named"] = (
        "{kind: duckdb, query: 'CREATE TABLE t_{{ keychain.vault.session }} AS SELECT 1 AS a; "
        "SELECT a FROM t_{{ keychain.vault.session }}'}"
    )
    tools["checked"] = (
        "{kind: python, input: {x: '{{ keychain.vault.session }}'}, code: 'return [{\"a\": x}]'}\n"
        "        checks: [{name: known, accepted: {a: [b]}}]"
    )
    tools["last"] = "{kind: python, input: {x: '{{ keychain.vault.pin }}'}, code: 'raise KeyError(x)'}"
    for name, following in zip(names, [*names[1:], None], strict=True):
        lines.append(f"      - step: {name}\n        tool: {tools[name]}")
        if following is not None:
            lines.append(f"        next: [{{step: {following}, when: '{{{{ true }}}}'}}]")
    return WORKFLOW + "\n".join(lines) + "\n"


@dataclass
class Seen:
    """What a run has left."""

    state: ExecutionState
    events: dict[str, str]
    tables: str
    dagster: str
    logs: str


@pytest.fixture(scope="module")
def seen(module_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "private-key").write_text(KEY)
    settings = module_settings.model_copy(
        update={
            "credential_key": SecretStr(Fernet.generate_key().decode()),
            "secrets_path": folder,
            "default_postgres_credential": "embedded",
        }
    )
    noetl = EngineProvider(settings)
    store = noetl.engine().runtime.tool_context.credentials.store
    try:
        noetl.run(store("vault", CredentialType.SECRET, {"pin": PIN, "session": TOKEN}))
        noetl.run(store("login", CredentialType.BASIC, {"username": "me", "password": PIN}))
        with served(_application()) as api, DagsterInstance.ephemeral() as instance, _log_lines() as lines:
            job = definitions_of([playbook(workflow())], noetl).resolve_job_def("sample")
            config = {"ops": {"sample_playbook": {"config": {"api": api}}}}
            result = job.execute_in_process(run_config=config, instance=instance, raise_on_error=False)
            run = instance.get_run_by_id(result.run_id)
            assert run is not None
            state = run_sync(noetl.engine().runtime.load(int(run.tags[EXECUTION_TAG]))).state
            entries = [serialize_value(entry) for entry in instance.all_logs(result.run_id)]
        yield Seen(state, _events(noetl), _tables(noetl), "\n".join(entries), lines.getvalue())
    finally:
        noetl.close()
        SECRETS.forget()


@contextmanager
def _log_lines() -> Iterator[io.StringIO]:
    """Collects the lines of all loggers."""
    stream, root = io.StringIO(), logging.getLogger()
    handler, level = logging.StreamHandler(stream), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def _application() -> Starlette:
    async def refused(request: Request) -> Response:
        text = f"{request.url} {request.headers.get('authorization')} {(await request.body()).decode()}"
        return Response(text, 422, {"x-echo": request.headers.get("authorization", "")})

    async def echo(request: Request) -> Response:
        return Response(json.dumps(dict(request.headers)), media_type="application/json")

    routes = [Route("/refused", refused, methods=["GET", "POST"]), Route("/echo", echo)]
    return Starlette(routes=routes)


def _events(noetl: EngineProvider) -> dict[str, str]:
    """The events of each step."""
    query = "SELECT coalesce(node_name, '') AS step, string_agg(event::text, ' ') AS text FROM noetl.event GROUP BY 1"
    return {row["step"]: row["text"] for row in noetl.run(noetl.engine().runtime.pool.fetch(query))}


def _tables(noetl: EngineProvider) -> str:
    """The rows of the other tables of the event log."""
    pool = noetl.engine().runtime.pool
    names = noetl.run(pool.fetch("SELECT tablename AS name FROM pg_tables WHERE schemaname = 'noetl'"))
    texts = []
    for row in names:
        if row["name"] not in ("event", "credential", "keychain") and not row["name"].startswith("event_"):
            # the address of a small result contains the result itself
            query = f"SELECT (to_jsonb(t) - 'physical_uri')::text AS text FROM noetl.{row['name']} t"
            rows = noetl.run(pool.fetch(query))
            texts += [f"{row['name']}: {one['text']}" for one in rows]
    return "\n".join(texts)


def leaked(text: str) -> list[str]:
    """Returns the forms of secrets in a text; rows of PostgreSQL double quotes and backslashes."""
    plain = text.replace('""', '"').replace("\\\\", "\\")
    return [form for form in FORMS if form in text or form in plain]


@pytest.mark.parametrize("step", STEPS)
def test_errors(seen: Seen, step: str) -> None:
    end = seen.state.latest[step]
    assert end.error is not None
    assert "***" in end.error
    assert not leaked(json.dumps(end.envelope, default=str))
    assert not leaked(seen.events[step])


@pytest.mark.parametrize("step", RESULTS)
def test_results_stay_as_they_are_and_warn(seen: Seen, step: str) -> None:
    end = seen.state.latest[step]
    assert end.error is None
    envelope, [field] = end.envelope, end.envelope["secrets"][:1]
    if step not in ("large", "kept"):
        assert leaked(json.dumps(envelope["data"], ensure_ascii=False))
    assert field == RESULTS[step][1]
    message = f"step {step} stores a secret in {field}"
    assert message in seen.events[step]
    assert message in seen.dagster
    assert f"step {step} of execution {seen.state.execution_id} stores a secret in {field}" in seen.logs


def test_the_preview_of_a_stored_result_is_masked(seen: Seen) -> None:
    reference = seen.state.latest["large"].envelope["ref"]
    assert "***" in reference.preview
    assert not leaked(seen.events["large"])


def test_facts_of_checks(seen: Seen) -> None:
    [outcome] = seen.state.checks_of("checked", 1)
    assert not outcome.passed
    assert not leaked(json.dumps(outcome.facts) + outcome.why)


@pytest.mark.parametrize("part", ["tables", "dagster", "logs"])
def test_nowhere_else(seen: Seen, part: str) -> None:
    found = getattr(seen, part)
    assert found
    assert not {form: [line for line in found.splitlines() if leaked(line)][:2] for form in leaked(found)}


def test_events_of_other_steps(seen: Seen) -> None:
    assert not {
        step: forms
        for step, text in seen.events.items()
        if (forms := leaked(text)) and step not in RESULTS and step != "checked"
    }


def test_printed_lines(seen: Seen) -> None:
    assert "printed: ***" in seen.logs


def test_what_dagster_shows_of_a_failure(seen: Seen) -> None:
    assert "KeyError: " in seen.dagster
    assert "***" in seen.dagster


FORGETFUL = """
    keychain:
      - {name: vault, provider: file, map: {key: private-key}}
    workflow:
      - step: start
        tool:
          kind: python
          input: {x: "{{ keychain.vault.key }}"}
          code: |
            from noetl_dagster.process.redaction import SECRETS
            SECRETS.forget()
            return {"x": x}
        set: {ctx.a: "{{ output.data[output.data.x].y }}"}
"""
"""Its first step leaves the process like one whose commands ran elsewhere."""


async def test_a_process_that_has_run_no_command_redacts_its_errors(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "private-key").write_text(KEY)
    engine = await Engine.open(settings.model_copy(update={"secrets_path": tmp_path}))
    try:
        state = await engine.run(playbook(FORGETFUL), {})
    finally:
        await engine.close()
        SECRETS.forget()
    assert "output.data" in str(state.error)
    assert "***" in str(state.error)
    assert not leaked(str(state.error))


CHILDREN = """
    keychain:
      - {name: vault, provider: file, map: {key: private-key}}
    workflow:
      - step: start
        tool: {kind: playbook, path: child.yaml, input: {key: "{{ keychain.vault.key }}"}}
"""
CHILD = "workload: {key: ''}\nworkflow: [{step: one, tool: {kind: python, code: 'return 1'}}]"


async def test_a_secret_in_the_workload_of_a_child(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "private-key").write_text(KEY)
    (tmp_path / "child.yaml").write_text(text_of("child", CHILD))
    engine = await Engine.open(settings.model_copy(update={"secrets_path": tmp_path}))
    try:
        file = str(tmp_path / "parent.yaml")
        state = await engine.run(parse_playbook(text_of("parent", CHILDREN), file=file), {})
    finally:
        await engine.close()
        SECRETS.forget()
    assert state.error is None
    assert "stores a secret in the workload of child.key" in caplog.text


@pytest.mark.parametrize(
    ("hidden", "text", "shown"),
    [
        ("abc", "abc", "abc"),
        ("postgres", "postgres in step load", "postgres in step load"),
        ("5432", "port 5432", "port 5432"),
        ("834512", "code 834512", "code ***"),
        ("pass", "pass: pass", "***: ***"),
        ("https://hooks.example.com/T00/B00/xyz", "at https://hooks.example.com/", "at https://hooks.example.com/"),
        ("postgresql://etl:hunter22@db/x", "no db for hunter22 of etl", "no db for *** of etl"),
        ("https://h/x?api_key=k3y-of-x&page=2", "page=2 k3y-of-x", "page=2 ***"),
        ("host=db password='hunter 22' user=etl", "host=db user=etl", "host=db user=etl"),
        (
            '{"endpoint_url": "https://s3.example.com", "db_host": "db1.example", "pin": "hunter22"}',
            "db1.example",
            "db1.example",
        ),
        ('{"dsn": "host=db1 password=hunter22"}', "host=db1 hunter22", "host=db1 ***"),
        ('{"username": "etl", "password": "hunter22", "port": 543210}', "etl hunter22 543210", "etl *** 543210"),
        ("Bearer abcd1234", "abcd1234", "***"),
        ("Basic bWU6aHVudGVyMjI=", "me hunter22", "me ***"),
        ("me:hunter22", "hunter22", "***"),
        (KEY, f"line {LINE}", "line ***"),
        ("a&b<c>'d", "a&amp;b&lt;c&gt;&#x27;d a%26b%3cc%3e%27d a&b<c>''d", "*** *** ***"),
        ("hunter22", base64.b64encode(b"hunter22").decode(), "***="),
    ],
)
def test_forms(hidden: str, text: str, shown: str) -> None:
    redactor = Redactor()
    redactor.hide(hidden)
    assert redactor.redact(text) == shown
    assert redactor.redact_bytes(text.encode()) == shown.encode()


def test_tokens_that_begin_alike() -> None:
    redactor = Redactor()
    longer = f"{TOKEN[:20]}another-end-of-a-token"
    redactor.hide(TOKEN[:20], TOKEN, longer)
    assert redactor.redact(f"{longer} {TOKEN} {TOKEN[:20]}") == "*** *** ***"


@pytest.mark.parametrize("limit", range(2, 70, 5))
def test_a_secret_is_masked_before_a_text_is_shortened(limit: int) -> None:
    redactor = Redactor()
    redactor.hide(TOKEN)
    assert redactor.beginning(f"say {TOKEN} and more", limit) == "say *** and more"[:limit]


def test_the_least_recently_used_value_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("noetl_dagster.process.redaction.MOST", 2)
    redactor = Redactor()
    redactor.hide("first-value", "second-value")
    redactor.hide("first-value")
    redactor.hide("third-value")
    assert redactor.redact("first-value second-value third-value") == "*** second-value ***"


def test_secrets_of_settings() -> None:
    redactor = Redactor()
    settings = Settings(
        db_url="postgresql://noetl:of-the-log@db/noetl",
        service_tokens=SecretStr(json.dumps({"a-token-of-the-api-1": ["worker"]})),
        credential_key=SecretStr("a-key-for-credentials"),
    )
    redactor.hide_settings(settings)
    text = "of-the-log a-token-of-the-api-1 a-key-for-credentials noetl worker"
    assert redactor.redact(text) == "*** *** *** noetl worker"


@pytest.fixture
def hidden() -> Iterator[str]:
    SECRETS.hide(TOKEN)
    yield TOKEN
    SECRETS.forget()


def test_problem_documents(hidden: str) -> None:
    assert json.loads(bytes(problem_response(422, f"no {hidden}").body))["detail"] == "no ***"


@pytest.mark.parametrize(
    ("message", "args", "shown"),
    [
        ("a %s of %d", (TOKEN, 3), "a *** of 3"),
        (f"a {TOKEN}", (), "a ***"),
        ("a %r", ([TOKEN],), "a ['***']"),
        ("a %(name)s", ({"name": TOKEN},), "a ***"),
        ("%s%s", (TOKEN[:20], TOKEN[20:]), "***"),
    ],
)
def test_log_lines(hidden: str, caplog: pytest.LogCaptureFixture, message: str, args: Any, shown: str) -> None:
    logging.getLogger("a.library").warning(message, *args)
    assert caplog.messages == [shown]
    assert not leaked(f"{caplog.records[0].msg} {caplog.records[0].args}")


def test_exceptions_in_log_lines(hidden: str, caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError(hidden)
    except KeyError:
        logging.getLogger("a.library").exception("it failed")
    assert "KeyError: '***'" in caplog.text


def test_errors_keep_their_types(hidden: str) -> None:
    error: Any = ValueError(f"no {hidden}", 3)
    error.__cause__ = FileNotFoundError(2, "no file", f"/x/{hidden}")
    group = ExceptionGroup("several", [error])
    SECRETS.redact_error(group)
    assert error.args == ("no ***", 3)
    assert str(error.__cause__) == "[Errno 2] no file: '/x/***'"
