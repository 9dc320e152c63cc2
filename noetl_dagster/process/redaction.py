"""Hides secret values in texts: errors, events, log lines, and metadata for Dagster.

A process remembers the secrets that it has read. :data:`SECRETS` replaces them by ``***``, in the forms in which they
usually appear: as they are, quoted, and encoded for JSON, for an address, or in base64. A part of a secret is not
recognised, so redact a text before you shorten it; :meth:`Redactor.beginning` does both.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Any
from urllib.parse import quote, quote_plus, unquote, urlsplit

import orjson
from pydantic import SecretStr

from noetl_dagster.setting_types import separate_addresses
from noetl_dagster.settings import Settings

MASK = "***"

SHORTEST = 4
"""Shorter values are not hidden: they would hide parts of ordinary words."""

SHORTEST_NUMBER = 6
"""Shorter numbers are not hidden: they would hide ports, years and counts."""

MOST = 500
"""Values that a process remembers at most; a new one replaces the one that was used least recently."""

LONGEST = 8 * 1024
"""Characters of a secret that the end of a shortened text may divide, at most."""

LOOKED_AT = 64 * 1024
"""Bytes of a result in which secrets are looked for."""

MOST_TEXTS = 10_000
"""Texts of a result among which the fields with a secret are looked for, once it is known to contain one."""

_PLAIN = (list.__iter__, tuple.__iter__)
"""How sequences of values iterate. Records of Dagster, which are tuples too, refuse to."""

TRIVIAL = re.compile(
    r"admin|administrator|anonymous|basic|bearer|changeme|default|disabled|embedded|enabled|false|guest|localhost|"
    r"minio|minioadmin|none|noetl|null|password|postgres|postgresql|public|root|secret|test|token|true|user|"
    r"username",
    re.IGNORECASE,
)
"""Values that are no secrets, whatever they are called."""

PUBLIC = re.compile(
    r"(?:db_|nats_)?(?:"
    r"accept|accept_encoding|account|account_id|algorithm|audience|auth_method|auth_style|bucket|client_auth|"
    r"client_email|client_id|connection_string|content_type|database|dataset|dbname|domain|dsn|endpoint|expires|"
    r"expires_at|expires_in|expires_on|grant|grant_type|header|host|hostname|in|issued_at|issued_token_type|issuer|"
    r"keyfile|kid|location|login|method|name|param|parameter|path|port|private_key_id|project|project_id|protocol|"
    r"query_param|region|resource|role|schema|scheme|scopes?|servers?|service|sslmode|ssl|sub|subject|table|"
    r"target_audience|timeout|token_endpoint|token_endpoint_auth_method|token_type|type|universe_domain|uri|url|user|"
    r"user_agent|user_id|username|version|warehouse"
    r")|(?!.*(?:hook|sas|signed)).*_(?:file|host|name|path|port|uri|url)",
    re.IGNORECASE,
)
"""Fields of credentials and tokens whose values are no secrets. Passwords in addresses are, in any field."""

_LINE = 8  # characters of a line of a secret with several lines, at least
_SETTING = 16  # characters of a secret in the JSON of a setting, at least
_SECRET_NAME = r"pass(?:word|wd|phrase)?|pwd|secret|token|key|sig(?:nature)?|credential"
_ASSIGNED = re.compile(rf"[\w-]*(?:{_SECRET_NAME})\s*=\s*'?([^;&\s']+)", re.IGNORECASE)
_SCHEME = re.compile(r"(?:bearer|basic|token|apikey|key)\s+(\S+)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A value that is hidden.

    Attributes:
        forms: the texts that are masked.
        looked_for: the texts that are looked for in results.
    """

    forms: tuple[str, ...]
    looked_for: tuple[str, ...]

    @classmethod
    def of(cls, value: str) -> _Hidden:
        parts = dict.fromkeys(parts_of(value))
        return cls(
            tuple({form for part in parts for form in _forms_of(part)}),
            tuple({*parts, *(orjson.dumps(part).decode()[1:-1] for part in parts)}),
        )


class Redactor:
    """Remembers secret values, and replaces them by ``***`` in texts."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._own: dict[str, _Hidden] = {}
        self._given: dict[str, _Hidden] = {}
        self._all: tuple[_Hidden, ...] = ()  # copies, which other threads may iterate over
        self._all_given: tuple[_Hidden, ...] = ()

    def hide(self, *values: str) -> None:
        """Hides values that an execution is given from now on, with the parts of compound ones."""
        values_by_text, is_new = self._given, False
        with self._lock:
            for value in values:
                hidden = values_by_text.pop(value, None)
                is_new = is_new or hidden is None
                values_by_text[value] = hidden or _Hidden.of(value)  # the last is the most recent
            if is_new:
                while len(values_by_text) > MOST:
                    del values_by_text[next(iter(values_by_text))]
                self._copy()
        if is_new:
            _install()

    def hide_settings(self, settings: Settings) -> None:
        """Hides the secrets of a process: values that its settings declare secret, and passwords in addresses."""
        secrets: set[str] = set()
        for name, field in type(settings).model_fields.items():
            value = getattr(settings, name)
            if isinstance(value, SecretStr) and value != field.default:
                secrets |= _secrets_of_setting(value.get_secret_value())
            elif isinstance(value, str) and "://" in value:
                secrets |= set(_passwords(value))
        if not secrets <= self._own.keys():
            with self._lock:
                self._own |= {value: _Hidden.of(value) for value in secrets}
                self._copy()
            _install()

    def forget(self) -> None:
        """Forgets all values."""
        with self._lock:
            self._own.clear()
            self._given.clear()
            self._copy()

    def _copy(self) -> None:
        self._all_given = tuple(self._given.values())
        self._all = (*self._own.values(), *self._all_given)

    def redact(self, text: str) -> str:
        """Returns the text with every known secret replaced by ``***``."""
        spans: list[tuple[int, int]] | None = None
        for hidden in self._all:
            for form in hidden.forms:
                if form in text:
                    spans = [] if spans is None else spans
                    spans += _spans(text, form)
        return text if spans is None else _masked(text, spans)

    def beginning(self, text: str, limit: int) -> str:
        """Returns at most ``limit`` characters of a text; a secret that this divides is masked as a whole."""
        return self.redact(text[: limit + LONGEST])[:limit]

    def redact_bytes(self, content: bytes) -> bytes:
        """Returns :meth:`redact` of encoded text."""
        text = content.decode("utf-8", "surrogateescape")
        redacted = self.redact(text)
        return content if redacted is text else redacted.encode("utf-8", "surrogateescape")

    def redacted(self, value: Any) -> Any:
        """Returns a value of mappings, lists, text and bytes without secrets; itself if it has none."""
        match value:
            case str():
                return self.redact(value)
            case bytes():
                return self.redact_bytes(value)
            case Mapping():
                return {self.redacted(key): self.redacted(entry) for key, entry in value.items()}
            case list() | tuple() if type(value).__iter__ in _PLAIN:
                return [self.redacted(entry) for entry in value]
        return value

    def redact_error(self, error: BaseException) -> None:
        """Redacts an exception and those from which it was raised, in place."""
        seen: set[int] = set()
        waiting: list[BaseException | None] = [error]
        while waiting:
            one = waiting.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            waiting += [one.__cause__, one.__context__]
            if isinstance(one, BaseExceptionGroup):
                waiting += one.exceptions
            args = tuple(self.redacted(arg) if isinstance(arg, str | bytes) else arg for arg in one.args)
            if args != one.args:
                one.args = args
            if isinstance(one, OSError) and isinstance(one.filename, str):
                one.filename = self.redact(one.filename)
            for name, value in list(vars(one).items()):
                if isinstance(value, str | list | dict) and (redacted := self.redacted(value)) != value:
                    setattr(one, name, redacted)

    @property
    def is_given(self) -> bool:
        """Reports whether an execution of this process was given a value."""
        return bool(self._all_given)

    def found_in(self, encoded: bytes | str) -> bool:
        """Reports whether a result contains a secret as it is: in the first :data:`LOOKED_AT` bytes of its JSON."""
        all_given = self._all_given
        if not all_given:
            return False
        text = encoded[:LOOKED_AT]
        if isinstance(text, bytes):
            text = text.decode("utf-8", "ignore")
        for hidden in all_given:
            for one in hidden.looked_for:
                if one in text:
                    return True
        return False

    def places_in(self, value: Any, place: str = "data") -> Iterator[str]:
        """Yields the fields of a value that contain a secret, for example ``data.headers.x-key``."""
        for one, text in islice(_texts(value, place), MOST_TEXTS):
            if self.found_in(text):
                yield self.redact(one)


SECRETS = Redactor()
"""The redactor of this process."""


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yields the texts in a value, each with its place."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _texts(entry, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _texts(entry, f"{place}[{index}]")
    elif isinstance(value, str):
        yield place, value


def named_secrets(fields: Mapping[str, Any]) -> list[str]:
    """Returns the secret values of fields at any depth: all but those of :data:`PUBLIC` names, and trivial ones.

    A user and a password are also a secret together, which the header of HTTP's basic authentication encodes.
    """
    users = {str(fields[name]) for name in ("user", "username", "login", "client_id") if name in fields}
    passwords = [str(fields[name]) for name in ("password", "client_secret") if fields.get(name)]
    pairs = [f"{user}:{password}" for user in users for password in passwords]
    return [*(value for value in _named_values(fields) if value not in users), *pairs]


def _named_values(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        is_public = PUBLIC.fullmatch(str(name).replace("-", "_")) is not None
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Mapping):
                yield from _named_values(one)
            elif isinstance(one, str | int | float) and not isinstance(one, bool):
                text = str(one)
                if not is_public:
                    yield text
                else:
                    yield from _passwords(text)


def _secrets_of_setting(value: str) -> set[str]:
    """Returns the secrets of a setting; of JSON such as the tokens of the API the long keys and values."""
    secrets: set[str] = set()
    try:
        waiting = [orjson.loads(value)]
    except orjson.JSONDecodeError:
        return {value}
    while waiting:
        match waiting.pop():
            case dict() as fields:
                waiting += [*fields, *fields.values()]
            case list() as entries:
                waiting += entries
            case str() as text if len(text) >= _SETTING:
                secrets.add(text)
            case int() | float():
                secrets.add(value)
    return secrets


def parts_of(value: str) -> Iterator[str]:
    """Yields a secret and the parts of it that are secrets: lines, passwords in addresses, fields of JSON."""
    text = value.strip()
    if not _is_secret(text):
        return
    yield text
    if "\n" in text:
        for line in map(str.strip, text.splitlines()):
            if len(line) >= _LINE and not line.startswith("-----"):
                yield line
    if "://" in text:
        yield from filter(_is_secret, _passwords(text))
    elif "=" in text:
        yield from filter(_is_secret, _ASSIGNED.findall(text))
    if text.startswith("{"):
        try:
            fields = orjson.loads(text)
        except orjson.JSONDecodeError:
            return
        for one in named_secrets(fields):
            yield from parts_of(one)
    elif (scheme := _SCHEME.match(text)) is not None:
        yield from filter(_is_secret, (scheme[1], *_passwords_of_pair(scheme[1])))
    elif text.count(":") == 1 and "/" not in text:
        yield from filter(_is_secret, [text.partition(":")[2]])


def _passwords_of_pair(encoded: str) -> list[str]:
    """Returns the password of the base64 of ``user:password``."""
    try:
        pair = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return []
    return [pair.partition(":")[2]]


def _passwords(url: str) -> list[str]:
    """Returns the passwords in addresses or a connection string, and its parameters with the name of a secret."""
    passwords = [value for encoded in _ASSIGNED.findall(url) for value in (encoded, unquote(encoded))]
    for address in separate_addresses(url):
        with suppress(ValueError):
            parts = urlsplit(address)
            if parts.password and parts.password != parts.username:  # not a default such as postgres:postgres
                passwords += [parts.password, unquote(parts.password)]
    return passwords


def _is_secret(value: str) -> bool:
    least = SHORTEST_NUMBER if value.isdigit() else SHORTEST
    return len(value) >= least and TRIVIAL.fullmatch(value) is None and value.strip("*") != ""


_FORMS: tuple[Callable[[str], Iterable[str]], ...] = (
    lambda value: (orjson.dumps(value).decode()[1:-1], json.dumps(value)[1:-1], ascii(value)[1:-1], repr(value)[1:-1]),
    lambda value: (ascii(value.encode())[2:-1], value.replace("'", "''"), html.escape(value)),
    lambda value: (quote(value, safe=""), quote(value), quote_plus(value), quote(value, safe="!$'()*+,:;=@/")),
)
_PERCENT = re.compile(r"%[0-9A-F]{2}")


def _forms_of(value: str) -> Iterator[str]:
    """Yields the texts that are masked for a secret."""
    forms = {value, *(form for forms in _FORMS for form in forms(value))}
    yield from forms
    yield from (_PERCENT.sub(lambda match: match[0].lower(), form) for form in forms if "%" in form)
    encoded = base64.b64encode(value.encode()).decode().rstrip("=")
    yield from (encoded, encoded.replace("+", "-").replace("/", "_"))


def _spans(text: str, form: str) -> Iterator[tuple[int, int]]:
    """Yields where a form of a secret is in a text."""
    at = text.find(form)
    while at >= 0:
        yield at, at + len(form)
        at = text.find(form, at + 1)


def _masked(text: str, spans: list[tuple[int, int]]) -> str:
    spans.sort()
    pieces, position = [], 0
    for start, end in spans:
        if start >= position:
            pieces += [text[position:start], MASK]
        position = max(position, end)
    return "".join([*pieces, text[position:]])


class _RedactingFactory:
    """Makes records of the log whose message and exception contain no known secret, whatever handles them."""

    def __init__(self, made: Callable[..., logging.LogRecord]) -> None:
        self._made = made

    def __call__(self, *args: Any, **named: Any) -> logging.LogRecord:
        record = self._made(*args, **named)
        if record.exc_info and record.exc_info[1] is not None:
            SECRETS.redact_error(record.exc_info[1])
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # the arguments do not fit the message, which its handler reports
            return record
        shown = SECRETS.redact(message)
        if shown != message:
            if isinstance(record.args, tuple):  # some formatters read them
                record.args = tuple(SECRETS.redacted(one) for one in record.args)
            if SECRETS.redact(record.getMessage()) != record.getMessage():
                record.msg, record.args = shown, ()
        return record


def _install() -> None:
    """Redacts the records of every logger of this process: also those of Dagster and of libraries."""
    factory = logging.getLogRecordFactory()
    if not isinstance(factory, _RedactingFactory):
        logging.setLogRecordFactory(_RedactingFactory(factory))
