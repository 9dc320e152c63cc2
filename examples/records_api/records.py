"""The records of each patient and data type, and their representation on the wire.

The wire format is deliberately messy, as in real services: numbers as text, two date formats, null codes, and rows that
the next page repeats. After normalisation, the copies are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum
from typing import Any, NamedTuple
from zlib import crc32

PAGE_SIZE = 10
"""Default number of records per page, to which the page counts of :class:`DataType` refer."""

Record = dict[str, Any]

MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15

_FIRST_DAY = date(2023, 1, 1)
_DAYS = tuple(_FIRST_DAY + timedelta(days=day) for day in range(730))
_ISO_DATES = tuple(day.isoformat() for day in _DAYS)
_US_DATES = tuple(day.strftime("%m/%d/%Y") for day in _DAYS)
_BIRTH_DATES = tuple(date(1930, 1, 1) + timedelta(days=3 * day) for day in range(9000))

_SCALES = ("PHQ-9", "GAD-7", "MMSE", "Braden", "Morse")
_CODES = (("I10", "Hypertension"), ("E11.9", "Type 2 diabetes"), ("J44.9", "COPD"), ("N18.3", "CKD stage 3"))
_DRUGS = (("8610", "metformin"), ("29046", "lisinopril"), ("83367", "atorvastatin"), ("7646", "omeprazole"))
_ROUTES = ("PO", "IV", "po", None)
_SURNAMES = ("Abara", "Brandt", "Costa", "Dubois", "Eriksen", "Farouk", "Garcia", "Hughes", "Ito", "Jansen")
_GIVEN_NAMES = ("Ada", "Ben", "Carla", "Dov", "Emi", "Femi", "Grace", "Hal", "Ines", "Jon")


def mix(*parts: int) -> int:
    """Hashes integers to 64 bits with the finaliser of SplitMix64.

    It takes 0.3 microseconds per part; seeding ``random.Random`` takes 5. A page needs a dozen calls.
    """
    state = 0
    for part in parts:
        state = (state + _WEYL + part) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


def share(bits: int) -> float:
    """Maps 64 hashed bits to [0, 1)."""
    return bits / 2**64


def number_of(text: str) -> int:
    """Returns a number for a text that is the same in every process, unlike ``hash``."""
    return crc32(text.encode())


class DataType(StrEnum):
    """The types of records of a patient. All but the demographics come in pages."""

    ASSESSMENTS = "assessments"
    CONDITIONS = "conditions"
    MEDICATIONS = "medications"
    VITAL_SIGNS = "vital_signs"
    DEMOGRAPHICS = "demographics"


_PAGES = {"assessments": (2, 4), "conditions": (1, 3), "medications": (2, 3), "vital_signs": (1, 1)}
"""Minimum and maximum number of pages of a patient, at ``PAGE_SIZE`` rows per page."""

_SALTS = {data_type: number_of(data_type) for data_type in DataType}


class Page(NamedTuple):
    """One page of one patient. ``total`` includes repeated rows."""

    records: list[Record]
    total: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class RecordBook:
    """All records of a seed. Two books with the same seed have the same rows."""

    seed: int

    def row_count(self, facility: int, patient: int, data_type: DataType) -> int:
        """Returns the number of rows over all pages of a patient, including repeated rows."""
        if data_type is DataType.DEMOGRAPHICS:
            return 1
        fewest, most = _PAGES[data_type]
        bits = mix(self.seed, facility, patient, _SALTS[data_type])
        pages = fewest + bits % (most - fewest + 1)
        return int((pages - 1) * PAGE_SIZE + 1 + (bits >> 32) % PAGE_SIZE)

    def record_count(self, facility: int, patient: int, data_type: DataType) -> int:
        """Returns the number of distinct records of a patient."""
        return len({_identity(row) for row in range(self.row_count(facility, patient, data_type))})

    def page(self, facility: int, patient: int, data_type: DataType, page: int = 1, page_size: int = PAGE_SIZE) -> Page:
        """Returns page ``page`` (from 1) of a patient; a page after the last one is empty."""
        total = self.row_count(facility, patient, data_type)
        first = (page - 1) * page_size
        rows = range(first, min(first + page_size, total))
        key = mix(self.seed, facility, patient, _SALTS[data_type], 1)
        spell = _SPELLINGS[data_type]
        heading = {"facility_id": f"F{facility:03d}", "patient_id": patient_id(facility, patient)}
        records = [heading | spell(mix(key, _identity(row)), _identity(row), row & 1) for row in rows]
        return Page(records, total, first + page_size < total)


def patient_id(facility: int, patient: int) -> str:
    """Returns the identifier of a patient, for example ``F002-P00017``."""
    return f"F{facility:03d}-P{patient:05d}"


def _identity(row: int) -> int:
    """Returns the record of a row: the first row of a page repeats the last row of the page before."""
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
    code, label = _CODES[bits % len(_CODES)]
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
        "family_name": _SURNAMES[bits % len(_SURNAMES)],
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
"""Builds a record from its bits, its number, and the wire format (0 or 1) of its row."""
