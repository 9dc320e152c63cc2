"""Results of tasks: checks that they hold what the task promises, and stores those that are too large for the log."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, islice, repeat
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.events.envelopes import Envelope
from noetl_dagster.playbook.models import ResultSpec, Task
from noetl_dagster.playbook.templates.chunks import noted_rows
from noetl_dagster.playbook.templates.rendering import Fetch, with_references
from noetl_dagster.playbook.templates.views import NOTHING, ReferenceCache, ResultView, find_in_data, unwrapped
from noetl_dagster.process.redaction import SECRETS
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.codec import select_fields
from noetl_dagster.storage.store import ResultStore
from noetl_dagster.tools.base import ToolCall
from noetl_dagster.values import encode_json
from noetl_dagster.worker.command import Command


def check_input(task: Task, arguments: Mapping[str, Any]) -> None:
    """Raises ``ToolError`` of kind ``schema`` if a key that the task expects is missing."""
    missing = [name for name in task.asserts.expects if name not in arguments]
    if missing:
        raise ToolError(
            f"task {task.name!r} expects {_named(missing)} in its input, which has {_named(arguments) or 'nothing'}",
            kind="schema",
        )


async def check_result(task: Task, envelopes: Iterable[Envelope], cache: ReferenceCache, fetch: Fetch) -> None:
    """Raises ``ToolError`` of kind ``schema`` if a key that the task returns is in none of ``envelopes``."""
    views = [ResultView(envelope, cache) for envelope in envelopes]
    results = [await with_references(fetch, unwrapped, view) for view in views]
    missing = [name for name in task.asserts.returns if all(find_in_data(one, name) is NOTHING for one in results)]
    if missing:
        last, shown = results[-1], f"is a {type(results[-1]).__name__}"
        if isinstance(last, Mapping):
            shown = f"has {_named(last) or 'nothing'}"
        message = f"task {task.name!r} promises {_named(missing)} in its result, which {shown}"
        raise ToolError(message, kind="schema")


def _named(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))


logger = logging.getLogger(__name__)

MOST_FIELDS = 5
"""Fields that a warning names at most."""

IN_EVENT = frozenset({StoreTier.EVENTLOG, StoreTier.MEMORY})
_SMALL = (int, float, bool, type(None))


class ResultWriter:
    """Decides if the data of an envelope stays inline or is stored."""

    def __init__(self, settings: Settings, store: ResultStore) -> None:
        self._limit = settings.inline_result_bytes
        self._store = store

    async def seal(self, envelope: Envelope, command: Command, task: Task | None) -> Envelope:
        """Returns the envelope with its data inline if it is small, or else with a reference.

        Raises:
            StorageError: no tier could store it.
        """
        if "ref" in envelope or "data" not in envelope:
            return dict(envelope)
        fits, exposed = self._examine(envelope["data"], command, task)
        return envelope | exposed if fits else await self.store(envelope, command, task)

    async def store(self, envelope: Envelope, command: Command, task: Task | None) -> Envelope:
        """Returns the envelope with its data stored as the task's spec requires, whatever its size."""
        spec = task.spec.result if task is not None else ResultSpec()
        data = envelope.get("data")
        if "ref" in envelope or data is None:
            return envelope
        may_stay = spec.store is None or spec.store in IN_EVENT or spec.threshold is not None
        exposed: dict[str, Any] = {}
        if may_stay:
            fits, exposed = self._examine(data, command, task)
            if fits:
                extracted = select_fields(data, spec.select, self._limit)
                return envelope | exposed | ({"extracted": extracted} if extracted else {})
        elif SECRETS.is_given:
            _, exposed = self._examine(data, command, task)
        name = spec.name or (task.name if task is not None else "result")
        if command.index is not None:
            name = f"{name}-{command.index}"
        reference = await self._store.put(
            data,
            execution_id=command.execution_id,
            step=command.step,
            name=f"{name}-{command.visit}-{command.attempt}",
            spec=spec,
            tier=spec.store,
            select=spec.select,
            extra=noted_rows(data),
        )
        sealed = {key: value for key, value in envelope.items() if key != "data"} | exposed | {"ref": reference}
        return sealed | ({"extracted": reference.extracted} if reference.extracted else {})

    def _examine(self, data: Any, command: Command, task: Task | None) -> tuple[bool, dict[str, Any]]:
        """Returns whether data fits into the event, and the fields in it that contain a secret, for the envelope."""
        threshold = task.spec.result.threshold if task is not None else None
        limit = self._limit if threshold is None else min(threshold, self._limit)
        if isinstance(data, _SMALL):
            return True, {}
        if isinstance(data, str) and len(data) * 4 <= limit:
            return True, exposed_in(data, command, encoded=data)
        if not isinstance(data, (dict, list, tuple, str)):
            return False, {}
        encoded = encode_json(data)
        return len(encoded) <= limit, exposed_in(data, command, encoded=encoded)


def exposed_in(
    data: Any, call: Command | ToolCall, place: str = "data", *, encoded: bytes | str | None = None
) -> dict[str, list[str]]:
    """Returns ``secrets``, the fields of a value for the event log that contain a secret, and warns; empty without any.

    Args:
        place: name of the value.
        encoded: its JSON, if that is known.
    """
    if not SECRETS.is_given or not SECRETS.found_in(encode_json(data) if encoded is None else encoded):
        return {}
    fields = list(islice(SECRETS.places_in(data, place), MOST_FIELDS)) or [place]
    logger.log(
        _level(call),
        "step %s of execution %s stores a secret in %s, which everyone who reads the event log can see; "
        "keep only what later steps need",
        call.step,
        call.execution_id,
        ", ".join(fields),
    )
    return {"secrets": fields}


@lru_cache(maxsize=1_000)
def _first_of(execution_id: int, step: str) -> Iterator[int]:
    return chain((logging.WARNING,), repeat(logging.DEBUG))


def _level(call: Command | ToolCall) -> int:
    """Returns the level of a warning: a step warns once, and not for each item of its loop."""
    return next(_first_of(call.execution_id, call.step))
