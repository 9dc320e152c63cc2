"""A tiny job of what steps do with Spark: JSON to typed columns, SQL, a shuffle, Parquet out and in.

It loads the classes that a step needs, in a session that has just started or in the JVM whose classes are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LINES = [
    '{"data": [{"site": "A", "id": "1", "on": "2024-01-31", "size": " 7.5 kg"}, {"site": "B", "id": "2"}]}',
    '{"data": [{"site": "A", "id": "3", "on": "01/31/2024", "size": "n/a"}]}',
]
PAGE = "data ARRAY<STRUCT<site: STRING, id: STRING, on: STRING, size: STRING>>"


def rehearse(
    session: SparkSession,
    folder: Path,
    *,
    python_too: bool = False,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Does the job; blocks for some seconds on a cold JVM.

    Args:
        folder: an empty one for its files, which the caller removes.
        python_too: run a Python function on Spark's workers as well.
        goes_on: asked between the parts of the job; it ends where this says no.
    """
    parts = [_write, _read, _infer]
    for part in [*parts, _call_python] if python_too else parts:
        if not goes_on():
            return
        part(session, folder)


def _write(session: SparkSession, folder: Path) -> None:
    from pyspark.sql import functions as F  # noqa: N812, Spark's own convention

    (folder / "lines").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    raw = session.read.text(str(folder / "lines"), lineSep="\n")
    page = F.from_json("value", PAGE)
    record = raw.select(F.explode(page["data"]).alias("record")).select("record.*")
    text = F.when(~F.lower(F.trim("size")).isin("", "n/a"), F.trim("size"))
    typed = record.select(
        "site",
        F.upper("id").alias("id"),
        F.coalesce(F.try_to_date("on", "yyyy-MM-dd"), F.try_to_date("on", "MM/dd/yyyy")).alias("on"),
        F.regexp_extract(text, r"^\s*(-?\d+(?:\.\d+)?)", 1).try_cast("decimal(9,2)").alias("size"),
    )
    distinct = typed.repartition("site").dropDuplicates(["site", "id"])
    distinct.write.partitionBy("site").parquet(str(folder / "typed"))


def _read(session: SparkSession, folder: Path) -> None:
    session.read.schema("id STRING, on DATE, size DECIMAL(9,2), site STRING").parquet(
        str(folder / "typed")
    ).createOrReplaceTempView("typed")
    session.createDataFrame([("A", 1), ("C", 2)], "site STRING, n INT").createOrReplaceTempView("sites")
    session.sql(
        """
        SELECT site, count(*) AS n, sum(size) AS size, max(on) AS last,
               sort_array(collect_list(if(typed.id IS NULL, sites.site, NULL))) AS missing
        FROM sites LEFT JOIN typed USING (site) GROUP BY site ORDER BY site
        """
    ).toArrow()


def _infer(session: SparkSession, folder: Path) -> None:
    session.read.json(str(folder / "lines")).selectExpr("inline(data)").where("size IS NOT NULL").toArrow()


def _call_python(session: SparkSession, folder: Path) -> None:
    from pyspark.sql import functions as F  # noqa: N812, Spark's own convention

    twice = F.udf(lambda number: number * 2, "long")
    session.range(3).select(twice("id").alias("n")).agg({"n": "sum"}).collect()
