"""Tokens of the API: the sender of a request and its permissions. Decides alone whether requests need a token."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pydantic import SecretStr, TypeAdapter, ValidationError

from noetl_dagster.errors import ServiceError
from noetl_dagster.settings import DEFAULT_POOL, POOL_NAME

LONGEST_WORKER_ID = 256


class TokenScope(StrEnum):
    """A permission of a token. Scopes do not include each other."""

    WORKER = "worker"
    OPERATOR = "operator"
    READER = "reader"


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request.

    Attributes:
        workers: the workers as which it may act; None: any of its pools that has no token of its own.
        pools: the pools that it may serve; None: any.
        reserved: workers that have tokens of their own.
    """

    scopes: frozenset[TokenScope]
    workers: frozenset[str] | None = None
    pools: frozenset[str] | None = None
    reserved: frozenset[str] = frozenset()

    @property
    def reads_all(self) -> bool:
        """True if it may read everything, not only what belongs to commands that it holds."""
        return not self.scopes.isdisjoint({TokenScope.READER, TokenScope.OPERATOR})

    def refusal(self, worker_id: str | None, pool: str | None = None) -> str | None:
        """Returns why it may not act as a worker of a pool; None if it may. ``pool`` None: the pool does not matter."""
        if self.workers is not None and worker_id not in self.workers:
            return f"the token is that of worker {_names(self.workers)}, not of {worker_id!r:.300}"
        if self.workers is None and worker_id in self.reserved:
            return f"worker {worker_id!r:.300} has a token of its own"
        if pool is not None and self.pools is not None and pool not in self.pools:
            return f"the token serves pool {_names(self.pools)}, not {pool}"
        return None


LOCAL = Principal(frozenset(TokenScope))
"""Everyone who reaches an API without tokens, which listens on loopback addresses only."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The principals of the tokens, by digest: comparing digests leaks nothing. Without any, requests need none."""

    principals: Mapping[str, Principal]

    @property
    def required(self) -> bool:
        """True if requests need a token; otherwise the API must listen on loopback addresses only."""
        return bool(self.principals)

    def principal(self, token: str | None) -> Principal | None:
        """Returns the sender of a request with a token, or None for an unknown or missing one."""
        if not self.required:
            return LOCAL
        return None if token is None else self.principals.get(digest(token))


def parse_tokens(text: SecretStr | None) -> Tokens:
    """Parses the setting ``NOETL_SERVICE_TOKENS``; raises ``ServiceError``, whose message contains no token."""
    if text is None:
        return Tokens({})
    try:
        scopes_of = TypeAdapter(dict[str, list[str]]).validate_json(text.get_secret_value())
    except ValidationError:
        raise ServiceError(f"NOETL_SERVICE_TOKENS is not JSON {_FORM}") from None
    if not scopes_of:
        raise ServiceError(f"NOETL_SERVICE_TOKENS has no token; write {_FORM}, or unset it for an API without tokens")
    if not all(token.strip() and scopes for token, scopes in scopes_of.items()):
        raise ServiceError(f"NOETL_SERVICE_TOKENS has an empty token or one without scopes; write {_FORM}")
    principals = {digest(token): _principal(scopes) for token, scopes in scopes_of.items()}
    reserved = frozenset[str]().union(*(one.workers or () for one in principals.values()))
    return Tokens({key: Principal(one.scopes, one.workers, one.pools, reserved) for key, one in principals.items()})


def digest(token: str) -> str:
    """Returns the digest under which a token is known."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


_FORM = '{"<token>": ["<scope>", ...]} with scopes of worker:<worker id>, pool:<pool>, operator, reader'


def _principal(scopes: Iterable[str]) -> Principal:
    workers, pools, plain = set[str](), set[str](), set[TokenScope]()
    for scope in scopes:
        kind, _, name = scope.partition(":")
        if kind == "worker" and name and len(name) <= LONGEST_WORKER_ID:
            workers.add(name)
        elif kind == "pool" and re.match(POOL_NAME, name):
            pools.add(name)
        elif scope in (TokenScope.OPERATOR, TokenScope.READER):
            plain.add(TokenScope(scope))
        elif scope == "worker":
            raise ServiceError(
                'NOETL_SERVICE_TOKENS: the scope "worker" does not name its worker; write "pool:default" for all '
                'workers of the pool default, or "worker:<worker id>" for one worker'
            )
        else:
            raise ServiceError(f"NOETL_SERVICE_TOKENS is not JSON {_FORM}")
    if workers or pools:
        plain.add(TokenScope.WORKER)
    if workers and not pools:
        pools.add(DEFAULT_POOL)
    return Principal(frozenset(plain), frozenset(workers) or None, frozenset(pools))


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
