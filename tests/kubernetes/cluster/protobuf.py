"""Objects in Kubernetes' protobuf form, of the few kinds that Helm's engine writes so: its releases."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from tests.kubernetes.cluster.failures import Refused

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_META = {1: "name", 2: "generateName", 3: "namespace", 5: "uid", 6: "resourceVersion"}
_META_MAPS = {11: "labels", 12: "annotations"}


def decoded(body: bytes) -> dict[str, Any]:
    """The object as JSON says it.

    Raises:
        Refused: 415 for another kind.
    """
    if not body.startswith(_MAGIC):
        raise Refused(400, "BadRequest", "the body is no protobuf of Kubernetes")
    envelope = dict(_fields(body[len(_MAGIC) :]))
    type_meta = {number: value.decode() for number, value in _fields(envelope[1])}
    kind, raw = type_meta.get(2, ""), envelope.get(2, b"")
    readers = {"Secret": _secret, "DeleteOptions": _delete_options}
    if kind not in readers:
        raise Refused(415, "UnsupportedMediaType", f"{kind} is not read in protobuf here")
    return {"apiVersion": type_meta.get(1, ""), "kind": kind, **readers[kind](raw)}


def _secret(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"metadata": {}, "data": {}}
    for number, value in _fields(raw):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif number == 2:
            key, content = _entry(value)
            found["data"][key] = base64.b64encode(content).decode()
        elif number == 3:
            found["type"] = value.decode()
    return found


def _delete_options(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _fields(raw):
        if number == 1:
            found["gracePeriodSeconds"] = value
        elif number == 4:
            found["propagationPolicy"] = value.decode()
    return found


def _metadata(raw: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _fields(raw):
        if number in _META and value:
            found[_META[number]] = value.decode()
        elif number in _META_MAPS:
            key, content = _entry(value)
            found.setdefault(_META_MAPS[number], {})[key] = content.decode()
    return found


def _entry(raw: bytes) -> tuple[str, bytes]:
    """One entry of a map."""
    entry = dict(_fields(raw))
    return entry.get(1, b"").decode(), entry.get(2, b"")


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message: of type 0 integers, of type 2 bytes; there are no others here."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        value, at = _varint(raw, at)
        if tag & 7 == 2:
            yield tag >> 3, raw[at : at + value]
            at += value
        else:
            yield tag >> 3, value


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
