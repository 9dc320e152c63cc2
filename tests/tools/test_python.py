"""The python tool: arguments, results, errors with lines, threads and subprocesses."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from noetl_dagster.errors import Place, ToolError, UndefinedNameError
from noetl_dagster.playbook.models import Task
from noetl_dagster.playbook.templates.views import ReferenceCache, ResultView
from noetl_dagster.tools.base import ToolContext
from tests.waiting import ended as process_ended
from tests.waiting import until

ADD = "def main(a, b=2, *, c, **rest):\n    return {'sum': a + b + c, 'rest': rest}"


@pytest.mark.parametrize(
    ("code", "given", "data"),
    [
        (
            ADD,
            {"input": {"a": 1, "z": "[1, 2]"}, "scope": {"c": 5, "z": 9, "other": 0}},
            {"sum": 8, "rest": {"z": "[1, 2]"}},
        ),
        ("result = [x * 2 for x in range(n)]", {"input": {"n": 3}}, [0, 2, 4]),
        (
            "async def main(n):\n    await aio.sleep(0)\n    return math.sqrt(n)",
            {"libs": ["math", "asyncio as aio"], "input": {"n": 9}},
            3.0,
        ),
        (
            "def main(context, input_data):\n    return [context['workload'], sorted(input_data)]",
            {"input": {"b": 1, "a": 2}, "scope": {"workload": {"w": 1}}},
            [{"w": 1}, ["a", "b"]],
        ),
        ("import pyarrow\nreturn pyarrow.array([n]).to_pylist()", {"input": {"n": 1}}, [1]),
    ],
)
async def test_code_and_its_result(run: Any, code: str, given: dict[str, Any], data: Any) -> None:
    assert (await run("python", code=code, **given)).data == data


async def test_code_without_a_result_has_a_note(run: Any) -> None:
    assert "neither main nor result" in (await run("python", code="x = 1")).data["note"]


@pytest.mark.parametrize(
    ("code", "options", "message"),
    [
        ("def main(q): pass", {}, r"main needs 'q'.*input \(a\)"),
        ("result = {'x': object()}", {}, r"result\.x is of type builtins\.object"),
        ("context['a'] = 1", {}, "does not support item assignment"),
        ("n = 0\nif n == 0:\n    return 1 / n\n", {}, r"ZeroDivisionError: .*line 3\)"),
        ("x = bytearray(2 * 1024**3)\nresult = len(x)", {"memory": "1g"}, "MemoryError"),
        ("import os; os.kill(os.getpid(), 9)", {}, "was killed by signal 9"),
        ("import os; os._exit(3)", {}, "ended with exit code 3"),
    ],
)
async def test_errors_say_what_is_wrong(run: Any, code: str, options: dict[str, Any], message: str) -> None:
    if options or "import os" in code:
        options = {"isolation": "subprocess", **options}
    with pytest.raises(ToolError, match=message):
        await run("python", code=code, input={"a": 1}, options=options)


async def test_context_fetches_results_by_reference(run: Any, box: ToolContext) -> None:
    rows = [{"id": number} for number in range(100)]
    reference = await box.results.put(rows, execution_id=7001, step="load", name="rows")
    gone = reference.model_copy(update={"ref": "noetl://gone", "physical_uri": "pvc://gone"})
    scope = {
        name: ResultView({"status": "ok", "ref": ref}, ReferenceCache())
        for name, ref in (("load", reference), ("gone", gone))
    }

    assert (await run("python", code="def main(load):\n    return len(load)", scope=scope)).data == 100
    assert (await run("python", code="result = context['load']['data']", scope=scope)).data == rows


ISOLATIONS = pytest.mark.parametrize("isolation", ["thread", "subprocess"])


def made(data: Any, **more: Any) -> ResultView:
    return ResultView({"status": "ok", "data": data, **more}, ReferenceCache())


@ISOLATIONS
async def test_top_level_code_sees_context_and_execution_id(run: Any, isolation: str) -> None:
    code = "result = [context['workload']['w'], sorted(input_data), execution_id]"
    scope = {"workload": {"w": 1}, "execution_id": "7"}

    result = await run("python", code=code, input={"b": 1}, scope=scope, options={"isolation": isolation})

    assert result.data == [1, ["b"], "7"]


@ISOLATIONS
async def test_context_has_results_with_their_data_inside(run: Any, isolation: str) -> None:
    code = textwrap.dedent("""
        page, rows = context["fetch"], context.get("load", {})
        result = [page["data"]["status_code"], page["data"]["items"], page["items"], page["status"], "items" in page,
                  page.get("else", 0), rows["data"], context.get("nothing", {}).get("data")]
    """)
    scope = {"fetch": made({"status_code": 200, "data": {"items": [1]}}), "load": made([5])}

    result = await run("python", code=code, scope=scope, options={"isolation": isolation})

    assert result.data == [200, [1], [1], "ok", True, 0, [5], None]


@ISOLATIONS
async def test_return_at_the_top_level_is_the_result(run: Any, isolation: str) -> None:
    code = textwrap.dedent("""
        def double(n):
            return 2 * n
        if n > 2:
            return {"n": double(n)}
        if n == 2:
            return
        result = "small"
    """)
    results = [
        (await run("python", code=code, input={"n": n}, options={"isolation": isolation})).data for n in (1, 2, 3)
    ]

    assert results == ["small", None, {"n": 6}]


@ISOLATIONS
async def test_templates_in_code_are_values(run: Any, isolation: str) -> None:
    code = textwrap.dedent("""
        # {{ comment }}
        result = [{{ rows | length }}, {{ name }}, {{ nothing }} is None, {{ yes }} is True, {{ day }},
                  {"a": {{ rows }}}, "{{ name }}", {{ rows | tojson }}, {{ {"b": nothing} | tojson(indent=2) }}]
    """)
    scope = {"rows": [1, {"b": None}], "name": 'O\'Hara "x"\n', "nothing": None, "yes": True}
    scope |= {"day": dt.date(2026, 1, 2)}

    result = await run("python", code=code, scope=scope, options={"isolation": isolation})

    name = scope["name"]
    assert result.data == [
        2,
        name,
        True,
        True,
        "2026-01-02",
        {"a": scope["rows"]},
        "{{ name }}",
        scope["rows"],
        {"b": None},
    ]


async def test_templates_of_a_call_are_its_own(run: Any) -> None:
    code = "rows = {{ rows }}\nrows.append(4)\nresult = rows"
    scope = {"rows": [1]}

    first, second = [(await run("python", code=code, scope=scope)).data for _ in range(2)]

    assert first == second == [1, 4]
    assert scope == {"rows": [1]}


async def test_unknown_name_in_code_fails_as_a_template(run: Any) -> None:
    with pytest.raises(UndefinedNameError, match=r"'rosw' is undefined; known names: rows.*, line 2\)"):
        await run("python", code="rows = 1\nresult = {{ rosw }}", scope={"rows": [1]})


@pytest.mark.parametrize(
    ("libs", "names"),
    [
        (["json", "os.path"], "json.dumps, os.path.join"),
        ({"j": "json", "np": "numpy"}, "j.dumps, np.int64"),
        ([{"np": "numpy"}, "math as m"], "np.int64, m.sqrt"),
        ({"now": {"from": "datetime", "import": "datetime"}}, "now.now"),
        ([{"from": "datetime", "import": ["date", "time"]}], "date.today, time.min"),
        (["PyYAML>=6", "python-dateutil"], "yaml.safe_load, dateutil.parser"),
        ({"parser": {"from": "dateutil", "import": "parser"}}, "parser.parse"),
        ("json", "json.dumps"),
        ("", "len"),
    ],
)
async def test_libs(run: Any, libs: Any, names: str) -> None:
    code = f"found = ({names},)\nresult = len(found)"

    assert (await run("python", code=code, libs=libs)).data == names.count(",") + 1


@pytest.mark.parametrize(
    ("libs", "remedy"),
    [
        (["sklearn.cluster"], "no module 'sklearn.cluster'; install the distribution 'scikit-learn'"),
        (["nowhere_to_be_found"], "install the distribution 'nowhere_to_be_found'"),
        ({"a": {"from": "math", "import": "cube"}}, "math.cube"),
    ],
)
async def test_missing_libs_say_what_to_install(run: Any, libs: Any, remedy: str) -> None:
    with pytest.raises(ToolError, match="ModuleNotFoundError") as caught:
        await run("python", code="result = 1", libs=libs)

    assert remedy in str(caught.value)


async def test_values_become_json(run: Any) -> None:
    code = textwrap.dedent("""
        import dataclasses, datetime, decimal, uuid
        import numpy as np
        @dataclasses.dataclass
        class Point:
            x: int
        result = {
            "set": {3, 1, 2}, "tuple": (1, 2), "when": datetime.datetime(2026, 1, 2), 1: "one",
            "exact": decimal.Decimal("10.5"), "array": np.arange(3), "scalar": np.float64(1.5),
            "nan": float("nan"), "point": Point(1), "id": uuid.UUID(int=1), "bytes": b"ab",
        }
    """)

    assert (await run("python", code=code)).data == {
        "set": [1, 2, 3], "tuple": [1, 2], "when": "2026-01-02T00:00:00", "1": "one", "exact": "10.5",
        "array": [0, 1, 2], "scalar": 1.5, "nan": None, "point": {"x": 1},
        "id": "00000000-0000-0000-0000-000000000001", "bytes": "YWI=",
    }  # fmt: skip


async def test_tables_are_arrow_tables(run: Any) -> None:
    frame = await run("python", code="import pandas\nresult = pandas.DataFrame({'a': [1]})")
    table = await run("python", code="import pyarrow\nresult = pyarrow.table({'a': [1]})")

    assert isinstance(frame.data, pa.Table)
    assert isinstance(table.data, pa.Table)


async def test_error_names_the_line_of_the_playbook(run: Any, tmp_path: Path) -> None:
    playbook = tmp_path / "flow.yaml"
    code = "def main(a):\n    b = 0\n    return a / b\n"
    lines = ["workflow:", "- step: start", "  tool:", "    kind: python", "    code: |"]
    playbook.write_text("\n".join([*lines, textwrap.indent(code, " " * 6)]))
    place = Place(str(playbook), 2)
    task = Task(name="task_0", kind="python", config={"code": code}, place=place)

    with pytest.raises(ToolError, match=rf"ZeroDivisionError.*{playbook.name}:8, in main") as caught:
        await run("python", code=code, input={"a": 1}, task=task)

    assert caught.value.kind == "python"
    assert caught.value.details["py"]["exception_type"] == "ZeroDivisionError"


@pytest.mark.parametrize("isolation", ["thread", "subprocess"])
@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(3)",
        "def main():\n    raise SystemExit(3)",
        "async def main():\n    raise SystemExit(3)",
    ],
)
async def test_code_that_exits_fails_like_any_other(run: Any, code: str, isolation: str) -> None:
    with pytest.raises(ToolError, match=r"SystemExit: 3; code ends with .*line 2") as caught:
        await run("python", code=code, options={"isolation": isolation})

    assert caught.value.details["py"]["exception_type"] == "SystemExit"


async def test_blocking_code_does_not_stop_the_loop(run: Any, tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import pathlib, time
        pathlib.Path(folder, str(n)).touch()
        while not pathlib.Path(folder, "go").exists():
            time.sleep(0.01)
        result = n
    """)
    words = {"folder": str(tmp_path)}

    calls = [asyncio.create_task(run("python", code=code, input={"n": n, **words})) for n in range(8)]
    for n in range(8):
        await until((tmp_path / str(n)).exists)  # all eight block at once, and the loop still turns
    assert not any(call.done() for call in calls)
    (tmp_path / "go").touch()

    assert [result.data for result in await asyncio.gather(*calls)] == list(range(8))


async def test_cancelled_code_is_interrupted(run: Any, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    code = textwrap.dedent(f"""
        import pathlib
        try:
            pathlib.Path({str(begun)!r}).touch()
            while True: abs(1)
        finally:
            pathlib.Path({str(ended)!r}).touch()
    """)

    call = asyncio.create_task(run("python", code=code))
    await until(begun.exists)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    await until(ended.exists)


async def test_printed_text_goes_to_the_log(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "noetl_dagster.tools.python.output"):
        await run("python", code="for n in range(100): print('x' * 10_000)")

    assert sum(len(record.getMessage()) for record in caplog.records) < 70_000
    assert "the rest is left out" in caplog.text


async def test_script_file(run: Any, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("def main(n):\n    return n + 1")

    result = await run("python", script={"uri": "job.py", "source": {"type": "file"}}, input={"n": 1})

    assert result.data == 2


async def test_subprocess_gives_values_tables_and_errors(run: Any) -> None:
    options = {"isolation": "subprocess"}
    when = dt.date(2026, 1, 2)

    value = await run("python", code=ADD, input={"a": 1}, scope={"c": when.day, "big": object}, options=options)
    table = await run("python", code="import pyarrow\nresult = pyarrow.table({'a': [1]})", options=options)
    with pytest.raises(ToolError, match=r"KeyError.*line 2") as caught:
        await run("python", code="x = {}\nx['y']", options=options)

    assert value.data == {"sum": 5, "rest": {}}
    assert table.data.to_pydict() == {"a": [1]}
    assert caught.value.details["py"]["line"] == 2


async def test_a_subprocess_is_given_context_where_code_reads_it(run: Any) -> None:
    """Tables have no form in JSON: they are left out of it, and where nothing reads it nothing is fetched."""
    scope = {"n": 5, "frame": pd.DataFrame({"a": [1]})}
    options = {"isolation": "subprocess"}
    code = "import contextlib  # no context\nresult = 1"
    assert (await run("python", code=code, scope=scope, options=options)).data == 1
    code = "result = [context['n'], 'frame' in context]"
    assert (await run("python", code=code, scope=scope, options=options)).data == [5, False]


async def test_cancelled_subprocess_is_killed(run: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = "import os, time\nwith open(path, 'w') as file: file.write(f'{os.getpid()}\\n')\ntime.sleep(600)"

    call = asyncio.create_task(
        run("python", code=code, input={"path": str(begun)}, options={"isolation": "subprocess"})
    )
    pid = int(await until(lambda: begun.exists() and begun.read_text()))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    await until(lambda: process_ended(pid))
