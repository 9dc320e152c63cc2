"""Finding playbooks in a folder and resolving the path of a child."""

from __future__ import annotations

from pathlib import Path

import pytest

from noetl_dagster.errors import PlaybookError
from noetl_dagster.playbook.catalog import Catalog, find_playbooks

TEXT = """\
apiVersion: noetl.io/v2
kind: Playbook  # one
metadata: {{name: {0}, path: {1}}}
workflow: [{{step: a, tool: {{kind: noop}}}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "parent.yaml").write_text(TEXT.format("parent", "examples/parent"))
    (tmp_path / "deep" / "child.yml").write_text(TEXT.format("child", "examples/child"))
    (tmp_path / "values.yaml").write_text("kind: Deployment\n")
    (tmp_path / "broken.yaml").write_text("kind: Playbook\nmetadata: {path: [\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    return tmp_path


def test_only_playbooks_are_found_broken_ones_too(folder: Path) -> None:
    assert [path.name for path in find_playbooks(folder)] == ["broken.yaml", "child.yml", "parent.yaml"]


def test_what_is_mounted_from_a_config_map_is_found_once(tmp_path: Path) -> None:
    mounted = tmp_path / ".own" / "playbooks"
    version = mounted / "..2025_01_01"
    version.mkdir(parents=True)
    (version / "one.yaml").write_text(TEXT.format("one", "examples/one"))
    (mounted / "..data").symlink_to(version.name)
    (mounted / "one.yaml").symlink_to("..data/one.yaml")
    assert find_playbooks(mounted) == [mounted / "one.yaml"]
    assert Catalog(mounted).resolve("examples/one") == mounted / "one.yaml"


def test_resolution_by_catalog_path_and_by_file(folder: Path) -> None:
    catalog = Catalog(folder)
    child = folder / "deep" / "child.yml"
    assert catalog.resolve("examples/child") == child
    assert catalog.resolve("/examples/child") == child
    assert catalog.resolve("deep/child") == child
    assert catalog.resolve("deep/child.yml") == child
    assert catalog.load("examples/child").name == "child"


def test_a_missing_playbook_names_what_is_like_it(folder: Path) -> None:
    with pytest.raises(PlaybookError, match="did you mean 'examples/child'"):
        Catalog(folder).resolve("examples/chidl")


def test_two_files_of_one_catalog_path(folder: Path) -> None:
    (folder / "copy.yaml").write_text(TEXT.format("child", "examples/child"))
    with pytest.raises(PlaybookError, match=r"claimed by .*copy\.yaml and .*child\.yml"):
        Catalog(folder).resolve("examples/child")
