"""Data quality on Spark, of what an execution of ``patient_flow.yaml`` has normalised.

An ordinary Dagster asset over the result of the playbook's step ``normalise``: a facility report with a picture, and
four checks of its own. It reads that execution's datasets where they lie, and has a job beside the playbook's.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

from dagster import (
    AssetCheckResult,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetIn,
    AssetKey,
    MaterializeResult,
    MetadataValue,
    PythonObjectDagsterType,
    asset,
    define_asset_job,
)
from patient_flow_spark import LAYOUTS, PATIENT
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812, Spark's own convention

from noetl_dagster import NoetlResource, PySparkResource, ResultRef, frame_of

FLOW = ("examples", "patient_flow")
NORMALISE = AssetKey([*FLOW, "normalise"])
REPORT = AssetKey([*FLOW, "facility_quality"])

REQUIRED: dict[str, tuple[str, ...]] = {
    "assessments": ("scale", "score", "assessed_on"),
    "conditions": ("description", "onset_on", "is_active"),
    "medications": ("drug_name", "dose_mg", "started_on"),
    "vital_signs": ("systolic_mmhg", "diastolic_mmhg", "temperature_c", "measured_on"),
    "demographics": ("family_name", "given_name", "born_on"),
}
"""Columns that no record may lack. Others, as codes and routes, are missing in good records too."""

RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "assessments": {"score": (0, 60)},
    "medications": {"dose_mg": (0.01, 5000)},
    "vital_signs": {
        "systolic_mmhg": (50, 260),
        "diastolic_mmhg": (30, 160),
        "pulse_per_minute": (25, 250),
        "temperature_c": (30, 44),
    },
}
"""What a measurement can be in a living patient; the units are in the names."""

CHECKS = {
    "counts": ("uncounted", "as many records lie in the datasets as the execution has counted"),
    "uniqueness": ("duplicates", "no record is there twice"),
    "nulls": ("nulls", "no required value is missing"),
    "ranges": ("out_of_range", "no measurement is beyond what is possible"),
}
"""By name of the check: the column of the report that must be 0, and what that means."""


def measured(data_type: str, rows: DataFrame) -> DataFrame:
    """One row a facility: ``records``, ``duplicates``, ``nulls``, ``out_of_range``; one pass over the data."""
    key = [F.coalesce(F.col(name), F.lit("")) for name in (*PATIENT, *LAYOUTS[data_type].key)]
    records = F.count("*")
    return rows.groupBy("facility_id").agg(
        F.lit(data_type).alias("data_type"),
        records.alias("records"),
        (records - F.countDistinct(*key)).alias("duplicates"),
        F.sum(_counted(F.col(name).isNull() for name in REQUIRED[data_type])).alias("nulls"),
        F.sum(_counted(~F.col(name).between(*limits) for name, limits in RANGES.get(data_type, {}).items())).alias(
            "out_of_range"
        ),
    )


def _counted(conditions: Any) -> Column:
    """How many of the conditions hold in a row; null holds not."""
    ones = (F.when(condition, 1).otherwise(0) for condition in conditions)
    return reduce(add, ones, F.lit(0))


def report(datasets: Mapping[str, DataFrame], counts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The measures of each facility and data type, with ``uncounted``: records more or less than counted.

    Args:
        counts: rows of ``facility_id``, ``data_type`` and ``records``, as the step ``normalise`` gave them.
    """
    frame = reduce(DataFrame.unionByName, (measured(name, rows) for name, rows in datasets.items()))
    found = {(row["facility_id"], row["data_type"]): row.asDict() for row in frame.collect()}
    nothing = {"records": 0, "duplicates": 0, "nulls": 0, "out_of_range": 0}
    rows = []
    for count in counts:
        place = {name: count[name] for name in ("facility_id", "data_type")}
        row = place | (found.get((count["facility_id"], count["data_type"])) or nothing)
        rows.append(row | {"uncounted": abs(row["records"] - count["records"])})
    return sorted(rows, key=lambda row: (row["facility_id"], row["data_type"]))


def report_of(noetl: NoetlResource, pyspark: PySparkResource, normalise: ResultRef) -> list[dict[str, Any]]:
    """The report on the datasets of the execution that a result of ``normalise`` is from."""
    store = noetl.engine().runtime.results
    spark = pyspark.spark_session
    datasets = {name: frame_of(spark, store, normalise.execution_id, "normalise", name) for name in LAYOUTS}
    return report(datasets, noetl.run(store.get(normalise))["rows"])


@asset(
    key=REPORT,
    ins={"normalise": AssetIn(key=NORMALISE, input_manager_key="noetl_results")},
    io_manager_key="noetl_results",
    dagster_type=PythonObjectDagsterType(list),
    group_name="patient_flow",
    kinds={"spark"},
    check_specs=[AssetCheckSpec(name, asset=REPORT, description=what) for name, (_, what) in CHECKS.items()],
)
def facility_quality(noetl: NoetlResource, pyspark: PySparkResource, normalise: ResultRef) -> MaterializeResult:
    """Records, duplicates, missing values and impossible measurements of every facility."""
    rows = report_of(noetl, pyspark, normalise)
    return MaterializeResult(
        value=rows,
        metadata={
            "picture": MetadataValue.md(_as_markdown(picture(rows))),
            "records": sum(row["records"] for row in rows),
            "facilities": len({row["facility_id"] for row in rows}),
            "execution": str(normalise.execution_id),
        },
        check_results=[_checked(name, column, rows) for name, (column, _) in CHECKS.items()],
    )


def _checked(name: str, column: str, rows: Sequence[Mapping[str, Any]]) -> AssetCheckResult:
    """Whether a column of the report is 0 for every facility and data type."""
    bad = {f"{row['facility_id']} {row['data_type']}": row[column] for row in rows if row[column]}
    return AssetCheckResult(
        check_name=name,
        passed=bool(rows) and not bad,
        severity=AssetCheckSeverity.ERROR,
        metadata={"found": sum(bad.values()), "where": MetadataValue.json(bad)},
    )


# -- the picture -----------------------------------------------------------------------------------------

_COLOURS = {
    "assessments": "#4c78a8",
    "conditions": "#f58518",
    "medications": "#54a24b",
    "vital_signs": "#b279a2",
    "demographics": "#9d755d",
}
_WIDTH, _BAR, _LEFT, _TOP = 640, 22, 60, 40


def picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """An SVG: a bar a facility, its records by data type; bad records in red at the bar's end."""
    facilities = sorted({row["facility_id"] for row in rows})
    totals = [sum(row["records"] for row in rows if row["facility_id"] == name) for name in facilities]
    scale = (_WIDTH - _LEFT - 110) / max([*totals, 1])
    parts = [_legend()]
    for number, (name, total) in enumerate(zip(facilities, totals, strict=True)):
        top, left = _TOP + number * (_BAR + 8), float(_LEFT)
        parts.append(_text(4, top + 15, name))
        for row in (row for row in rows if row["facility_id"] == name):
            width = row["records"] * scale
            title = f"<title>{row['data_type']}: {row['records']} records</title>"
            parts.append(_rect(left, top, width, _COLOURS[row["data_type"]], title))
            left += width
        bad = sum(row[column] for row in rows if row["facility_id"] == name for column, _ in CHECKS.values())
        parts.append(_text(left + 6, top + 15, f"{total}" + (f", {bad} bad" if bad else ""), red=bool(bad)))
    height = _TOP + len(facilities) * (_BAR + 8) + 4
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
    return f'{opening} font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'


def _legend() -> str:
    boxes = [
        _rect(_LEFT + 112 * number, 8, 12, colour) + _text(_LEFT + 112 * number + 16, 22, name)
        for number, (name, colour) in enumerate(_COLOURS.items())
    ]
    return "".join(boxes)


def _rect(left: float, top: float, width: float, colour: str, inside: str = "") -> str:
    return f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}">{inside}</rect>'


def _text(left: float, top: float, text: str, *, red: bool = False) -> str:
    colour = "#c00" if red else "#333"
    return f'<text x="{left:.1f}" y="{top}" fill="{colour}">{text}</text>'


def _as_markdown(svg: str) -> str:
    encoded = base64.b64encode(svg.encode()).decode()
    return f"![records of each facility](data:image/svg+xml;base64,{encoded})"


quality_job = define_asset_job("facility_quality", selection=[REPORT])
