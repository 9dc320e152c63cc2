"""The service over HTTP: routes in process, faults and dropped connections against a real server."""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from examples.records_api import DataType, Fault, FaultPlan, RecordBook, create_app
from examples.records_api.app import WORST_STREAK


@contextlib.asynccontextmanager
async def client_of(**arguments: object) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(**arguments))
    async with httpx.AsyncClient(transport=transport, base_url="http://records") as client:
        yield client


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    command = [sys.executable, "-m", "examples.records_api", "--port=0", "--seed=7", "--faults=0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        yield address.group()
        process.terminate()


async def test_pages_end_where_has_more_says() -> None:
    async with client_of(seed=7) as client:
        path, number, rows, more = "/facilities/2/patients/9/medications", 1, 0, True
        while more:
            body = (await client.get(path, params={"page": number, "pageSize": 4})).json()
            assert body["paging"]["page"] == number
            rows, number, more = rows + len(body["data"]), number + 1, body["paging"]["hasMore"]
    assert rows == body["paging"]["total"] == RecordBook(7).row_count(2, 9, DataType.MEDICATIONS)


async def test_demographics_are_not_paged() -> None:
    async with client_of(seed=7) as client:
        body = (await client.get("/facilities/2/patients/9/demographics")).json()
    assert list(body) == ["data"]
    assert [record["patient_id"] for record in body["data"]] == ["F002-P00009"]


async def test_expected_says_what_was_seeded() -> None:
    async with client_of(seed=7, patients=3) as client:
        body = (await client.get("/expected/2")).json()
        more = (await client.get("/expected/2", params={"patients": 5})).json()
    assert body["patients"] == ["F002-P00001", "F002-P00002", "F002-P00003"]
    assert body["records"]["demographics"] == 3
    assert body["records"]["assessments"] == sum(
        RecordBook(7).record_count(2, patient, DataType.ASSESSMENTS) for patient in (1, 2, 3)
    )
    assert len(more["patients"]) == 5


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/facilities/1/patients/1/xrays", 404, "there are assessments"),
        ("/facilities/1/patients/1/conditions?page=0", 400, "page is a whole number from 1"),
        ("/facilities/1/patients/1/conditions?pageSize=ten", 400, "pageSize is a whole number"),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(path: str, status: int, words: str) -> None:
    async with client_of() as client:
        answer = await client.get(path)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_the_share_of_faults_is_the_share_asked_for() -> None:
    plan = FaultPlan(seed=7, share=0.1)
    met = Counter(plan.fault(f"/facilities/1/patients/{patient}/conditions?", 1) for patient in range(4000))
    assert 0.08 < 1 - met[None] / 4000 < 0.12
    assert set(met) == {None, *Fault}


def test_faults_depend_on_the_request_alone_and_end() -> None:
    plan = FaultPlan(seed=7, share=1.0)
    streak = [plan.fault("/x", attempt) for attempt in range(1, WORST_STREAK + 2)]
    assert streak == [FaultPlan(seed=7, share=1.0).fault("/x", attempt) for attempt in range(1, WORST_STREAK + 2)]
    assert None not in streak[:-1]
    assert streak[-1] is None


async def test_every_fault_is_met_and_retries_get_through(server: str) -> None:
    met: Counter[str] = Counter()

    async def fetch(client: httpx.AsyncClient, patient: int) -> None:
        for attempt in range(1, WORST_STREAK + 2):
            path = f"/facilities/1/patients/{patient}/vital_signs"
            try:
                answer = await client.get(path, headers={"X-Attempt": str(attempt)})
            except httpx.RemoteProtocolError:
                met["dropped"] += 1
                continue
            met[str(answer.status_code)] += 1
            if answer.status_code == 429:
                assert answer.headers["retry-after"] == "1"
            if answer.status_code == 200:
                assert answer.json()["data"]
                return
        pytest.fail(f"patient {patient} was never answered")

    transport = httpx.AsyncHTTPTransport(retries=5)  # of connecting only: the server has just been started
    async with httpx.AsyncClient(base_url=server, transport=transport) as client:
        await asyncio.gather(*(fetch(client, patient) for patient in range(1, 61)))
    assert set(met) == {"200", "429", "500", "dropped"}
    assert met["200"] == 60
