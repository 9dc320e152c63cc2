"""The Spark side of the patient flow, on pages straight from the records API's book."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import orjson
import pytest
from pyspark.sql import DataFrame, SparkSession

from examples.records_api import DataType, RecordBook
from noetl_dagster.spark.functions import load_function

pytestmark = pytest.mark.spark

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
FACILITIES, PATIENTS = 2, 6


@pytest.fixture(scope="module")
def flow() -> ModuleType:
    return sys.modules[load_function("patient_flow_spark.py:normalise", str(PLAYBOOKS)).__module__]


def pages_of(book: RecordBook, data_type: DataType) -> Iterator[str]:
    for facility in range(1, FACILITIES + 1):
        for patient in range(1, PATIENTS + 1):
            number, more = 1, True
            while more:
                page = book.page(facility, patient, data_type, number)
                yield orjson.dumps({"data": page.records, "paging": {"hasMore": page.has_more}}).decode()
                number, more = number + 1, page.has_more


@pytest.fixture
def datasets(spark: SparkSession, flow: ModuleType) -> dict[str, DataFrame]:
    book = RecordBook(7)
    raw = {
        data_type.value: spark.createDataFrame([(page,) for page in pages_of(book, data_type)], "value STRING")
        for data_type in DataType
    }
    return flow.normalise(spark, **raw)  # type: ignore[no-any-return]


def test_each_record_is_there_once_and_typed(datasets: dict[str, DataFrame]) -> None:
    book = RecordBook(7)
    rows = datasets["medications"].collect()
    raw = [orjson.loads(page)["data"] for page in pages_of(book, DataType.MEDICATIONS)]
    by_id = {record["medication_id"]: record for page in raw for record in page}
    assert len(rows) == len(by_id) < sum(map(len, raw))
    assert dict(datasets["medications"].dtypes) == {
        "facility_id": "string",
        "patient_id": "string",
        "medication_id": "string",
        "drug_code": "string",
        "drug_name": "string",
        "dose_mg": "decimal(9,2)",
        "route": "string",
        "started_on": "date",
    }
    for row in rows:
        record = by_id[row.medication_id]
        assert row.dose_mg == Decimal(str(record["dose_mg"]).removesuffix(" mg"))
        assert row.drug_name == record["drug_name"].lower()
        assert row.started_on == day_of(record["started_on"])
        assert row.drug_code == record["drug_code"]


def day_of(text: str) -> date:
    if found := re.fullmatch(r"(\d\d)/(\d\d)/(\d{4})", text):
        month, day, year = map(int, found.groups())
        return date(year, month, day)
    return date.fromisoformat(text)


def test_what_cannot_be_read_is_null_and_the_rest_is_not(datasets: dict[str, DataFrame]) -> None:
    vital_signs = datasets["vital_signs"].toPandas()
    assert vital_signs["systolic_mmhg"].notna().all()
    assert vital_signs["measured_on"].notna().all()
    assessments = datasets["assessments"].toPandas()
    assert assessments["score"].between(0, 27).all()
    assert assessments["assessor_code"].isna().any()
    assert assessments["assessor_code"].dropna().str.fullmatch(r"N\d+").all()
    conditions = datasets["conditions"].toPandas()
    assert set(conditions["is_active"]) == {True, False}
