"""``NOETL_LOG_FORMAT=json``: whatever a process says on standard error is a JSON object a line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked, run
from tests.waiting import PROCESS_SECONDS, until_now

from .conftest import Cli

PLAYBOOK = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: talking, path: tests/talking}
keychain:
  - {name: api_key, kind: bearer, credential: talking_token}
workload: {fails: false}
workflow:
  - step: hello
    tool:
      kind: python
      input: {key: "{{ keychain.api_key.token }}"}
      code: |
        print("the key is", key)
        print("two\\nlines")
    next: [each]
  - step: each
    loop: {in: "{{ [1, 2] }}", iterator: n, spec: {mode: parallel, max_in_flight: 2}}
    tool: {kind: python, input: {n: "{{ n }}"}, code: "async def main(n):\\n    print('item', n)"}
    next: [pooled]
  - step: pooled
    spec: {dispatch: DISPATCH}
    tool: {kind: python, input: {fails: "{{ fails }}"}, code: "print('at work')\\nassert not fails, 'asked for'"}
"""

SECRET = "t0p-s3cret-t0ken"


@pytest.fixture
def environment(environment: dict[str, str]) -> dict[str, str]:
    token = json.dumps({"type": "bearer", "data": {"token": SECRET}})
    more = {"NOETL_LOG_FORMAT": "json", "NOETL_LOG_LEVEL": "INFO", "NOETL_CREDENTIAL_TALKING_TOKEN": token}
    return {**environment, **more}


@pytest.fixture
def playbook(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    file = tmp_path / "talking.yaml"
    file.write_text(PLAYBOOK.replace("DISPATCH", getattr(request, "param", "inline")))
    return file


def records(text: str) -> list[dict[str, Any]]:
    """Every line, each of which is a record with what all have."""
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        assert datetime.fromisoformat(one["timestamp"]).tzinfo is not None
        assert one["level"] in ("debug", "info", "warning", "error", "critical")
        assert isinstance(one["logger"], str)
        assert isinstance(one["message"], str)
        assert None not in one.values()
    return found


def saying(found: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    return [one for one in found if text in one["message"]]


def test_a_run_names_what_each_line_is_about(cli: Cli, playbook: Path) -> None:
    ran = cli("run", str(playbook), "--set", "surplus=1")
    assert ran.returncode == 0, ran.stderr
    found = records(ran.stderr)
    (key,) = saying(found, "the key is")
    assert key["message"] == "hello: the key is ***"
    assert SECRET not in ran.stderr + ran.stdout
    assert key["logger"] == "noetl_dagster.tools.python.output"
    assert key["step"] == "hello"
    assert key["execution_id"] in key["command_id"]
    assert len(key["run_id"]) == 36
    assert saying(found, "two\nlines")
    items = saying(found, "item ")
    assert {one["step"] for one in items} == {"each"}
    assert len({one["command_id"] for one in items}) == 2
    assert {(one["execution_id"], one["run_id"]) for one in items} == {(key["execution_id"], key["run_id"])}
    (warning,) = saying(found, "no key 'surplus'")
    assert warning["level"] == "warning"
    assert "execution_id" not in warning
    (begun,) = saying(found, "running talking, execution")
    assert "command_id" not in begun


def test_a_refusal_is_a_record_too(cli: Cli, playbook: Path) -> None:
    ran = cli("run", str(playbook), "--set", "nonsense")
    assert ran.returncode == 2
    (refusal,) = records(ran.stderr)
    assert refusal["level"] == "error"
    assert "write KEY=VALUE" in refusal["message"]


@pytest.mark.parametrize("playbook", ["workers"], indirect=True)
def test_a_worker_names_the_command(cli: Cli, playbook: Path, environment: dict[str, str], tmp_path: Path) -> None:
    output, unread = tmp_path / "said", tmp_path / "unread"
    worker = Forked(
        *("noetl-dagster", "worker"), environment=environment, folder=tmp_path, output=unread, errors=output
    )
    try:
        ran = cli("run", str(playbook), "--json")
        assert ran.returncode == 0, ran.stderr
        records(ran.stderr)
        (line,) = until_now(lambda: saying(records(output.read_text()), "at work"), "the worker's line")
        assert line["step"] == "pooled"
        assert line["execution_id"] == json.loads(ran.stdout)["execution_id"]
        assert line["execution_id"] in line["command_id"]
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(PROCESS_SECONDS)
    records(output.read_text())


CRASH = """
import asyncio, threading, warnings
from noetl_dagster.process import logs
from noetl_dagster.settings import get_settings
logs.set_up(get_settings())
logs.set_up(get_settings())
warnings.warn("old ways")

def work(secret):
    raise ValueError("in a thread")

thread = threading.Thread(target=work, args=("t0p-s3cret-t0ken",), name="side")
thread.start()
thread.join()

async def main():
    async def beside():
        raise LookupError("in a task")
    with logs.LogContext(execution_id=2**60, step="s", command_id="c"):
        outside = asyncio.get_running_loop().create_task(beside(), context=logs.without_fields())
        await asyncio.sleep(0)
        raise ZeroDivisionError("at last")
asyncio.run(main())
"""


def test_a_crash_is_a_record_with_its_traceback(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
    )
    assert done.returncode == 1
    found = records(done.stderr)
    (warning,) = saying(found, "old ways")
    assert warning["level"] == "warning"
    (thread,) = saying(found, "thread side ends")
    assert thread["exception"].startswith("Traceback")
    assert "ValueError: in a thread" in thread["exception"]
    (task,) = saying(found, "Task exception was never retrieved")
    assert "LookupError: in a task" in task["exception"]
    assert "execution_id" not in task
    (crash,) = saying(found, "the process ends")
    assert (crash["level"], crash["exception"].splitlines()[-1]) == ("critical", "ZeroDivisionError: at last")
    assert len(found) == 4  # set up twice, said once
    assert SECRET not in done.stderr


def test_the_code_location(environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "playbooks"
    folder.mkdir()
    (folder / "broken.yaml").write_text(PLAYBOOK.replace("next: [each]", "next: [nowhere]"))
    environment["NOETL_PLAYBOOKS_PATH"] = str(folder)
    code = "import noetl_dagster.definitions"
    done = run("-c", code, environment=environment, folder=tmp_path, texts=tmp_path)
    assert done.returncode == 0, done.stderr
    (left_out,) = saying(records(done.stderr), "is left out")
    assert left_out["logger"] == "noetl_dagster.code_location.folder"


def test_text_stays_as_it_was(cli: Cli, playbook: Path, environment: dict[str, str]) -> None:
    environment["NOETL_LOG_FORMAT"] = "text"
    ran = cli("run", str(playbook), "--json")
    assert "INFO noetl_dagster.tools.python.output: hello: the key is ***\n" in ran.stderr
    assert "{" not in ran.stderr
