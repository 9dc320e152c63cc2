"""Asks secret managers off the event loop, and once for all callers that need the same secret."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module

import orjson

from noetl_dagster.errors import CredentialError
from noetl_dagster.extras import needs_extra
from noetl_dagster.settings import Settings

KEPT_SECONDS = 60.0  # for which a secret is cached; changes take effect after this time
REFUSED_SECONDS = 2.0  # for which a refusal is cached for later shards
PATIENCE_SECONDS = 30.0  # that a manager may take to answer
MOST_KEPT = 1_000
KEY = "#"  # separates a secret's name from the name of its field

Secret = str | Mapping[str, str]
"""A text, or texts by their keys."""

_MANAGERS = {
    "aws": ("aws", "secret", ""),
    "aws_ssm": ("aws", "parameter", ""),
    "google": ("google", "secret", "google"),
    "kubernetes": ("kubernetes", "secret", "k8s"),
}
"""Module and function of each provider, and the extra that it needs. Modules are imported on first use."""

MANAGERS = frozenset(_MANAGERS)


@dataclass(slots=True)
class _Asked:
    """A secret that is being fetched or was fetched."""

    until: float
    answer: Future[Secret | Exception] = field(default_factory=Future)


class SecretManagers:
    """The secret managers of one process, with their recent answers."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._asked: dict[tuple[str, str], _Asked] = {}
        self._asking = threading.Lock()

    async def find(self, provider: str, name: str) -> str:
        """Returns the value of a secret.

        Args:
            provider: one of :data:`MANAGERS`.
            name: as the manager calls it, and after ``#`` the key of a field, if it has fields.

        Raises:
            CredentialError: there is no such secret, it may not be read, or the manager does not answer.
        """
        path, _, key = name.partition(KEY)
        asked = self._ask(provider, path)
        if not asked.answer.done():
            # a caller that stops waiting leaves the answer to the others
            waiting = asyncio.shield(asyncio.wrap_future(asked.answer))
            try:
                await asyncio.wait([waiting], timeout=PATIENCE_SECONDS)
            finally:
                waiting.cancel()
        if not asked.answer.done():
            raise CredentialError(
                f"secret {path!r}: provider {provider!r} does not answer within {PATIENCE_SECONDS:g} s",
                retryable=True,
            )
        answer = asked.answer.result()
        if isinstance(answer, CredentialError):  # many shards may wait
            raise answer.again()
        if isinstance(answer, Exception):  # its text may hold anything
            raise CredentialError(f"secret {path!r}: provider {provider!r} fails with {type(answer).__name__}")
        return _value(_where(provider, path), key, answer)

    def _ask(self, provider: str, path: str) -> _Asked:
        place = (provider, path)
        with self._asking:
            asked = self._asked.get(place)
            if asked is not None and time.monotonic() < asked.until:
                return asked
            if len(self._asked) >= MOST_KEPT:
                self._asked = {name: one for name, one in self._asked.items() if not one.answer.done()}
            # if it hangs, a later caller asks again after the time limit
            asked = self._asked[place] = _Asked(until=time.monotonic() + PATIENCE_SECONDS)
        # not of a pool: a manager that never answers must not keep the process from ending
        threading.Thread(target=self._answer, args=(*place, asked), name="secrets", daemon=True).start()
        return asked

    def _answer(self, provider: str, path: str, asked: _Asked) -> None:
        module, function, extra = _MANAGERS[provider]
        where = _where(provider, path)
        seconds = REFUSED_SECONDS
        try:
            fetch = getattr(import_module(f"{__package__}.{module}"), function)
            answer: Secret | Exception = fetch(path, where, self._settings)
            seconds = KEPT_SECONDS
        except ImportError:
            answer = CredentialError(
                needs_extra(where, extra) if extra else f"{where} needs dagster-aws: pip install dagster-aws"
            )
        except Exception as error:
            answer = error
        asked.until = time.monotonic() + seconds
        asked.answer.set_result(answer)


def _where(provider: str, path: str) -> str:
    return f"secret {path!r} of provider {provider!r}"


def _value(where: str, key: str, secret: Secret) -> str:
    """Returns one field of a secret, or the whole. Messages name fields, never their values."""
    if isinstance(secret, str):
        if not key:
            return secret
        try:
            fields = orjson.loads(secret)
        except orjson.JSONDecodeError:
            fields = None
        if not isinstance(fields, dict):
            raise CredentialError(f"{where} is no JSON object, so it has no key {key!r}; leave 'key' out")
    else:
        fields = secret
    listed = ", ".join(sorted(fields)) or "none"
    if not key:
        raise CredentialError(f"{where} has several values; name one of them with 'key': {listed}")
    value = fields.get(key)
    if value is None:
        raise CredentialError(f"{where} has no key {key!r}; it has {listed}")
    return value if isinstance(value, str) else orjson.dumps(value).decode()
