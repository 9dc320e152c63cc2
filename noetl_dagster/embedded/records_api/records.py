"""The records themselves: what a patient has of each data type, and how it is spelled on the wire.

The wire is messy on purpose, in the ways such services are: numbers as text, two date formats, null codes,
and rows that appear again at the head of the next page. After normalising, the copies are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum
from typing import Any

from noetl_dagster.embedded.records_api.mixing import mix, number_of

PAGE_SIZE = 10
"""Records a page when the request names no size; the page counts of :class:`DataType` are for this size."""

Record = dict[str, Any]

_FIRST_DAY = date(2023, 1, 1)
_DAYS = tuple(_FIRST_DAY + timedelta(days=day) for day in range(730))
_ISO_DATES = tuple(day.isoformat() for day in _DAYS)
_US_DATES = tuple(day.strftime("%m/%d/%Y") for day in _DAYS)
_BIRTH_DATES = tuple(date(1930, 1, 1) + timedelta(days=3 * day) for day in range(9000))

_SCALES = ("PHQ-9", "GAD-7", "MMSE", "Braden", "Morse")
_CONDITIONS = (
    ("I10", "Hypertension"),
    ("E11.9", "Type 2 diabetes"),
    ("J44.9", "COPD"),
    ("N18.3", "CKD stage 3"),
)
_DRUGS = (("8610", "metformin"), ("29046", "lisinopril"), ("83367", "atorvastatin"), ("7646", "omeprazole"))
_ROUTES = ("PO", "IV", "po", None)
_FAMILY_NAMES = (
    "Abara",
    "Brandt",
    "Costa",
    "Dubois",
    "Eriksen",
    "Farouk",
    "Garcia",
    "Hughes",
    "Ito",
    "Jansen",
)
_GIVEN_NAMES = ("Ada", "Ben", "Carla", "Dov", "Emi", "Femi", "Grace", "Hal", "Ines", "Jon")


class DataType(StrEnum):
    ASSESSMENTS = "assessments"
    CONDITIONS = "conditions"
    MEDICATIONS = "medications"
    VITAL_SIGNS = "vital_signs"
    DEMOGRAPHICS = "demographics"

    @property
    def is_paged(self) -> bool:
        return self is not DataType.DEMOGRAPHICS


_PAGES = {
    DataType.ASSESSMENTS: (2, 4),
    DataType.CONDITIONS: (1, 3),
    DataType.MEDICATIONS: (2, 3),
    DataType.VITAL_SIGNS: (1, 1),
}
"""Fewest and most pages of a patient, at ``PAGE_SIZE`` rows a page."""

_SALTS = {data_type: number_of(data_type) for data_type in DataType}


@dataclass(frozen=True, slots=True)
class Page:
    """One page of one patient. ``total`` counts rows as served, repeated ones included."""

    records: list[Record]
    total: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class RecordBook:
    """Everything a seed holds. Two books of one seed give the same rows."""

    seed: int

    def row_count(self, facility: int, patient: int, data_type: DataType) -> int:
        """Rows served for a patient over all pages; repeated rows count each time."""
        if not data_type.is_paged:
            return 1
        fewest, most = _PAGES[data_type]
        bits = mix(self.seed, facility, patient, _SALTS[data_type])
        pages = fewest + bits % (most - fewest + 1)
        return int((pages - 1) * PAGE_SIZE + 1 + (bits >> 32) % PAGE_SIZE)

    def record_count(self, facility: int, patient: int, data_type: DataType) -> int:
        """Different records of a patient: what remains after de-duplication."""
        return len({_identity(row) for row in range(self.row_count(facility, patient, data_type))})

    def page(
        self, facility: int, patient: int, data_type: DataType, page: int = 1, page_size: int = PAGE_SIZE
    ) -> Page:
        """Page ``page`` (from 1) of a patient; a page after the last one is empty."""
        total = self.row_count(facility, patient, data_type)
        first = (page - 1) * page_size
        rows = range(first, min(first + page_size, total))
        key = mix(self.seed, facility, patient, _SALTS[data_type], 1)
        spell = _SPELLINGS[data_type]
        heading = {"facility_id": f"F{facility:03d}", "patient_id": patient_id(facility, patient)}
        records = [heading | spell(mix(key, _identity(row)), _identity(row), row & 1) for row in rows]
        return Page(records, total, first + page_size < total)


def patient_id(facility: int, patient: int) -> str:
    """A patient's identifier on the wire, for example ``F002-P00017``."""
    return f"F{facility:03d}-P{patient:05d}"


def _identity(row: int) -> int:
    """Which record a row shows: the head of each page but the first repeats the row before it."""
    return row - 1 if row and row % PAGE_SIZE == 0 else row


def _day(bits: int, form: int) -> str:
    return (_US_DATES if form else _ISO_DATES)[bits % len(_DAYS)]


def _assessment(bits: int, number: int, form: int) -> Record:
    score = bits % 28
    return {
        "assessment_id": f"A{bits & 0xFFFFFFFF:08x}-{number}",
        "scale": _SCALES[bits % len(_SCALES)],
        "score": str(score) if form else score,
        "assessed_on": _day(bits >> 16, form),
        "assessor_code": None if bits & 0x700 == 0 else f" N{(bits >> 8) % 400} ",
    }


def _condition(bits: int, number: int, form: int) -> Record:
    code, label = _CONDITIONS[bits % len(_CONDITIONS)]
    return {
        "condition_id": f"C{bits & 0xFFFFFFFF:08x}-{number}",
        "code": None if bits & 0xF00 == 0 else code.lower() if form else code,
        "description": label,
        "onset_on": _day(bits >> 16, form),
        "is_active": ("true" if bits & 0x1000 else "false") if form else bool(bits & 0x1000),
    }


def _medication(bits: int, number: int, form: int) -> Record:
    code, name = _DRUGS[bits % len(_DRUGS)]
    dose = 2.5 * (1 + (bits >> 8) % 40)
    return {
        "medication_id": f"M{bits & 0xFFFFFFFF:08x}-{number}",
        "drug_code": None if bits & 0xF0000 == 0 else code,
        "drug_name": name.upper() if form else name,
        "dose_mg": f"{dose} mg" if form else dose,
        "route": _ROUTES[(bits >> 20) % len(_ROUTES)],
        "started_on": _day(bits >> 24, form),
    }


def _vital_sign(bits: int, number: int, form: int) -> Record:
    systolic, pulse = 95 + bits % 80, 50 + (bits >> 8) % 60
    return {
        "vital_sign_id": f"V{bits & 0xFFFFFFFF:08x}-{number}",
        "systolic_mmhg": str(systolic) if form else systolic,
        "diastolic_mmhg": 55 + (bits >> 16) % 45,
        "pulse_per_minute": "n/a" if bits & 0xF000000 == 0 else str(pulse) if form else pulse,
        "temperature_c": f"{36 + (bits >> 32) % 30 / 10:.1f}",
        "measured_on": _day(bits >> 40, form),
    }


def _demographics(bits: int, number: int, form: int) -> Record:
    born = _BIRTH_DATES[(bits >> 16) % len(_BIRTH_DATES)]
    return {
        "family_name": _FAMILY_NAMES[bits % len(_FAMILY_NAMES)],
        "given_name": _GIVEN_NAMES[(bits >> 8) % len(_GIVEN_NAMES)],
        "born_on": born.strftime("%m/%d/%Y") if bits & 1 << 40 else born.isoformat(),
        "sex": ("F", "M", "f", None)[(bits >> 48) % 4],
        "postal_code": f"{(bits >> 20) % 100000:05d}",
    }


_SPELLINGS: dict[DataType, Callable[[int, int, int], Record]] = {
    DataType.ASSESSMENTS: _assessment,
    DataType.CONDITIONS: _condition,
    DataType.MEDICATIONS: _medication,
    DataType.VITAL_SIGNS: _vital_sign,
    DataType.DEMOGRAPHICS: _demographics,
}
"""How a record is spelled: of its bits, its number and the form (0 or 1) of the row that shows it."""
