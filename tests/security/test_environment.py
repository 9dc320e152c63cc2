"""Playbook code sees no secret of the service in its environment, nor in that of its parents."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import orjson
import pytest
from dagster import DagsterInstance
from pydantic import SecretStr

from noetl_dagster.errors import CredentialError
from noetl_dagster.launcher.address import Address
from noetl_dagster.playbook.loader import parse_report
from noetl_dagster.process.environment import hide_from_children, own_environment, settings_withheld
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings
from noetl_dagster.tools.access.credentials import Credentials
from tests.definitions import definitions_of
from tests.playbooks import playbook, text_of

SECRETS = {
    "NOETL_CREDENTIAL_KEY": "the-key-of-all-credentials",
    "NOETL_SERVICE_TOKENS": '{"the-token-of-operators": ["operator"]}',
    "NOETL_SERVER_TOKEN": "the-token-of-a-worker",
}
NOT_ALLOWED = {"SOMEBODYS_PASSWORD": "their-password"}
ALLOWED = {"MY_API_KEY": "the-key-of-playbooks"}

SEEN = "import os\\nresult = [text for text in os.environ.values() if 'the-' in text or 'their-' in text]"
READERS = f"""
workflow:
  - step: start
    tool:
      - thread: {{kind: python, code: "{SEEN}"}}
      - process: {{kind: python, spec: {{isolation: subprocess}}, code: "{SEEN}"}}
      - shell: {{kind: shell, cmds: ["env | grep -e the- -e their-"]}}
      - end: {{kind: python, input: {{seen: "{{{{ [thread, process, shell.stdout] }}}}"}}, code: "result = seen"}}
"""


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the variables of a service, and one that its playbooks may read."""
    for name, value in {**SECRETS, **NOT_ALLOWED, **ALLOWED}.items():
        monkeypatch.setenv(name, value)


def test_code_of_a_run_sees_its_allow_list(
    variables: None, settings: Settings, dagster_instance: DagsterInstance
) -> None:
    noetl = EngineProvider(settings.model_copy(update={"playbook_env": ("MY_*",)}))
    job = definitions_of([playbook(READERS)], noetl).resolve_job_def("sample")
    try:
        result = job.execute_in_process(instance=dagster_instance)
    finally:
        noetl.close()
    thread, process, shell = orjson.loads(result.output_for_node("sample_playbook.start").preview)
    # code in a thread shares the process with code of the installation
    assert sorted(thread) == sorted([*NOT_ALLOWED.values(), *ALLOWED.values()])
    assert (process, shell.strip()) == ([*ALLOWED.values()], "MY_API_KEY=the-key-of-playbooks")
    assert os.environ["NOETL_CREDENTIAL_KEY"] == SECRETS["NOETL_CREDENTIAL_KEY"]  # for the host of the run


def test_settings_are_no_secrets_of_playbooks(variables: None, settings: Settings) -> None:
    for pattern in ("", "*", "NOETL_*"):
        credentials = Credentials(settings.model_copy(update={"playbook_env": (pattern,)}), None)
        for name in (*SECRETS, "NOETL_DB_URL"):
            with pytest.raises(CredentialError, match=f"{name}.*setting of the platform"):
                run_sync(credentials.reveal(f"secret://env/{name}"))


def test_variables_that_are_not_allowed_are_no_secrets_of_playbooks(variables: None, settings: Settings) -> None:
    credentials = Credentials(settings.model_copy(update={"playbook_env": ("MY_API_KEY",)}), None)
    assert run_sync(credentials.reveal("secret://env/MY_API_KEY")) == ALLOWED["MY_API_KEY"]
    with pytest.raises(CredentialError, match=r"SOMEBODYS_PASSWORD.*add it to NOETL_PLAYBOOK_ENV"):
        run_sync(credentials.reveal("secret://env/SOMEBODYS_PASSWORD"))


def test_a_check_names_the_line_that_reads_a_setting() -> None:
    body = "workflow:\n  - step: start\n    tool: {kind: http, url: https://a.example, auth: 'secret://env/NOETL_DB_URL'}\n"
    _, problems = parse_report(text_of("sample", body))
    assert [(one.place.line, "NOETL_DB_URL" in one.message, one.severity) for one in problems] == [(6, True, "error")]


def test_runs_get_no_tokens(variables: None, tmp_path: Path) -> None:
    with settings_withheld():
        assert "NOETL_CREDENTIAL_KEY" not in os.environ
        own = Settings.model_validate({"minio_bucket": "lake"})  # settings that are read meanwhile are the same
        assert own.credential_key == SecretStr(SECRETS["NOETL_CREDENTIAL_KEY"])
        for passed in (own_environment(), Address.of(tmp_path, own_environment(), 1).environment):
            assert passed["NOETL_CREDENTIAL_KEY"] == SECRETS["NOETL_CREDENTIAL_KEY"]
            assert not [name for name in passed if name.endswith(("_TOKEN", "_TOKENS")) and name.startswith("NOETL_")]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, since root may read everything")
def test_children_cannot_read_the_initial_environment_and_memory_of_their_parents() -> None:
    assert _readable(hidden=False) == b"environ mem "
    assert _readable(hidden=True) == b""


def _readable(*, hidden: bool) -> bytes:
    """Returns which files of its parent a forked process of an unprivileged user can open."""
    reading, writing = os.pipe()
    parent = os.fork()
    if not parent:
        os.setgroups([])
        os.setgid(65_534)
        os.setuid(65_534)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a change of the user has switched it off
        if hidden:
            hide_from_children()
        if child := os.fork():
            os.waitpid(child, 0)
            os._exit(0)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as any program that is started
        for name in ("environ", "mem"):
            try:
                os.close(os.open(f"/proc/{os.getppid()}/{name}", os.O_RDONLY))
            except PermissionError:
                continue
            os.write(writing, f"{name} ".encode())
        os._exit(0)
    os.waitpid(parent, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as found:
        return found.read()
