"""Bounds the paths that playbooks and their data name: data never leads out of the folder that its playbook wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os.path import realpath
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from noetl_dagster.errors import ToolError
from noetl_dagster.settings import Settings

_TEMPLATE = re.compile(r"\{\{|\{%|\{#")
_SETTING = "NOETL_FILE_FOLDERS"


def own_folders(folder: str, settings: Settings) -> tuple[Path, ...]:
    """Returns the folders in which relative scripts are looked for: the playbook's, that of playbooks, the working one.

    ``folder`` is the playbook's. That of a registered playbook may not exist on this machine.
    """
    return tuple(dict.fromkeys(one.resolve() for one in (Path(folder), settings.playbooks_path, Path.cwd())))


def working_folder(folder: str, settings: Settings) -> Path:
    """Returns the first of a playbook's own folders that exists, in which its commands run."""
    return next(one for one in (Path(folder), settings.playbooks_path, Path.cwd()) if one.is_dir())


def is_permitted(path: Path, settings: Settings) -> bool:
    """Returns whether a path without links is below a folder of ``NOETL_FILE_FOLDERS``."""
    return any(path.is_relative_to(one.resolve()) for one in settings.file_folders)


def check_path(rendered: Any, written: Any, folder: str, settings: Settings, what: str, *, key: bool = False) -> None:
    """Refuses a path that a template leads out of its folder, by ``..``, a link, or an absolute path.

    The folder is what the playbook writes before the first template: ``/data/out`` of ``/data/out/{{ name }}.csv``,
    else the playbook's. A path that begins with a template may be absolute below ``NOETL_FILE_FOLDERS``. A path without
    templates is the author's own, and is not checked.

    Args:
        rendered: the path or URI with its templates rendered.
        written: the same in the playbook; None if it is unknown, since a larger template made it.
        folder: of the playbook.
        what: the field, for errors.
        key: a path without a scheme is the key of an object.

    Raises:
        ToolError: of kind ``schema``, with the path, its folder and the remedy.
    """
    if not isinstance(rendered, str) or rendered == written or not rendered:
        return
    text, parts = str(written or ""), urlsplit(rendered)
    found = _TEMPLATE.search(text)
    before = text[: found.start()] if found else ""
    if not rendered.startswith(before):  # another value than that of the template
        before = ""
    if parts.scheme not in ("", "file") or (key and not parts.scheme):
        if ".." in PurePosixPath(parts.path).parts:
            raise _leaves(what, rendered, "its key has '..'")
        return
    path, start = realpath(Path(folder, parts.path)), before.removeprefix("file://").rpartition("/")[0]
    if not start and parts.path.startswith("/"):
        if not is_permitted(Path(path), settings):
            raise ToolError(
                f"{what}: {rendered!r} is an absolute path that a template made; write its folder before the template, "
                f"or add the folder to {_SETTING}",
                kind="schema",
            )
        return
    root = realpath(Path(folder, start))
    if path != root and not path.startswith(root.rstrip("/") + "/"):
        raise _leaves(what, rendered, f"it is not below {root}")


def _leaves(what: str, path: str, why: str) -> ToolError:
    remedy = "write {{ value | path_part }} to use a value as one name"
    return ToolError(f"{what}: {path!r} leaves its folder: {why}; {remedy}", kind="schema")


def written_in(fields: Any, *names: str) -> Any:
    """Returns a field as the playbook writes it, in one of its spellings; None if it is not written as such."""
    found = (fields[name] for name in names if fields.get(name)) if isinstance(fields, Mapping) else ()
    return next(iter(found), None)
