"""``script: {uri, source: {type}}``: code outside of the playbook, for python, SQL and shell tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore

from noetl_dagster.errors import CredentialError, ErrorKind, ToolError, kind_of, kind_of_status
from noetl_dagster.tools.access.clients import open_bucket
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.base import Toolbox, ToolCall
from noetl_dagster.tools.paths import is_permitted, own_folders

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


async def load_script(call: ToolCall, box: Toolbox) -> str | None:
    """Returns the text of the call's ``script``, a mapping ``{uri, source: {type: file|http|gcs|s3, auth}}`` or a URI.

    Returns None if there is none; raises ``ToolError`` if it cannot be read.
    """
    script = call.config.get("script")
    if script is None:
        return None
    uri, source = _address(script)
    kind = str(source.get("type") or _SCHEMES.get(urlsplit(uri).scheme, ""))
    where, most = f"script {uri!r} of step {call.step}", box.settings.http_body_bytes
    try:
        if kind == "file":
            return await asyncio.to_thread(_file_text, script_file(uri, call, box), where, most)
        if kind == "http":
            base = str(source.get("endpoint") or "")
            url = uri if "://" in uri or not base else f"{base.rstrip('/')}/{uri.lstrip('/')}"
            return await _answer_text(url, where, box)
        if kind in ("s3", "gcs"):
            parts = urlsplit(uri if "://" in uri else f"{kind}://{source.get('bucket', '')}/{uri}")
            credential = await box.credentials.resolve(source.get("auth"), CredentialType(kind))
            bucket = open_bucket(box.settings, kind, parts.netloc, credential)
            answer = await obstore.get_async(bucket, parts.path.lstrip("/"))
            _check_size(answer.meta["size"], where, most)
            return bytes(await answer.bytes_async()).decode()
    except UnicodeDecodeError:  # its message would quote the content
        raise ToolError(f"{where} is not text in UTF-8", kind="parse") from None
    except (OSError, CredentialError, obstore.exceptions.BaseError) as error:
        raise ToolError(f"{where} cannot be read: {error}", kind=kind_of(error)) from None
    known = "file, http, s3, gcs, inline"
    raise ToolError(f"{where}: source type {kind!r} is unknown; known: {known}", kind="schema")


def script_file(uri: str, call: ToolCall, box: Toolbox) -> Path:
    """Returns the file of a path or ``file://`` URI; raises ``ToolError`` with the paths that were tried.

    A relative path is resolved against the playbook's folder, the folder of playbooks and the working folder. It cannot
    leave them, by ``..`` or by a link. An absolute path is below one of them, or below ``NOETL_FILE_FOLDERS``.
    """
    path, settings = Path(uri.removeprefix("file://")), box.settings
    allowed = own_folders(call.folder, settings)
    if path.is_absolute():
        found = path.resolve()
        if not any(map(found.is_relative_to, allowed)) and not is_permitted(found, settings):
            known = ", ".join(map(str, (*allowed, *settings.file_folders)))
            raise ToolError(
                f"script {uri!r} of step {call.step} is not below {known}; move it there, or add its folder to "
                "NOETL_FILE_FOLDERS",
                kind="schema",
            )
        return found
    looked = []
    for folder in allowed:
        found = (folder / path).resolve()
        inside = any(found.is_relative_to(other) for other in allowed)
        if inside and found.is_file():
            return found
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


async def _answer_text(url: str, where: str, box: Toolbox) -> str:
    from noetl_dagster.tools.access.web import HttpRequest, WebError, address, answered, bounded_body

    request = HttpRequest("GET", address(url))
    try:
        async with answered(box.clients.http(), request, seconds=HTTP_SECONDS, follow=True) as response:
            status = response.status
            content = await bounded_body(response, box.settings.http_body_bytes) if status < 400 else b""
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
