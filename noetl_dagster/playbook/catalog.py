"""Playbooks of a folder, and what the ``path`` of a ``kind: playbook`` tool means."""

from __future__ import annotations

import codecs
import fnmatch
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from noetl_dagster.errors import Place, PlaybookError, Problem, ProblemKind
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.loader import load_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.wording import did_you_mean
from noetl_dagster.settings import get_settings

SUFFIXES = (".yaml", ".yml")
LATEST = "latest"
_VERSION = re.compile(rf"(?P<path>.+)@(?P<version>[1-9]\d{{0,8}}|{LATEST})")
# a line of the text, not parsed YAML: a playbook with broken YAML is still a playbook, and must be reported
_KIND_LINE = re.compile(r"^\ufeff?[\"']?kind[\"']?:\s*[\"']?Playbook[\"']?\s*(#.*)?$", re.MULTILINE)


def find_playbooks(folder: Path, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Path]:
    """Returns the YAML files below ``folder`` with ``kind: Playbook``, sorted.

    Args:
        include: patterns of paths below the folder, such as ``clinical/*`` or ``**/daily_*.yaml``; one that means a
            folder means all that is in it. None: every file.
        exclude: patterns of what is left out of these.
    """
    wanted = {path for pattern in include for path in folder.glob(pattern)}
    unwanted = {path for pattern in exclude for path in folder.glob(pattern)}

    def is_wanted(path: Path) -> bool:
        way = {path, *path.parents}
        return (not include or bool(way & wanted)) and not way & unwanted

    files = (path for suffix in SUFFIXES for path in files_below(folder, f"*{suffix}"))
    return sorted(path for path in files if is_wanted(path) and is_playbook(path))


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Paths below a folder, sorted, without what is hidden or in a hidden folder, which is not entered.

    A ConfigMap that is mounted has its files in hidden folders of its own, and links to them.
    """
    paths: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = fnmatch.filter([*folders, *files], pattern)
        paths += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def is_playbook(path: Path) -> bool:
    """Reports whether a file has ``kind: Playbook``."""
    try:
        return path.is_file() and _KIND_LINE.search(path.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def split_version(reference: str) -> tuple[str, int | None]:
    """Splits ``path@2`` into path and version; the version of ``path@latest`` and of a path alone is None."""
    version = _VERSION.fullmatch(reference.strip("/"))
    if version is None:
        return reference.strip("/"), None
    return version["path"], None if version["version"] == LATEST else int(version["version"])


def names_version(reference: str) -> bool:
    """Reports whether a reference says which version it means, as ``path@2`` and ``path@latest`` do."""
    return _VERSION.fullmatch(reference.strip("/")) is not None


def folders_of(own: Path, playbooks: Path) -> list[Path]:
    """Returns the folders in which a playbook's children are: its own, that of all playbooks, and those above its own.

    The folders above end with the working folder, which holds more than playbooks.
    """
    above, here = own.resolve().parents, Path.cwd()
    between = above[: above.index(here)] if here in above else ()
    return list(dict.fromkeys((own, playbooks, *between)))


class Catalog:
    """Finds playbooks by catalog path (``metadata.path``) or by file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: dict[tuple[Path, bool], Playbook] = {}

    @cached_property
    def paths(self) -> dict[str, tuple[Path, ...]]:
        """Catalog path to the files that claim it."""
        files_by_path: dict[str, tuple[Path, ...]] = {}
        for file in find_playbooks(self.folder):
            name = _catalog_path(file)
            if name is not None:
                files_by_path[name] = (*files_by_path.get(name, ()), file)
        return files_by_path

    def resolve(self, path: str) -> Path:
        """Returns the file of a playbook.

        Args:
            path: a catalog path; or a file, with or without ``.yaml``, in the folder. Files are below this folder, the
                folder of playbooks, the working folder or ``NOETL_FILE_FOLDERS``.

        Raises:
            PlaybookError: nothing is found, or two files claim the catalog path.
        """
        claimed = self.paths.get(path.strip("/"), ())
        if len(claimed) == 1:
            return claimed[0]
        place = Place(str(self.folder), 1)
        if claimed:
            files = " and ".join(map(str, claimed))
            raise PlaybookError([Problem(place, f"catalog path {path!r} is claimed by {files}; rename one")])
        outside = ""
        for suffix in ("", *SUFFIXES):
            candidate = self.folder / f"{path}{suffix}"
            if candidate.is_file():
                if self._is_permitted(candidate):
                    return candidate
                outside = f"; {candidate} is outside of the permitted folders (NOETL_FILE_FOLDERS)"
        hint = did_you_mean(path, tuple(self.paths)) or f"known: {', '.join(sorted(self.paths)) or 'none'}"
        message = f"no playbook {path!r}, neither as catalog path below {self.folder} nor as file; {hint}{outside}"
        raise PlaybookError([Problem(place, message, kind=ProblemKind.MISSING_PLAYBOOK)])

    def _is_permitted(self, file: Path) -> bool:
        """Reports whether a path leads to a file below the permitted folders, by ``..`` or a link too."""
        settings = get_settings()
        folders = (self.folder, settings.playbooks_path, Path.cwd(), *settings.file_folders)
        resolved = file.resolve()
        return any(resolved.is_relative_to(folder.resolve()) for folder in folders)

    def load(self, path: str, *, lenient: bool = False) -> Playbook:
        """Resolves and loads; a text that was loaded before is not parsed again."""
        file = self.resolve(path)
        key = file, lenient
        playbook = self._loaded.get(key)
        if playbook is None or playbook.source.encode() != _bytes_of(file):
            playbook = self._loaded[key] = load_playbook(file, lenient=lenient)
        return playbook

    def has(self, playbook: Playbook) -> bool:
        """Reports whether the file of a playbook is in the folder, and has the same text."""
        file = Path(playbook.file).resolve()
        return file.is_relative_to(self.folder.resolve()) and _bytes_of(file) == playbook.source.encode()


def _bytes_of(file: Path) -> bytes | None:
    try:
        return file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError:  # loading reports the reason
        return None


def _catalog_path(file: Path) -> str | None:
    root = Document(file.read_text(encoding="utf-8"), str(file)).root
    metadata = root.get("metadata") if isinstance(root, dict) else None
    if not isinstance(metadata, dict):
        return file.stem
    return str(metadata.get("path") or metadata.get("name") or file.stem).strip("/")
