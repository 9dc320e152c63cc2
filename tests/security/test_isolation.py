"""Shell steps and Python code in a subprocess: sandbox, limits and another user. The service's files stay unread."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.cli.doctor.checks import program_checks
from noetl_dagster.errors import ToolError
from noetl_dagster.process import sandbox
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import Toolbox
from noetl_dagster.tools.commands.confinement import confinement, isolation_of

Confine = Callable[..., None]

needs_landlock = pytest.mark.skipif(not sandbox.landlock_version(), reason="this kernel has no Landlock")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user")

SECRET = "the-key-of-all-credentials"
KINDS = pytest.mark.parametrize("kind", ["shell", "script", "python"])
NOBODY = "65534"


@pytest.fixture
def confine(box: Toolbox, tmp_path: Path) -> Confine:
    """Changes the settings of the toolbox: ``confine(playbook_sandbox="required")``."""
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


ATTACKS = (
    "cat {home}/services.json",
    "cat {folder}/link",
    "cd {home} && cat services.json",
    "cp {home}/services.json $T/copy && cat $T/copy",
    "ln {home}/services.json $T/linked && cat $T/linked",
    "ls {home} | grep services && echo {secret}",
    "cat /proc/{parent}/root{home}/services.json",
    "tr '\\0' '\\n' < /proc/{parent}/environ",
    "tr '\\0' '\\n' < /proc/{service}/environ | grep -q . && echo {secret}",
    "grep -q . /proc/{parent}/maps && echo {secret}",
    "kill -0 {parent} && echo {secret}",
    "chown 1 {folder} && echo {secret}",
    "mv {home}/services.json $T/moved && cat $T/moved",
)


@needs_landlock
@KINDS
async def test_the_sandbox_keeps_the_service_from_code(run: Any, confine: Confine, tmp_path: Path, kind: str) -> None:
    home = tmp_path / "state"
    places = {"home": home, "folder": tmp_path, "secret": SECRET, "service": os.getpid()}
    (tmp_path / "link").symlink_to(home / "services.json")
    parent = subprocess.Popen(["sleep", "60"], env={**os.environ, "THE_KEY": SECRET})  # noqa: ASYNC220
    attacks = [attack.format(**places, parent=parent.pid) for attack in ATTACKS]
    commands = "T=$(mktemp -d)\n" + "\n".join(
        f"echo '@{n}'; ( {attack} ) 2>/dev/null || true" for n, attack in enumerate(attacks)
    )
    try:
        confine()
        before = _successful(await printed(run, kind, commands))
        confine(playbook_sandbox="required")
        after = _successful(await printed(run, kind, commands))
    finally:
        parent.kill()
        parent.wait()
    assert len(before) >= len(ATTACKS) - 1, before  # the attacks are real
    assert after == []
    assert (home / "services.json").exists()


def _successful(text: str) -> list[str]:
    """Returns the attacks whose output has the secret."""
    found = (part.partition("\n") for part in text.split("@")[1:])
    return [ATTACKS[int(number)] for number, _, output in found if SECRET in output]


@needs_landlock
@KINDS
async def test_the_sandbox_permits_writing_in_few_places(run: Any, confine: Confine, tmp_path: Path, kind: str) -> None:
    (shared := tmp_path / "shared").mkdir()
    (tmp_path / "table.csv").write_text("read ")
    confine(playbook_sandbox="required", playbook_folders=(shared,))
    commands = (
        f"cat {tmp_path}/table.csv; echo temporary > $TMPDIR/file && cat $TMPDIR/file; echo shared > {shared}/file; "
        f"cd $HOME && echo home > file2 && cat file2; echo nothing > /dev/null; "
        f"echo x > {tmp_path}/playbook.yaml || true; echo x > /tmp/noetl-test-{os.getpid()} || true"
    )
    assert (await printed(run, kind, f"( {commands} ) 2> $TMPDIR/errors")).split() == ["read", "temporary", "home"]
    assert (shared / "file").read_text() == "shared\n"
    assert not (tmp_path / "playbook.yaml").exists()
    assert not os.access(f"/tmp/noetl-test-{os.getpid()}", os.F_OK)


@needs_landlock
async def test_no_variable_of_a_task_has_an_effect_before_the_sandbox(
    run: Any, confine: Confine, tmp_path: Path
) -> None:
    """The loader would run the initialisers of a preloaded library outside of it."""
    confine(playbook_sandbox="required")
    env = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(tmp_path / "loaded"), "PYTHONINSPECT": "1", "MINE": "1"}
    assert (await run("shell", cmds=["echo $MINE"], env=env)).data["stdout"].endswith("1\n")
    assert not [name for name in os.listdir(tmp_path) if name.startswith("loaded")]  # noqa: PTH208


@needs_landlock
async def test_a_required_sandbox_has_all_python_code_in_a_subprocess(run: Any, confine: Confine) -> None:
    confine(playbook_sandbox="required")
    for options in ({}, {"isolation": "thread"}, {"isolation": "subprocess"}):
        assert (await run("python", code="import os\nresult = os.getpid()", options=options)).data != os.getpid()


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


async def test_a_kernel_without_landlock(box: Toolbox, confine: Confine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    confine(playbook_sandbox="auto")
    assert not confinement(box.settings, ".").is_needed
    confine(playbook_sandbox="required")
    with pytest.raises(ToolError, match=r"NOETL_PLAYBOOK_SANDBOX.*no Landlock"):
        confinement(box.settings, ".")
    assert isolation_of(None, box.settings) == "subprocess"


async def test_limits(run: Any, confine: Confine) -> None:
    confine(playbook_memory_bytes=1 << 30, playbook_seconds=1, python_isolation="subprocess")
    with pytest.raises(ToolError, match="MemoryError"):
        await run("python", code="result = len(bytearray(2 << 30))", options={"memory": "8g"})
    assert (await run("shell", cmds=["ulimit -v; ulimit -t"])).data["stdout"].split() == ["1048576", "2"]
    for kind, fields in (("python", {"code": "while True: pass"}), ("shell", {"cmds": ["sleep 60"]})):
        with pytest.raises(ToolError, match=r"NOETL_PLAYBOOK_SECONDS") as caught:
            await run(kind, **fields)
        assert caught.value.kind == "timeout"


@needs_root
@pytest.mark.parametrize("mode", ["off", pytest.param("required", marks=needs_landlock)])
async def test_another_user(run: Any, confine: Confine, tmp_path: Path, mode: str) -> None:
    confine(playbook_user=NOBODY, playbook_sandbox=mode, playbook_processes=200)
    commands = f"id -u; id -G; echo x > $TMPDIR/file && cat $TMPDIR/file; cat {tmp_path}/state/services.json || true; grep processes /proc/self/limits"
    data = (await run("shell", cmds=[commands])).data
    assert data["stdout"].split()[:3] == [NOBODY, NOBODY, "x"]
    data = (await run("shell", code=commands)).data
    assert SECRET not in data["stdout"]
    assert data["stdout"].split()[-2] == "200"


@pytest.mark.parametrize(
    ("user", "message"),
    [("root", "is root"), ("0", "is root"), ("nobody-at-all", "no such user")],
)
@needs_root
def test_users_that_are_refused(settings: Settings, user: str, message: str) -> None:
    with pytest.raises(ToolError, match=rf"NOETL_PLAYBOOK_USER={user}.*{message}"):
        confinement(settings.model_copy(update={"playbook_user": user}), ".")


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


def test_a_process_with_threads_is_not_confined() -> None:
    if not sandbox.landlock_version():
        pytest.skip("this kernel has no Landlock")
    code = (
        "import threading; from noetl_dagster.process.sandbox import enter\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "enter({'landlock': True, 'user': None, 'limits': {}, 'read': [], 'write': [], 'own': [], 'hidden': []})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "several threads" in done.stderr


@pytest.mark.parametrize(
    ("values", "state", "text"),
    [
        ({}, "not set", "NOETL_PLAYBOOK_SANDBOX"),
        pytest.param({"playbook_sandbox": "auto"}, "ok", "in a sandbox", marks=needs_landlock),
        ({"playbook_user": "nobody-at-all"}, "wrong", "NOETL_PLAYBOOK_USER"),
    ],
)
async def test_doctor_reports_the_sandbox(
    box: Toolbox, confine: Confine, values: dict[str, Any], state: str, text: str
) -> None:
    confine(**values)
    (check,) = (one for one in program_checks(box.settings) if one.name == "playbook code")
    found = await check.find()
    assert (found.state, text in found.what) == (state, True), found
