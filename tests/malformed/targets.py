"""Functions that take bytes from outside, and damaged inputs for them. Each returns, or raises what it documents."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pyarrow as pa

from noetl_dagster.errors import EventRefusedError, FormatError, TemplateError
from noetl_dagster.events.transport.http import AnswerError, ApiResponse
from noetl_dagster.events.transport.wire import EventLimits, decode_message, message_of
from noetl_dagster.playbook.loader import parse_playbook, parse_report
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.playbook.templates.rendering import compile_value
from noetl_dagster.storage import codec
from noetl_dagster.storage.compression import Compression, compress
from noetl_dagster.worker.context import Batch
from tests.events.transport.conftest import ended
from tests.playbook.playbooks import HEAD

ROOT = Path(__file__).parents[2]

SCALARS = (
    *("null", "~", "true", "on", "yes", "017", "0x1F", "0o17", "1:30", "1:30:00", "1_000", "-0", "+1", ".5", "1e400"),
    *("-1e400", ".inf", "-.inf", ".nan", "1e-400", "9" * 30, "9" * 390, "0x" + "f" * 300, "-" + "9" * 350, "2024-02-30"),
    *("2026-01-01T00:00:00Z", "24:00", "!!binary aGk=", "!!binary é", "!!set {a}", "!!omap [a: 1]", "!!str 1", "!!int x"),
    *("!!float x", "!!bool x", "!!null x", "!!map x", "!!seq x", "!!python/object:os.system x", "!x y", "*a", "&a x", "<<"),
    *('"\\0"', '"\\ud800"', '"\\U0010ffff"', "'{{ a }}'", "'{{ a'", "'{% if %}'", "'{# x'", "[]", "{}", "[[[]]]", "{a: {b: 1}}"),
    *("''", "'\u202e'", "'@'", "'s3://b/../..'", "'${x}'", "'a\\\\b'", "-1", "0", "1", "5s", "'1e9d'", "999999999999d", "P1D"),
    *("'* * * * *'", "'0 0 31 2 *'", "'*/0 * * * *'", "'99 99 * * *'", "Europe/Nowhere", "a/b/c", "a.b.c", "@latest"),
)  # fmt: skip
ATOMS = (
    *("1", "0", "-1", "1.5", "'x'", "a", "workload", "workload.n", "workload.rows", "ctx.x", "none", "true", "[]", "{}", "()"),
    *("range(9)", "'%s'", "'{}'", "'%9999999999d'", "99999999999", "1e308", "'\\\\'", "loop", "dict()", "namespace(x=1)"),
    *("cycler(1, 2)", "joiner(',')", "self", "caller", "varargs", "_", "''.format", "[1, 2, 3]", "{'a': 1}"),
)  # fmt: skip
FOREIGN = (
    *("{{.Names}}", "{{json .}}", "{{range .x}}", "{{end}}", "{{`", "{{", "}}", "{%", "%}", "{#", "#}", "${#a}", "{%s}", "'"),
    *("{% raw %}", "{% endraw %}", "{{1,2},{3,4}}", "{", "}", '"', " ", "\n"),
)  # fmt: skip
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "not in", "and", "or", "is", "|", ".")
FILTERS = (
    *("abs", "batch(3)", "batch(9999999999, 'x')", "capitalize", "center(99999999999)", "count", "default(1)", "dictsort"),
    *("e", "filesizeformat", "first", "float", "format(1)", "groupby('a')", "indent(999999999)", "int", "int(base=99)"),
    *("items", "join('x')", "last", "list", "lower", "map('upper')", "map(attribute='a')", "max", "min", "pprint", "random"),
    *("reject", "replace('', 'xx')", "reverse", "round(99999)", "round(-99999)", "safe", "select", "slice(999999999)", "sort"),
    *("string", "striptags", "sum", "sum(start=[])", "title", "tojson", "tojson(indent=9999999)", "trim", "truncate(-5)"),
    *("unique", "upper", "urlencode", "urlize", "wordcount", "wordwrap(1)", "wordwrap(0)", "wordwrap(-1)", "xmlattr"),
    *("from_json", "b64encode", "b64decode", "sql_literal", "sql_list", "sql_identifier", "shell_quote", "path_part", "attr('x')"),
)  # fmt: skip
LONGEST = 20_000

CONTENT_TYPES = (codec.JSON, codec.JSON_LINES, codec.PARQUET, codec.TEXT, codec.BINARY)
COMPRESSIONS = (*Compression, "zstd")
STORED = HEAD + "workflow: [{step: start, tool: {kind: python, code: result = 1}, next: [end]}, {step: end}]\n"
SCOPE = {"workload": {"n": 3, "rows": [{"a": 1}, {"a": "x"}]}, "a": 2, "ctx": {}, "loop": {"index": 1}}
WORDS = {
    "yaml": [one.encode() for one in (*SCALARS, *FOREIGN)]
    + [b": ", b"\n- ", b"\n  ", b"&a ", b"*a", b"<<: ", b"? ", b"| \n"],
    "jinja": [one.encode() for one in (*ATOMS, *OPERATORS, *FOREIGN, *(f"|{name}" for name in FILTERS))],
    "json": [
        *(b"null", b"true", b"1e400", b"-1", b"9" * 30, b'""', b"[]", b"{}", b",", b":"),
        *(b'"', b"\\u0000", b"\\ud800", b"\n"),
    ],
}


def corpus() -> list[str]:
    """Returns the playbooks of the repository."""
    files = sorted(
        file for folder in ("tests/corpus", "playbooks", "examples") for file in (ROOT / folder).rglob("*.yaml")
    )
    return [file.read_text(encoding="utf-8", errors="replace") for file in files]


@dataclass(frozen=True)
class Target:
    """A function that takes bytes from outside.

    Attributes:
        run: calls it.
        documented: the errors that it may raise.
        seeds: valid inputs.
        words: what its inputs consist of.
    """

    run: Callable[[bytes], object]
    documented: tuple[type[Exception], ...]
    seeds: Callable[[], list[bytes]]
    words: str = "json"


def _decode(data: bytes) -> object:
    head, content = (data[:2] or b"\0\0").ljust(2, b"\0"), data[2:]
    return codec.decode(content, CONTENT_TYPES[head[0] % len(CONTENT_TYPES)], COMPRESSIONS[head[1] % len(COMPRESSIONS)])


def _encoded() -> list[bytes]:
    table = bytes(codec.table_to_parquet(pa.table({"a": [1, 2], "b": ["x", None]})))
    plain = (b'{"a": [1, 2.5, {"b": "x"}]}', b'{"a": 1}\n{"a": 2}\n', table, "\u00e9".encode(), b"\0\1")
    return [
        bytes((kind, how)) + bytes(compress(data, compression))
        for kind, data in enumerate(plain)
        for how, compression in enumerate(Compression)
    ]


def _load(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape" if data[:1] == b"#" else "replace")
    playbook, problems = parse_report(text, code=True)
    assert (playbook is None) == any(problem.severity == "error" for problem in problems)
    assert all(problem.place.line >= 1 for problem in problems)


def _stored(data: bytes) -> object:
    return Playbook.from_stored(data.decode("utf-8", "replace"), STORED, file="x.yaml", renamed={})


def _messages() -> list[bytes]:
    event = orjson.dumps(message_of(ended(7, 0)))
    return [event, b'{"events": [' + event + b"]}"]


def _batches() -> list[bytes]:
    return [b'{"lease_seconds": 30, "groups": [], "states": {}}']


TARGETS = {
    "loader": Target(_load, (), lambda: [one.encode() for one in corpus()], "yaml"),
    "templates": Target(
        lambda data: compile_value(data.decode("utf-8", "replace")).render(SCOPE),
        (TemplateError,),
        lambda: [
            b"{{ a }}",
            b"{{ workload.rows | map(attribute='a') | list }}",
            b"{% for x in [1] %}{{ x }}{% endfor %}",
        ],
        "jinja",
    ),
    "codec": Target(_decode, (FormatError,), _encoded),
    "events": Target(
        lambda data: decode_message(data, datetime.now(UTC), EventLimits()), (EventRefusedError,), _messages
    ),
    "answers": Target(lambda data: ApiResponse(200, data, "http://api").read(Batch), (AnswerError,), _batches),
    "stored playbooks": Target(_stored, (ValueError,), lambda: [(parse_playbook(STORED).stored or "").encode()]),
}


def damaged(dice: random.Random, inputs: list[bytes], words: list[bytes]) -> bytes:
    """Returns one of the inputs with some changes."""
    data = bytearray(dice.choice(inputs))
    for _ in range(dice.choice((1, 1, 2, 4, 8))):
        at = dice.randrange(len(data) + 1)
        end = min(len(data), at + dice.choice((1, 2, 8, 64)))
        match dice.randrange(8):
            case 0 if at < len(data):
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end] * dice.choice((1, 2, 100))
            case 3:
                data[at:end] = dice.randbytes(end - at)
            case 4:
                other = dice.choice(inputs)
                start = dice.randrange(len(other) + 1)
                data[at:] = other[start:]
            case 5:
                del data[dice.randrange(len(data) + 1) :]
            case _:
                data[at : dice.choice((at, end))] = dice.choice(words)
    return bytes(data[:LONGEST])
