"""The files that playbooks name: paths stay in the folders that they may use, and scripts are read from anywhere.

Data never leads out of the folder that its playbook wrote. A script is ``script: {uri, source: {type}}``: code outside
of the playbook, for python, SQL and shell tasks.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from os.path import realpath
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from noetl_dagster.errors import CredentialError, ErrorKind, ToolError, kind_of, kind_of_status
from noetl_dagster.settings import Settings
from noetl_dagster.tools.base import ToolCall, ToolContext

_TEMPLATE = re.compile(r"\{\{|\{%|\{#")
_SETTING = "NOETL_FILE_FOLDERS"
HTTP_SECONDS = 30.0
_SCHEMES = {
    "": "file",
    "file": "file",
    "http": "http",
    "https": "http",
    "s3": "s3",
    "minio": "s3",
    "gs": "gcs",
}


def own_folders(folder: str, settings: Settings) -> tuple[Path, ...]:
    """Returns the folders in which relative scripts are looked for: the playbook's, that of playbooks, the working one.

    Commands run in the first that exists. ``folder`` is the playbook's, which may not exist on this machine if the
    playbook is registered.
    """
    return tuple(dict.fromkeys(one.resolve() for one in (Path(folder), settings.playbooks_path, Path.cwd())))


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
    template = _TEMPLATE.search(text)
    before = text[: template.start()] if template else ""
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
    values = (fields[name] for name in names if fields.get(name)) if isinstance(fields, Mapping) else ()
    return next(iter(values), None)


async def load_script(call: ToolCall, context: ToolContext) -> str | None:
    """Returns the text of the call's ``script``, a mapping ``{uri, source: {type: file|http|gcs|s3, auth}}`` or a URI.

    Returns None if there is none; raises ``ToolError`` if it cannot be read.
    """
    script = call.config.get("script")
    if script is None:
        return None
    import obstore

    from noetl_dagster.tools.access.clients import open_bucket
    from noetl_dagster.tools.access.credential_types import CredentialType

    uri, source = _address(script)
    kind = str(source.get("type") or _SCHEMES.get(urlsplit(uri).scheme, ""))
    where, most = f"script {uri!r} of step {call.step}", context.settings.http_body_bytes
    try:
        if kind == "file":
            return await asyncio.to_thread(_file_text, script_file(uri, call, context), where, most)
        if kind == "http":
            base = str(source.get("endpoint") or "")
            url = uri if "://" in uri or not base else f"{base.rstrip('/')}/{uri.lstrip('/')}"
            return await _answer_text(url, where, context)
        if kind in ("s3", "gcs"):
            parts = urlsplit(uri if "://" in uri else f"{kind}://{source.get('bucket', '')}/{uri}")
            credential = await context.credentials.resolve(source.get("auth"), CredentialType(kind))
            bucket = open_bucket(context.settings, kind, parts.netloc, credential)
            answer = await obstore.get_async(bucket, parts.path.lstrip("/"))
            _check_size(answer.meta["size"], where, most)
            return bytes(await answer.bytes_async()).decode()
    except UnicodeDecodeError:  # its message would quote the content
        raise ToolError(f"{where} is not text in UTF-8", kind="parse") from None
    except (OSError, CredentialError, obstore.exceptions.BaseError) as error:
        raise ToolError(f"{where} cannot be read: {error}", kind=kind_of(error)) from None
    types = "file, http, s3, gcs, inline"
    raise ToolError(f"{where}: source type {kind!r} is unknown; known: {types}", kind="schema")


def script_file(uri: str, call: ToolCall, context: ToolContext) -> Path:
    """Returns the file of a path or ``file://`` URI; raises ``ToolError`` with the paths that were tried.

    A relative path is resolved against the playbook's folder, the folder of playbooks and the working folder. It cannot
    leave them, by ``..`` or by a link. An absolute path is below one of them, or below ``NOETL_FILE_FOLDERS``.
    """
    path, settings = Path(uri.removeprefix("file://")), context.settings
    allowed = own_folders(call.folder, settings)
    if path.is_absolute():
        file = path.resolve()
        if not any(map(file.is_relative_to, allowed)) and not is_permitted(file, settings):
            folders = ", ".join(map(str, (*allowed, *settings.file_folders)))
            raise ToolError(
                f"script {uri!r} of step {call.step} is not below {folders}; move it there, or add its folder to "
                "NOETL_FILE_FOLDERS",
                kind="schema",
            )
        return file
    looked = []
    for folder in allowed:
        file = (folder / path).resolve()
        inside = any(file.is_relative_to(other) for other in allowed)
        if inside and file.is_file():
            return file
        looked.append(f"{folder / path}{'' if inside else ' (outside of these folders)'}")
    raise ToolError(
        f"script {uri!r} of step {call.step} is not there; looked for {', '.join(looked)}", kind="not_found"
    )


def _file_text(path: Path, where: str, most: int) -> str:
    _check_size(path.stat().st_size, where, most)
    return path.read_text(encoding="utf-8")


def _check_size(size: int, where: str, most: int) -> None:
    if size > most:
        raise ToolError(f"{where} has {size} bytes, more than {most} (NOETL_HTTP_BODY_BYTES)", kind="schema")


async def _answer_text(url: str, where: str, context: ToolContext) -> str:
    from noetl_dagster.tools.access.web import HttpRequest, WebError, address, answered, bounded_body

    request = HttpRequest("GET", address(url))
    try:
        async with answered(context.clients.http(), request, seconds=HTTP_SECONDS, follow=True) as response:
            status = response.status
            content = await bounded_body(response, context.settings.http_body_bytes) if status < 400 else b""
            text = content.decode(response.charset or "utf-8")
    except WebError as error:
        kind: ErrorKind = "timeout" if error.late else "connection" if error.retryable else "client_error"
        raise ToolError(f"{where}: {error}", kind=kind, retryable=error.retryable) from None
    if status >= 400:
        raise ToolError(
            f"{where}: the server answered {status}",
            kind=kind_of_status(status),
            retryable=status >= 500,
            status=status,
        )
    return text


def _address(script: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(script, str):
        return script, {}
    if isinstance(script, Mapping) and isinstance(script.get("uri"), str):
        source = script.get("source") or {}
        return script["uri"], source if isinstance(source, Mapping) else {"type": source}
    raise ToolError("script must be a path, a URI, or {uri, source: {type}}", kind="schema")
