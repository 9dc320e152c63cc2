"""``kind: s3`` and ``kind: gcs``: their fields; uploads, downloads, lists and deletes of objects."""

from __future__ import annotations

from noetl_dagster.playbook.tool_kinds import NUMBER_WORDS, NUMBERS, ROW_FORMATS, ToolKind


def _bucket(name: str, extra: str = "") -> ToolKind:
    return ToolKind(
        name,
        "noetl_dagster.tools.buckets.tool:BucketTool",
        {
            ("operation", "action"): "upload (default), download, list or delete",
            ("uri", "url"): "Address of the object, with bucket and key",
            "bucket": "Name of the bucket; default: that of the credential or the installation",
            ("key", "object", "keys", "blob", "object_name", "object_key"): (
                "Key of the object; for delete also a list"
            ),
            ("source", "src"): "Local file of an upload, object of a download",
            ("destination", "dest", "target"): "Object of an upload, local file of a download",
            ("file", "path", "local_path", "file_path", "filename"): "Local file, relative to the playbook's folder",
            ("content", "data", "body", "value", "payload", "text"): (
                "Content to upload instead of a file: text, bytes, rows, any other value as JSON, or a reference"
            ),
            "content_type": "Content type of the uploaded object",
            "metadata": "Metadata of the uploaded object, a mapping of texts",
            "prefix": "Beginning of the keys to list or delete",
            ("limit", "max_keys", "max_results"): "Maximum of listed objects",
            "format": "Format of the content; default: the ending of the key",
            "encoding": "base64 decodes the text in content before it is uploaded",
            "numbers": NUMBERS,
        },
        words={
            "operation": ("upload", "download", "list", "delete", "put", "get"),
            "format": (*ROW_FORMATS, "text", "bytes", "base64"),
            "encoding": ("base64", "utf-8", "text"),
            "numbers": NUMBER_WORDS,
        },
        extra=extra,
    )


KINDS = (_bucket("gcs", extra="gcs"), _bucket("s3"))
