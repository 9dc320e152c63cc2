"""The spark tool: SQL and functions over results of every kind, and results of its own."""

import asyncio
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from noetl_dagster.errors import ToolError
from noetl_dagster.result_ref import RefKind, ResultRef
from noetl_dagster.settings import StoreTier
from noetl_dagster.tools.base import ToolContext
from tests.spark.conftest import Run, put
from tests.waiting import until

pytestmark = pytest.mark.spark

PEOPLE = [{"id": 1, "name": "Ada"}, {"id": 2, "name": "Ben"}]


async def test_sql_reads_references_rows_and_files_as_views(run: Run, box: ToolContext, tmp_path: Path) -> None:
    people = await put(box, PEOPLE, "people", StoreTier.MINIO)
    (tmp_path / "towns.csv").write_text("id,town\n1,Oslo\n2,Rome\n")
    result = await run(
        command="""
            SELECT name, town, amount
            FROM people JOIN towns USING (id) JOIN sums USING (id)
            WHERE id > :low
        """,
        params={"low": 1},
        input={
            "people": people.model_dump(mode="json"),
            "sums": [{"id": 1, "amount": 2.5}, {"id": 2, "amount": 4}],
            "towns": {"path": "towns.csv", "options": {"header": True, "inferSchema": True}},
        },
        collect=True,
    )
    assert result.data["rows"] == [{"name": "Ben", "town": "Rome", "amount": 4.0}]
    assert result.data["columns"] == ["name", "town", "amount"]


async def test_semicolons_in_sparks_own_quotes_do_not_end_a_statement(run: Run) -> None:
    command = r"""
        CREATE OR REPLACE TEMP VIEW quoted AS SELECT 'it\'s; ok' AS `a;b`, "say \"x;\"" AS said;
        SELECT `a;b` AS text, said FROM quoted; -- the end;
    """
    result = await run(command=command, collect=True)
    assert result.data["rows"] == [{"text": "it's; ok", "said": 'say "x;"'}]


async def test_a_compound_statement_is_one_statement(run: Run) -> None:
    command = "BEGIN DECLARE n INT DEFAULT 1; SET n = n + 1; SELECT n; END"
    result = await run(command=command, collect=True)
    assert result.data["rows"] == [{"n": 2}]


async def test_a_function_gets_each_manifest_as_one_frame(run: Run, box: ToolContext, tmp_path: Path) -> None:
    parts = [
        await put(box, [{"n": 1}, {"n": 2}], "part-0", StoreTier.MINIO),
        await put(box, [{"n": 3}], "part-1", StoreTier.PVC),
        await put(box, [{"n": 4}], "part-2", StoreTier.DB),
    ]
    manifest = await box.results.manifest(1, "made", "pages", parts)
    (tmp_path / "flow.py").write_text(
        textwrap.dedent(
            """
            from pyspark.sql import functions as F

            def twice(n):
                return n * 2

            def total(spark, pages, factor):
                double = F.udf(twice, "int")
                numbers = pages.select(double(F.from_json("value", "n INT")["n"]).alias("n"))
                return {"total": numbers.agg(F.sum("n")).first()[0] * factor, "columns": pages.columns}
            """
        )
    )
    result = await run(function="flow.py:total", input={"pages": manifest, "factor": 10})
    assert result.data == {"total": 200, "columns": ["value"]}


async def test_tables_keep_their_types(run: Run, box: ToolContext) -> None:
    at = pa.array([0, 1_000], pa.timestamp("ns"))
    table = pa.table({"n": pa.array([1, 2], pa.int32()), "at": at})
    ref = await put(box, table, "table", StoreTier.MINIO)
    result = await run(code="result = dict(rows.dtypes)", input={"rows": ref})
    assert result.data == {"n": "int", "at": "timestamp_ntz"}
    assert '"at":"1970-01-01T00:00:00"' in (ref.preview or "")


async def test_a_mapping_of_frames_becomes_a_mapping_of_references(run: Run) -> None:
    result = await run(
        code="""
def main(spark, top):
    return {"odd": spark.range(1, 10, 2), "even": spark.range(0, top, 2), "top": top}
""",
        input={"top": 10},
    )
    assert result.data["top"] == 10
    even = ResultRef.model_validate(result.data["even"])
    assert (even.kind, even.rows, even.store_tier) == (RefKind.DATASET, 5, StoreTier.PVC)
    back = await run(command="SELECT sum(id) AS s FROM odd", input={"odd": result.data["odd"]}, collect=True)
    assert back.data["rows"] == [{"s": 25}]


async def test_code_sees_context_and_values_of_templates(run: Run) -> None:
    code = "return spark.range({{ least }}, context['workload']['most']).count()"

    result = await run(code=code, scope={"least": 3, "workload": {"most": 10}})

    assert result.data == 7


async def test_a_script_is_code_in_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text("def main(spark, most):\n    return spark.range(most).count()\n")

    result = await run(script="count.py", input={"most": 4})

    assert result.data == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"command": "SELECT nme FROM people"}, ["UNRESOLVED_COLUMN", "nme", "`name`"]),
        ({"command": "SELECT * FROM nowhere"}, ["TABLE_OR_VIEW_NOT_FOUND"]),
        ({"command": "SELEC 1"}, ["PARSE_SYNTAX_ERROR", "SELEC"]),
        ({"code": "def main(spark)\n    return 1"}, ["line 1 of the code"]),
        ({"code": "def main(spark):\n    x = 1\n    return missing"}, ["NameError", "missing", "line 3"]),
        ({"function": "nowhere.py:go"}, ["script 'nowhere.py' of step", "is not there"]),
        ({"code": "result = spark.range(5)", "collect": True, "max_rows": 3}, ["more than 3 rows"]),
        (
            {"code": "result = 1", "command": "SELECT 1"},
            ["one of sql, function, code and script", "command and code"],
        ),
        ({"code": "result = object()"}, ["no stored form"]),
    ],
)
async def test_failures_say_what_is_wrong_in_a_few_lines(run: Run, config: dict, words: list[str]) -> None:
    with pytest.raises(ToolError) as caught:
        await run(**config, input={"people": PEOPLE} if "command" in config else {})
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) < 700
    assert "org.apache.spark" not in message
    if "nowhere" in config.get("command", ""):
        assert caught.value.kind == "schema"
    if "line" in words[-1]:
        assert caught.value.kind == "python"


async def test_a_python_error_on_an_executor_names_its_line(run: Run) -> None:
    code = """
from pyspark.sql import functions as F

def main(spark):
    def broken(n):
        raise ValueError(f"no {n} here")
    return spark.range(3).select(F.udf(broken, "int")("id"))
"""
    with pytest.raises(ToolError, match=r"ValueError: no \d here") as caught:
        await run(code=code)
    assert "line 6, in broken" in str(caught.value)
    assert "at org." not in str(caught.value)


async def test_views_of_two_calls_do_not_meet(run: Run) -> None:
    outcomes = await asyncio.gather(
        *(
            run(command="SELECT sum(n) AS s FROM rows", input={"rows": [{"n": n}, {"n": 1}]}, collect=True)
            for n in (1, 10)
        )
    )
    assert [outcome.data["rows"] for outcome in outcomes] == [[{"s": 2}], [{"s": 11}]]


async def test_a_cancelled_call_cancels_its_jobs(run: Run, spark: SparkSession) -> None:
    slow = """
from pyspark.sql import functions as F

def main(spark):
    def wait(n):
        import time
        time.sleep(60)
    return spark.range(0, 8, 1, 8).select(F.udf(wait, "int")("id"))
"""
    tracker = spark.sparkContext.statusTracker()
    call = asyncio.create_task(run(code=slow))
    await until(tracker.getActiveJobsIds, "the job to begin")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not tracker.getActiveJobsIds(), "the job to end")


async def test_the_envelope_says_what_the_call_cost(run: Run) -> None:
    result = await run(command="SELECT id % 7 AS k, count(*) AS n FROM range(0, 10000, 1, 4) GROUP BY 1")
    cost = result.details["spark"]
    assert cost["jobs"] >= 1
    assert cost["tasks"] >= 4
    assert cost["shuffle_write_bytes"] > 0
    assert cost["shuffle_read_bytes"] > 0
    assert cost["disk_spilled_bytes"] == 0
    assert cost["skew"] >= 1
