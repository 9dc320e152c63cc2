"""The patient flow as one writes it by hand: asyncio with aiohttp, pages to files, then plain PySpark.

    python -m benchmarks._patient_flow_by_hand http://127.0.0.1:8765 --facilities 5 --patients 100 --folder /tmp/x

Nothing of it is durable: whoever ends the process starts again. It prints what it counted and the seconds of
its two parts as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

PLAYBOOKS = Path(__file__).parents[1] / "playbooks"
DATA_TYPES = ("assessments", "conditions", "medications", "vital_signs", "demographics")
AT_ONCE = 64
PAGE_SIZE = 10
ATTEMPTS = 6
BATCH = 25
"""Patients whose pages go to one file."""


class Fetcher:
    """Pages of patients, each tried again as the playbook's policy says."""

    def __init__(self, session: aiohttp.ClientSession, url: str, folder: Path) -> None:
        self._session = session
        self._url = url
        self._folder = folder
        self.requests = 0

    async def batch(self, data_type: str, facility: int, first: int, last: int) -> None:
        pages = [
            page for patient in range(first, last + 1) for page in await self._patient(data_type, facility, patient)
        ]
        lines = "".join(json.dumps(page) + "\n" for page in pages)
        (self._folder / data_type / f"{facility}-{first}.json").write_text(lines)

    async def _patient(self, data_type: str, facility: int, patient: int) -> list[dict[str, Any]]:
        pages: list[dict[str, Any]] = []
        while True:
            page = await self._page(data_type, facility, patient, len(pages) + 1)
            pages.append(page)
            if not page.get("paging", {}).get("hasMore"):
                return pages

    async def _page(self, data_type: str, facility: int, patient: int, number: int) -> dict[str, Any]:
        path = f"{self._url}/facilities/{facility}/patients/{patient}/{data_type}"
        paged = data_type != "demographics"
        params = {"page": str(number), "pageSize": str(PAGE_SIZE)} if paged else {}
        for attempt in range(1, ATTEMPTS + 1):
            self.requests += 1
            wait = 0.05 * 2 ** (attempt - 1)
            try:
                headers = {"X-Attempt": str(attempt)}
                async with self._session.get(path, params=params, headers=headers) as response:
                    if response.status == 200:
                        return await response.json()
                    wait = max(wait, float(response.headers.get("Retry-After", 0)))
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(wait)
        raise RuntimeError(f"{path} page {number} was refused {ATTEMPTS} times")


async def fetch(url: str, facilities: int, patients: int, folder: Path) -> int:
    """Every page of every patient into ``folder``; the number of requests."""
    for data_type in DATA_TYPES:
        (folder / data_type).mkdir(parents=True)
    work = iter(
        [
            (data_type, facility, first, min(first + BATCH - 1, patients))
            for data_type in DATA_TYPES
            for facility in range(1, facilities + 1)
            for first in range(1, patients + 1, BATCH)
        ]
    )
    timeout = aiohttp.ClientTimeout(total=None, sock_read=10, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        fetcher = Fetcher(session, url, folder)

        async def worker() -> None:
            for batch in work:
                await fetcher.batch(*batch)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return fetcher.requests


def normalise(folder: Path, facilities: int, patients: int) -> list[dict[str, Any]]:
    """The typed datasets, written and read again, and their counts."""
    sys.path.insert(0, str(PLAYBOOKS))
    import patient_flow_spark as flow
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[*]").config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    raw = {name: spark.read.text(str(folder / name)) for name in DATA_TYPES}
    for name, frame in flow.normalise(spark, **raw).items():
        frame.write.partitionBy("facility_id").parquet(str(folder / "typed" / name))
    typed = {name: spark.read.parquet(str(folder / "typed" / name)) for name in DATA_TYPES}
    ranges = [
        {"facility_id": facility, "first_patient": 1, "last_patient": patients} for facility in range(1, facilities + 1)
    ]
    counts = [row.asDict() for row in flow.count_patients(spark, ranges, **typed).collect()]
    spark.stop()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--facilities", type=int, default=5)
    parser.add_argument("--patients", type=int, default=100)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    size = (arguments.facilities, arguments.patients)
    began = time.perf_counter()
    requests = asyncio.run(fetch(arguments.url, *size, arguments.folder))
    fetched = time.perf_counter()
    counts = normalise(arguments.folder, *size)
    print(
        json.dumps(
            {
                "requests": requests,
                "fetch_seconds": fetched - began,
                "spark_seconds": time.perf_counter() - fetched,
                "records": sum(row["records"] for row in counts),
                "missing": sum(row["missing_count"] for row in counts),
            }
        )
    )


if __name__ == "__main__":
    main()
