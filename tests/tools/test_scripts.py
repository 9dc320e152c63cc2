"""Where scripts of playbooks are looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.tools.base import ToolContext


@pytest.fixture
def folders(box: ToolContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """The playbook's folder, that of all playbooks, and the working folder: none inside of another."""
    own, shared, here = tmp_path / "shared" / "team", tmp_path / "shared", tmp_path / "here"
    for folder in (own, shared, here):
        folder.mkdir(parents=True, exist_ok=True)
    box.settings = box.settings.model_copy(update={"playbooks_path": shared})
    monkeypatch.chdir(here)
    return own, shared, here


async def read(run: Any, uri: str) -> Any:
    return (await run("python", script={"uri": uri}, folder="shared/team")).data


async def test_a_script_is_looked_for_in_three_places(run: Any, folders: tuple[Path, ...]) -> None:
    found = []
    for folder in reversed(folders):
        (folder / "job.py").write_text(f"result = {folder.name!r}")
        found.append(await read(run, "./job.py"))

    assert found == ["here", "shared", "team"]


async def test_scripts_beside_other_playbooks_are_found(run: Any, folders: tuple[Path, ...]) -> None:
    (folders[1] / "sql").mkdir()
    (folders[1] / "sql" / "job.py").write_text("result = 1")

    assert await read(run, "../sql/job.py") == 1


async def test_the_error_lists_the_places(run: Any, folders: tuple[Path, ...]) -> None:
    with pytest.raises(ToolError, match=r"script 'jobs/none\.py' of step stage is not there") as caught:
        await read(run, "jobs/none.py")

    assert all(str(folder / "jobs" / "none.py") in str(caught.value) for folder in folders)
    assert caught.value.kind == "not_found"


@pytest.mark.parametrize("uri", ["../../secret.py", "link.py", "file://../../secret.py"])
async def test_scripts_stay_inside(run: Any, folders: tuple[Path, ...], tmp_path: Path, uri: str) -> None:
    (tmp_path / "secret.py").write_text("result = 1")
    (folders[0] / "link.py").symlink_to(tmp_path / "secret.py")

    with pytest.raises(ToolError, match="outside of these folders"):
        await read(run, uri)


async def test_a_whole_path_is_permitted_below_folders_of_the_settings(
    run: Any, folders: tuple[Path, ...], tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("result = 1")

    assert await read(run, str(tmp_path / "job.py")) == 1
    assert await read(run, f"file://{tmp_path}/job.py") == 1
