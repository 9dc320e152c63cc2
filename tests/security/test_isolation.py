"""Shell steps and Python code in a subprocess: limits and another user, which reads no files of the service."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.cli.doctor.checks import program_checks
from noetl_dagster.errors import ToolError
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import ToolContext
from noetl_dagster.tools.commands.processes import confinement

Confine = Callable[..., None]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")

SECRET = "the-key-of-all-credentials"
NOBODY = "65534"


@pytest.fixture
def confine(box: ToolContext, tmp_path: Path) -> Confine:
    """Changes the settings of the toolbox: ``confine(playbook_user="nobody")``."""
    home = tmp_path / "state"

    def change(**values: Any) -> None:
        home.mkdir(mode=0o700, exist_ok=True)
        (home / "services.json").write_text(SECRET)
        given = {"home": home, "secrets_path": home, "playbooks_path": tmp_path, **values}
        known = {**box.settings.model_dump(), **given}
        box.settings = Settings.model_validate(known)

    return change


async def printed(run: Any, kind: str, commands: str, **config: Any) -> str:
    """Returns what commands print that a step of a kind runs."""
    if kind == "python":
        code = (
            "import subprocess\n"
            "done = subprocess.run(['/bin/sh', '-c', commands], capture_output=True, text=True)\n"
            "result = done.stdout + done.stderr"
        )
        return str((await run("python", code=code, input={"commands": commands}, **config)).data)
    fields = {"code": commands} if kind == "script" else {"cmds": [commands]}
    data = (await run("shell", **fields, **config)).data
    return f"{data['stdout']}{data['stderr']}"


@pytest.mark.parametrize(
    ("default", "named", "own"),
    [
        ("thread", None, True),
        ("thread", "subprocess", False),
        ("subprocess", None, False),
        ("subprocess", "thread", True),
    ],
)
async def test_the_installation_has_a_default(
    run: Any, confine: Confine, default: str, named: str | None, own: bool
) -> None:
    confine(python_isolation=default)
    options = {"isolation": named} if named else {}
    data = (await run("python", code="import os\nresult = os.getpid()", options=options)).data
    assert (data == os.getpid()) is own


async def test_limits(run: Any, confine: Confine) -> None:
    confine(playbook_memory_bytes=1 << 30, playbook_seconds=1, python_isolation="subprocess")
    with pytest.raises(ToolError, match="MemoryError"):
        await run("python", code="result = len(bytearray(2 << 30))", options={"memory": "8g"})
    assert (await run("shell", cmds=["ulimit -v; ulimit -t"])).data["stdout"].split() == ["1048576", "2"]
    for kind, fields in (("python", {"code": "while True: pass"}), ("shell", {"cmds": ["sleep 60"]})):
        with pytest.raises(ToolError, match=r"NOETL_PLAYBOOK_SECONDS") as caught:
            await run(kind, **fields)
        assert caught.value.kind == "timeout"


ATTACKS = (
    "cat {home}/services.json",
    "ls {home} | grep services && echo {secret}",
    "cat /proc/{service}/root{home}/services.json",
    "tr '\\0' '\\n' < /proc/{service}/environ | grep -q . && echo {secret}",
    "grep -q . /proc/{service}/maps && echo {secret}",
    "kill -0 {service} && echo {secret}",
)


@needs_root
@pytest.mark.parametrize("kind", ["shell", "script", "python"])
async def test_another_user(run: Any, confine: Confine, tmp_path: Path, kind: str) -> None:
    names = {"home": tmp_path / "state", "secret": SECRET, "service": os.getpid()}
    attacks = "\n".join(f"( {attack.format(**names)} ) 2>/dev/null || true" for attack in ATTACKS)
    limits = "grep processes /proc/self/limits"
    confine(playbook_user=NOBODY, playbook_processes=200, python_isolation="subprocess")
    commands = f"id -u; id -G; echo x > $TMPDIR/file && cat $TMPDIR/file\n{attacks}\n{limits}"
    text = await printed(run, kind, commands)
    assert text.split()[:3] == [NOBODY, NOBODY, "x"]
    assert SECRET not in text
    assert text.split()[-2] == "200"


@needs_root
async def test_no_variable_of_a_task_has_an_effect_before_its_user(run: Any, confine: Confine, tmp_path: Path) -> None:
    """The loader would run the initialisers of a preloaded library as root."""
    confine(playbook_user=NOBODY)
    env = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(tmp_path / "loaded"), "PYTHONINSPECT": "1", "MINE": "1"}
    assert (await run("shell", cmds=["echo $MINE"], env=env)).data["stdout"].endswith("1\n")
    assert not [name for name in os.listdir(tmp_path) if name.startswith("loaded")]  # noqa: PTH208


@pytest.mark.parametrize(
    ("user", "message"),
    [("root", "is root"), ("0", "is root"), ("nobody-at-all", "no such user")],
)
@needs_root
def test_users_that_are_refused(settings: Settings, user: str, message: str) -> None:
    with pytest.raises(ToolError, match=rf"NOETL_PLAYBOOK_USER={user}.*{message}"):
        confinement(settings.model_copy(update={"playbook_user": user}))


@pytest.mark.parametrize("name", ["../secret.json", "{path}", "link.json", "pipe.json", "hard.json"])
@pytest.mark.parametrize("way", ["chunk", "result"])
async def test_a_child_makes_its_parent_read_and_remove_nothing(run: Any, tmp_path: Path, name: str, way: str) -> None:
    """The parent reads the files that the child announces: only its own ones."""
    (secret := tmp_path / "secret.json").write_text(f'[{{"value": "{SECRET}"}}]')
    code = f"""
import os, sys, json, socket
child = sys.modules["__main__"]
folder, name = sys.argv[1], {name!r}.format(path=path)
if name == "../secret.json":
    name = os.path.relpath(path, folder)
if {way!r} == "result":
    child.RESULT, name = "kept.json", "result.json"
{{"link.json": os.symlink, "hard.json": os.link}}.get({name!r}, lambda *_: None)(path, os.path.join(folder, name))
if {name!r} == "pipe.json":
    os.mkfifo(os.path.join(folder, name))
elif {way!r} == "result" and not os.path.lexists(os.path.join(folder, name)):
    os.symlink(path, os.path.join(folder, name))
if {way!r} == "chunk":
    channel = json.loads(open(os.path.join(folder, "request.json")).read())["channel"]
    os.write(channel, json.dumps({{"file": name, "position": None, "full": False}}).encode() + b"\\n")
    os.read(channel, 10)
os._exit(0)
"""
    with pytest.raises(ToolError, match="of the subprocess"):
        await run("python", code=code, input={"path": str(secret)}, options={"isolation": "subprocess"})
    assert secret.exists()


@pytest.mark.parametrize(
    ("values", "state", "text"),
    [
        ({}, "not set", "NOETL_PLAYBOOK_USER"),
        ({"playbook_user": "nobody-at-all"}, "wrong", "NOETL_PLAYBOOK_USER"),
    ],
)
async def test_doctor_reports_the_user_of_code(
    box: ToolContext, confine: Confine, values: dict[str, Any], state: str, text: str
) -> None:
    confine(**values)
    (check,) = (one for one in program_checks(box.settings) if one.name == "playbook code")
    found = await check.find()
    assert (found.state, text in found.what) == (state, True), found
