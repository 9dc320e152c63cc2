"""What a seed holds: the same for everyone who asks, paged, and messy in the ways it says."""

import pytest

from examples.records_api.records import PAGE_SIZE, DataType, RecordBook

PAGES = {"assessments": {2, 3, 4}, "conditions": {1, 2, 3}, "medications": {2, 3}, "vital_signs": {1}}


def rows_of(book: RecordBook, facility: int, patient: int, data_type: DataType, size: int = PAGE_SIZE) -> list:
    rows, number, more = [], 1, True
    while more:
        page = book.page(facility, patient, data_type, number, size)
        rows += page.records
        number, more = number + 1, page.has_more
    return rows


def test_one_seed_gives_one_book() -> None:
    assert RecordBook(7).page(1, 2, DataType.ASSESSMENTS) == RecordBook(7).page(1, 2, DataType.ASSESSMENTS)
    assert RecordBook(7).page(1, 2, DataType.ASSESSMENTS) != RecordBook(8).page(1, 2, DataType.ASSESSMENTS)
    assert RecordBook(7).page(1, 2, DataType.ASSESSMENTS) != RecordBook(7).page(2, 1, DataType.ASSESSMENTS)


@pytest.mark.parametrize("data_type", PAGES)
def test_page_counts_are_those_of_the_workload(data_type: str) -> None:
    book = RecordBook(7)
    counts = {
        -(-book.row_count(facility, patient, DataType(data_type)) // PAGE_SIZE)
        for facility in (1, 2)
        for patient in range(1, 101)
    }
    assert counts == PAGES[data_type]


@pytest.mark.parametrize("data_type", DataType)
def test_page_size_does_not_change_the_rows(data_type: DataType) -> None:
    book = RecordBook(3)
    assert rows_of(book, 2, 5, data_type, size=7) == rows_of(book, 2, 5, data_type)
    assert len(rows_of(book, 2, 5, data_type)) == book.row_count(2, 5, data_type)


def test_the_head_of_a_page_repeats_the_row_before_it_in_another_spelling() -> None:
    book = RecordBook(7)
    rows = rows_of(book, 1, 1, DataType.ASSESSMENTS)
    assert rows[PAGE_SIZE]["assessment_id"] == rows[PAGE_SIZE - 1]["assessment_id"]
    assert rows[PAGE_SIZE] != rows[PAGE_SIZE - 1]
    different = {row["assessment_id"] for row in rows}
    assert len(different) == book.record_count(1, 1, DataType.ASSESSMENTS) < len(rows)


def test_numbers_dates_and_codes_are_spelled_in_several_ways() -> None:
    rows = [row for patient in range(1, 40) for row in rows_of(RecordBook(7), 1, patient, DataType.ASSESSMENTS)]
    assert {type(row["score"]) for row in rows} == {int, str}
    assert {"/" in row["assessed_on"] for row in rows} == {True, False}
    assert None in {row["assessor_code"] for row in rows}
