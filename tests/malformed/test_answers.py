"""Answers that a worker gets in place of those of the HTTP API, for example from a proxy."""

from __future__ import annotations

import gzip
import json
import logging

import pytest

from noetl_dagster.events.transport.http import AnswerError, ApiClient, ApiResponse, HttpTransport
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.pool_worker.control import HttpControl
from noetl_dagster.worker.context import Batch
from tests.events.transport.conftest import ended
from tests.playbooks import text_of

SECRET = "hunter-in-the-answer"

ANSWERS: dict[str, bytes] = {
    "empty": b"",
    "a page": b"<html><body>Sign in</body></html>",
    "null": b"null",
    "a number": b"1",
    "a list": b"[]",
    "truncated": b'{"groups": [{"execution',
    "invalid UTF-8": b'{"groups": "\xff"}',
    "gzip": gzip.compress(b"{}"),
    "deep": b"[" * 100_000,
    "another API": b'{"message": "ok"}',
    "groups of the wrong type": json.dumps(
        {"groups": SECRET, "events": SECRET, "source": 1, "refused": SECRET}
    ).encode(),
    "groups that are none": json.dumps(
        {"groups": [SECRET], "events": [SECRET], "source": [], "refused": [SECRET]}
    ).encode(),
}


class Answering(ApiClient):
    """A client to which every request has the same answer."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def request(self, method: str, path: str, **_: object) -> ApiResponse:
        return ApiResponse(200, self._content, f"http://api{path}")


@pytest.mark.parametrize("content", ANSWERS.values(), ids=ANSWERS)
async def test_other_answers_name_the_address_and_no_content(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    control, transport = HttpControl(Answering(content)), HttpTransport(Answering(content))
    for request in (
        control.claim("w1", [1], {}, {}),
        control.lifecycle(1),
        control.source(1),
        transport.publish([ended(1, 0)]),
    ):
        try:
            with caplog.at_level(logging.DEBUG):
                answer = await request
        except AnswerError as error:
            message = str(error)
            assert message.startswith("http://api/api/")
            assert "NOETL_SERVER_URL" in message
            assert SECRET not in message
            assert len(message) < 700
        else:  # fields that an answer may lack
            assert content == ANSWERS["another API"] or answer is None
    assert SECRET not in caplog.text


def test_batches_of_other_types() -> None:
    for field in Batch.model_fields:
        for value in ("x", [1], {"x": 1}):
            content = {"lease_seconds": 1, "groups": []} | {field: value}
            with pytest.raises(AnswerError, match=field):
                ApiResponse(200, json.dumps(content).encode(), "http://api").read(Batch)


PLAYBOOK = text_of("sample", "workflow: [{step: start, tool: {kind: noop}}]\n")


def stored() -> dict[str, object]:
    found = parse_playbook(PLAYBOOK).stored
    assert found is not None
    return dict(json.loads(found))


STORED: dict[str, str] = {
    "empty": "",
    "null": "null",
    "a list": "[]",
    "a text": '"x"',
    "an empty mapping": "{}",
    "truncated": json.dumps(stored())[:-20],
    "no steps": json.dumps(stored() | {"steps": None}),
    "steps of the wrong type": json.dumps(stored() | {"steps": {"a": 1}}),
    "a step without a name": json.dumps(stored() | {"steps": [{}]}),
    "metadata of the wrong type": json.dumps(stored() | {"metadata": []}),
    "not a number": json.dumps(stored() | {"steps": float("nan")}),
}
"""Contents of ``noetl.catalog.model``."""


@pytest.mark.parametrize("content", STORED.values(), ids=STORED)
def test_stored_playbooks_that_are_damaged(content: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller reads the text instead
        Playbook.from_stored(content, PLAYBOOK, file="x.yaml", renamed={})
