"""The Spark side of ``patient_flow.yaml``: raw pages to typed datasets, and datasets to counts.

Plain DataFrame code. Nothing here knows the engine: both functions take a session and DataFrames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812, Spark's own convention

PATIENT = ("facility_id", "patient_id")
MOST_NAMED = 100
"""Missing patients that a count names, at most."""


def text(name: str) -> Column:
    """Text without blanks around it; what is empty or says that there is nothing is null."""
    trimmed = F.trim(name)
    return F.when(~F.lower(trimmed).isin("", "n/a", "null", "none"), trimmed)


def code(name: str) -> Column:
    return F.upper(text(name))


def number(name: str, kind: str) -> Column:
    """A number in whatever text it came, also with its unit behind; null where there is none."""
    return F.regexp_extract(name, r"^\s*(-?\d+(?:\.\d+)?)", 1).try_cast(kind)


def day(name: str) -> Column:
    return F.coalesce(F.try_to_date(text(name), "yyyy-MM-dd"), F.try_to_date(text(name), "MM/dd/yyyy"))


def flag(name: str) -> Column:
    return text(name).try_cast("boolean")


@dataclass(frozen=True)
class Layout:
    """One data type: its key within a patient, and what each column is made by."""

    key: tuple[str, ...]
    columns: Mapping[str, Callable[[str], Column]]

    @property
    def page_schema(self) -> str:
        """A page as it is on the wire. Every field is read as text: the wire mixes types."""
        fields = ", ".join(f"{name}: STRING" for name in (*PATIENT, *self.key, *self.columns))
        return f"data ARRAY<STRUCT<{fields}>>"


def whole(name: str) -> Column:
    return number(name, "int")


def decimal(name: str) -> Column:
    return number(name, "decimal(9,2)")


LAYOUTS = {
    "assessments": Layout(
        key=("assessment_id",),
        columns={"scale": text, "score": whole, "assessed_on": day, "assessor_code": code},
    ),
    "conditions": Layout(
        key=("condition_id",),
        columns={"code": code, "description": text, "onset_on": day, "is_active": flag},
    ),
    "medications": Layout(
        key=("medication_id",),
        columns={
            "drug_code": code,
            "drug_name": lambda name: F.lower(text(name)),
            "dose_mg": decimal,
            "route": code,
            "started_on": day,
        },
    ),
    "vital_signs": Layout(
        key=("vital_sign_id",),
        columns={
            "systolic_mmhg": whole,
            "diastolic_mmhg": whole,
            "pulse_per_minute": whole,
            "temperature_c": decimal,
            "measured_on": day,
        },
    ),
    "demographics": Layout(
        key=(),
        columns={"family_name": text, "given_name": text, "born_on": day, "sex": code, "postal_code": text},
    ),
}


def normalise(spark: SparkSession, **pages: DataFrame) -> dict[str, DataFrame]:
    """Raw pages of each data type as typed rows, each record once.

    Args:
        pages: by data type, a DataFrame with one page of the API in each row of its text column ``value``.

    Returns:
        By data type, one row a record. Rows of a facility lie together: writing partitioned by
        ``facility_id`` gives one file a facility, and de-duplication needs no second shuffle.
    """
    return {name: _typed_records(LAYOUTS[name], raw) for name, raw in pages.items()}


def _typed_records(layout: Layout, raw: DataFrame) -> DataFrame:
    page = F.from_json("value", layout.page_schema)
    records = raw.select(F.explode(page["data"]).alias("record")).select("record.*")
    typed = records.select(*PATIENT, *layout.key, *(make(name).alias(name) for name, make in layout.columns.items()))
    return typed.repartition("facility_id").dropDuplicates([*PATIENT, *layout.key])


def count_patients(spark: SparkSession, batches: list[dict[str, Any]], **datasets: DataFrame) -> DataFrame:
    """What each facility holds of each data type, against the patients that were seeded.

    Args:
        batches: the seeded patients as ranges: ``facility_id``, ``first_patient``, ``last_patient``.
        datasets: by data type, the rows that :func:`normalise` gave.

    Returns:
        One row a facility and data type: ``facility_id``, ``data_type``, ``patients``, ``records``,
        ``missing`` (identifiers of at most ``MOST_NAMED`` patients without any record) and ``missing_count``.
    """
    seeded = _seeded_patients(spark, batches)
    return reduce(DataFrame.unionByName, (_counts(seeded, name, rows) for name, rows in datasets.items()))


def _seeded_patients(spark: SparkSession, batches: list[dict[str, Any]]) -> DataFrame:
    ranges = [(batch["facility_id"], batch["first_patient"], batch["last_patient"]) for batch in batches]
    rows = spark.createDataFrame(ranges, "facility INT, first INT, last INT")
    each = rows.select("facility", F.explode(F.sequence("first", "last")).alias("patient"))
    return each.select(
        F.format_string("F%03d", "facility").alias("facility_id"),
        F.format_string("F%03d-P%05d", "facility", "patient").alias("patient_id"),
    )


def _counts(seeded: DataFrame, data_type: str, rows: DataFrame) -> DataFrame:
    found = rows.groupBy(*PATIENT).agg(F.count("*").alias("records"))
    missing = F.when(F.col("records").isNull(), F.col("patient_id"))
    return (
        seeded.join(found, [*PATIENT], "left")
        .groupBy("facility_id")
        .agg(
            F.lit(data_type).alias("data_type"),
            F.count("records").alias("patients"),
            F.coalesce(F.sum("records"), F.lit(0)).alias("records"),
            F.slice(F.sort_array(F.collect_list(missing)), 1, MOST_NAMED).alias("missing"),
            F.count(missing).alias("missing_count"),
        )
    )
