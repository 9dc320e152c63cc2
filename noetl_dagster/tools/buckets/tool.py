"""``kind: s3`` and ``kind: gcs``: reads the fields of a call, and opens its bucket."""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from noetl_dagster.errors import CredentialError, NoetlError
from noetl_dagster.tools.access.clients import bucket_name, google_account, google_token, open_bucket
from noetl_dagster.tools.access.credential_types import CredentialType
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult
from noetl_dagster.tools.buckets.operations import OpenBucket, Places, first_line
from noetl_dagster.tools.files import check_path

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SCHEMES = {"s3": "s3", "minio": "s3", "gs": "gcs", "gcs": "gcs"}
_SCHEME_OF = {"s3": "s3", "gcs": "gs"}
_LOCATIONS = ("uri", "key", "source", "destination", "file")


class Operation(StrEnum):
    """The operations of the tool."""

    UPLOAD = "upload"
    DOWNLOAD = "download"
    LIST = "list"
    DELETE = "delete"

    @classmethod
    def _missing_(cls, value: object) -> Operation | None:
        return {"put": cls.UPLOAD, "get": cls.DOWNLOAD}.get(str(value))


class BucketTool(Tool):
    """One operation on a bucket.

    Input: ``operation`` (also ``action``), default ``upload``. The object is ``uri`` (``s3://bucket/key``,
    ``gs://bucket/key``), or ``bucket`` and ``key``; the local file is ``file``. ``source`` and ``destination`` name
    where the bytes come from and go to: of an upload the file and the object, of a download the object and the file.

    upload: the file, or ``content``: text, bytes, base64 text with ``encoding: base64``, rows for keys that end in
    .parquet, .jsonl and .csv, any other value as JSON; a reference of a result is read in batches. ``content_type``,
    ``metadata``. download: without a file the content is the result: rows, JSON, text or bytes, by ``format`` or the
    key's ending. list: ``prefix``, ``limit``. delete: ``key``, one or a list, or ``prefix``.

    Output: upload ``{uri, bucket, key, bytes, etag}``; download the same with ``path``, or the content; list
    ``{bucket, prefix, count, more, rows}`` with rows of ``{key, uri, bytes, etag, modified}``; delete
    ``{bucket, deleted}``.

    Raises ``ToolError``. An object appears as a whole or not at all, and so does a local file.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Runs the operation."""
        operation = call.word("operation", Operation, Operation.UPLOAD)
        kind, places = call.task.kind, self._places(operation, call, context)
        try:
            credential = await context.credentials.resolve(call.auth, CredentialType(kind))
            name = bucket_name(context.settings, kind, places.bucket, credential)
            if _BUCKET.fullmatch(name) is None:
                raise call.error(f"{name!r:.80} is no name of a bucket")
            if kind == "gcs":
                from noetl_dagster.storage.tiers.gcs import GcsBucket

                account, token = google_account(credential), google_token(credential)
                objects: Any = GcsBucket(context.settings, name, account=account, token=token)
            else:
                from noetl_dagster.storage.tiers.objects import S3Bucket

                objects = S3Bucket(open_bucket(context.settings, kind, name, credential))
        except CredentialError as error:
            raise call.error(str(error), "credential", retryable=error.retryable) from None
        except NoetlError:
            raise
        except Exception as error:  # the client's own, about the fields of the credential
            raise call.error(f"the client refuses its settings: {first_line(error)}", "credential") from None
        bucket = OpenBucket(call, context, objects, name, f"{_SCHEME_OF[kind]}://{name}/")
        match operation:
            case Operation.UPLOAD:
                return ToolResult(data=await bucket.upload(places))
            case Operation.DOWNLOAD:
                return await bucket.download(places)
            case Operation.LIST:
                return await bucket.listed()
            case Operation.DELETE:
                return ToolResult(data=await bucket.delete(places))

    def _places(self, operation: Operation, call: ToolCall, context: ToolContext) -> Places:
        """Reads which object and which file a call names, each in one field; a template leads out of no folder."""
        own, other = ("destination", "source") if operation is Operation.UPLOAD else ("source", "destination")
        config, places, named = call.config, Places(bucket=str(call.config.get("bucket") or "")), dict[str, str]()
        kind, own_scheme = call.task.kind, _SCHEME_OF[call.task.kind]
        places = replace(places, bucket=re.sub(r"^\w+://", "", places.bucket).strip("/"))
        for field in _LOCATIONS:
            value = config.get(field)
            if value in (None, "") or isinstance(value, list):  # keys to delete
                continue
            text = str(value)
            scheme, separator, rest = text.partition("://")
            is_object = field in ("uri", "key", own) if not separator else scheme != "file"
            if separator and is_object and _SCHEMES.get(scheme) != kind:
                remedy = f"kind {_SCHEMES[scheme]}" if scheme in _SCHEMES else f"{own_scheme}:// or a path"
                raise call.error(f"{field}: {text!r:.200} is not of kind {kind}; use {remedy}")
            if not separator and field == "uri":
                raise call.error(f"uri: {text!r:.200} is none; write {own_scheme}://<bucket>/<key>, or bucket and key")
            if not is_object and field in (own, "key", "uri"):
                raise call.error(f"{field}: {text!r:.200} is a file of this machine, where an object has to stand")
            what = "object" if is_object else "file"
            if what in named:
                raise call.error(f"{named[what]!r} and {field!r} both name the {what}; keep one")
            if separator and is_object and operation in (Operation.UPLOAD, Operation.DOWNLOAD) and field == other:
                raise call.error(
                    f"{field}: {text!r:.200} is an object, and so is what it is copied to; download it to a file "
                    "first, or move rows with kind transfer"
                )
            named[what] = field
            where, written = f"{kind} in step {call.step}, {field}", call.task.config.get(field)
            check_path(value, written, call.folder, context.settings, where, key=is_object)
            if not is_object:
                parts = urlsplit(text)  # as the check above reads it
                if parts.netloc or parts.query or parts.fragment or parts.path not in (text, rest):
                    remedy = "it has no '?', '#' or host; write file:///folder/name or folder/name"
                    raise call.error(f"{field}: {text!r:.200} is no path of a local file: {remedy}")
                places = replace(places, file=parts.path)
                continue
            bucket, _, key = rest.partition("/") if separator else ("", "", text)
            if bucket and places.bucket and bucket != places.bucket:
                raise call.error(f"{field} is in bucket {bucket!r}, and 'bucket' is {places.bucket!r}; keep one")
            places = replace(places, bucket=bucket or places.bucket, key=key.lstrip("/"))
        return places
