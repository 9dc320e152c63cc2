"""The kinds of values of ``docs/reference/values.md``: how one of each is drawn, and what the table says of it.

Playbook code imports :func:`drawn`, so that each value begins where values of users do.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import math
import random
import string
import uuid
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from pydantic import BaseModel

REFUSED = object()
"""The form of what is refused."""

BIG = 10**16
LETTERS = string.ascii_letters + "äßé中😀 \n'\"\\{}%"


class Drawn(NamedTuple):
    """A value, and its stored form as the table has it."""

    value: Any
    form: Any


class Colour(Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: Any


class Model(BaseModel):
    x: int


def _text(dice: random.Random) -> str:
    return "".join(dice.choices(LETTERS, k=dice.choice((0, 1, 5, 40))))


def _bad_text(dice: random.Random, mark: str) -> Drawn:
    return Drawn(_text(dice) + mark + _text(dice), REFUSED)


def _moment(dice: random.Random) -> dt.datetime:
    zone = dice.choice((None, dt.UTC, dt.timezone(dt.timedelta(minutes=dice.randint(-700, 700)))))
    second = dt.timedelta(microseconds=dice.randrange(200_000 * 86_400 * 10**6))
    return (dt.datetime(1600, 1, 1) + second).replace(tzinfo=zone)


def _integer(dice: random.Random) -> int:
    return dice.choice((0, -1, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, dice.randint(-(10**9), 10**9)))


def _float(dice: random.Random) -> float:
    return dice.choice((0.1, -1.5, 1e-7, 5e-324, 1234567890.123, 1e300, dice.uniform(-1e9, 1e9)))


def _decimal(dice: random.Random) -> Decimal:
    return Decimal(dice.randint(-(10**20), 10**20)).scaleb(-dice.randint(0, 12))


def _nested(dice: random.Random, levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if dice.random() < 0.5 else {"x": value}
    return value


def _numpy_time(dice: random.Random) -> Drawn:
    nanos = dice.randrange(10**18)
    value = np.datetime64(nanos, "ns")
    seconds, rest = divmod(nanos, 10**9)
    return Drawn(value, f"{dt.datetime(1970, 1, 1) + dt.timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}.{rest:09}")


def _duration(dice: random.Random) -> Drawn:
    micros = dice.randrange(-(10**12), 10**12)
    return Drawn(dt.timedelta(microseconds=micros), micros / 10**6)


def _plain(make: Callable[[random.Random], Any]) -> Callable[[random.Random], Drawn]:
    def draw(dice: random.Random) -> Drawn:
        value = make(dice)
        return Drawn(value, value)

    return draw


def _as(make: Callable[[random.Random], Any], form: Callable[[Any], Any]) -> Callable[[random.Random], Drawn]:
    def draw(dice: random.Random) -> Drawn:
        value = make(dice)
        return Drawn(value, form(value))

    return draw


def _one(*values: Any, form: Any) -> Callable[[random.Random], Drawn]:
    return lambda dice: Drawn(dice.choice(values), form)


KINDS: Mapping[str, Callable[[random.Random], Drawn]] = {
    "text": _plain(_text),
    "text with a NUL character": lambda dice: _bad_text(dice, "\0"),
    "text with half of a surrogate pair": lambda dice: _bad_text(dice, chr(dice.randint(0xD800, 0xDFFF))),
    "null, true, false": _plain(lambda dice: dice.choice((None, True, False))),
    "integer of 64 bits": _plain(_integer),
    "integer beyond 64 bits": _one(2**64, -(2**63) - 1, 10**40, form=REFUSED),
    "float": _plain(_float),
    "float with the sign of zero": _one(-0.0, form=0.0),
    "whole float from 1e16 on": _as(lambda dice: float(dice.randint(BIG, 2**62)), int),
    "NaN": _one(math.nan, np.float64("nan"), Decimal("NaN"), form=None),
    "infinity": _one(math.inf, -math.inf, Decimal("Infinity"), np.float32("inf"), form=REFUSED),
    "missing value of pandas or numpy": _one(pd.NaT, pd.NA, np.datetime64("NaT"), np.timedelta64("NaT"), form=None),
    "decimal": _as(_decimal, lambda value: format(value, "f")),
    "bytes": _as(lambda dice: dice.randbytes(dice.randrange(20)), lambda value: base64.b64encode(value).decode()),
    "date, time, moment": _as(
        lambda dice: dice.choice((_moment(dice), _moment(dice).date(), _moment(dice).timetz())), lambda v: v.isoformat()
    ),
    "moment of numpy": _numpy_time,
    "duration": _duration,
    "duration that seconds cannot hold": _one(
        dt.timedelta(days=99_999_999, microseconds=1), np.timedelta64(15, "ns"), pd.Timedelta("1.5ns"), form=REFUSED
    ),
    "UUID, path": _as(lambda dice: dice.choice((uuid.UUID(int=dice.getrandbits(128)), PurePosixPath("a/b"))), str),
    "enum": _one(Colour.RED, form="red"),
    "list": _plain(lambda dice: [_integer(dice) for _ in range(dice.randrange(4))]),
    "tuple": _as(lambda dice: (_text(dice), _float(dice)), list),
    "set": _as(lambda dice: {dice.randrange(100) for _ in range(5)}, sorted),
    "mapping": _plain(lambda dice: {_text(dice): _integer(dice) for _ in range(dice.randrange(6))}),
    "mapping with keys that are no text": _one(
        {1: "a", True + 1: "b", None: "c", 1.5: 0}, form={"1": "a", "2": "b", "null": "c", "1.5": 0}
    ),
    "mapping with two keys of one text": _one({1: "a", "1": "b"}, {True: 1, "true": 2}, form=REFUSED),
    "dataclass, pydantic model": lambda dice: Drawn(dice.choice((Point(3), Model(x=3))), {"x": 3}),
    "exception": _one(ValueError("no"), form="ValueError: no"),
    "range, generator, view": lambda dice: Drawn(
        dice.choice((range(3), (n for n in range(3)), {0: 1, 1: 1, 2: 1}.keys())), [0, 1, 2]
    ),
    "number of numpy": lambda dice: Drawn(*dice.choice(((np.int64(5), 5), (np.float64(1.5), 1.5), (np.True_, True)))),
    "array, column": lambda dice: Drawn(
        dice.choice((np.arange(3), pd.Series([0, 1, 2]), pa.array([0, 1, 2]), pa.chunked_array([[0, 1], [2]]))),
        [0, 1, 2],
    ),
    "nested up to 200 levels": _plain(lambda dice: _nested(dice, dice.randint(1, 190))),
    "nested deeper than 200 levels": lambda dice: Drawn(_nested(dice, dice.randint(201, 400)), REFUSED),
    "any other object": lambda dice: Drawn(dice.choice((object(), 1j, len, np.longdouble(1.1), type)), REFUSED),
}
"""By the names of the table's rows."""


def drawn(seed: int, number: int, *, refused: bool = False) -> Drawn:
    """Returns a value inside lists and mappings, the same for the same seed; ``refused``: one that is not stored."""
    dice = random.Random(seed * 1_000_003 + number)
    while True:
        kind = list(KINDS)[dice.randrange(len(KINDS))]
        value, form = KINDS[kind](dice)
        if (form is REFUSED) == refused:
            break
    for _ in range(dice.randrange(3)):
        if dice.random() < 0.5:
            value, form = [_text(dice)[:3], value], REFUSED if refused else [None, form]
            if not refused:
                form[0] = value[0]
        else:
            key = dice.choice(("z", "name", "éa", ""))
            value, form = {key: value, "aa": 1}, REFUSED if refused else {key: form, "aa": 1}
    return Drawn(value, form)
