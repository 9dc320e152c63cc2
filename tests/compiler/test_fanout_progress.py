"""How far a fan-out is, where people look: the command line, the run's tag, and the metadata of ops and asset."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest
from dagster import AssetKey, DagsterInstance

from noetl_dagster.cli import progress
from noetl_dagster.compiler import session
from noetl_dagster.compiler.session import PROGRESS_TAG
from noetl_dagster.process.event_loop import background_loop, run_sync
from noetl_dagster.resources.engines import EngineProvider
from tests.playbooks import playbook
from tests.waiting import until_now

from .test_jobs import Launch

PLAYBOOK = """
workload: {gate: ""}
workflow:
  - step: fan
    loop: {in: "{{ range(20) }}", iterator: n}
    spec: {loop_mode: fanout, fanout: {max_groups: 2, max_concurrent: 10, max_shard_retries: 0, allow_partial: true}}
    tool:
      kind: python
      input: {n: "{{ n }}", gate: "{{ gate }}"}
      code: |
        import pathlib, time
        time.sleep(0.1 * (n % 10))
        while n >= 8 and not pathlib.Path(gate).exists():
            time.sleep(0.02)
        if n == 3:
            raise ValueError("spoilt")
"""


def test_a_run_says_how_far_it_is(
    launch: Launch, dagster_instance: DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(session, "COUNTING_SHARE", 1)
    gate, said = tmp_path / "gate", []

    def told() -> bool:
        said.extend(run.tags.get(PROGRESS_TAG, "") for run in dagster_instance.get_runs())
        return bool(re.fullmatch(r"fan: 8 of 20 \(40 %\) done, 1 failed, [0-9.]+/s, .+ left", said[-1] if said else ""))

    def open_gate() -> None:
        try:
            until_now(told)
        finally:
            gate.touch()

    watcher = threading.Thread(target=open_gate)
    watcher.start()
    run = launch(PLAYBOOK, gate=str(gate))
    watcher.join()
    assert run.result.success
    ended = dagster_instance.get_run_by_id(run.result.run_id)
    assert ended is not None
    assert ended.tags[PROGRESS_TAG] == "fan: 20 of 20 (100 %) done, 1 failed"

    metadata = {
        event.step_key.partition(".")[2]: event.event_specific_data.metadata
        for event in run.result.all_events
        if event.is_successful_output and event.event_specific_data.output_name in ("expanded", "done")
    }
    assert {key: value.value for key, value in metadata["fan"].items()} == {"shards": 20, "groups": 2}
    first, second = metadata["fan_group[0000000_0000009]"], metadata["fan_group[0000010_0000019]"]
    assert [first[key].value for key in ("done", "failed", "skipped")] == [9, 1, 0]
    assert [second[key].value for key in ("done", "failed", "skipped")] == [10, 0, 0]
    assert first["shards a second"].value > 0
    [made] = run.result.get_asset_materialization_events()
    assert made.asset_key == AssetKey(["tests", "sample", "fan"])
    asset = made.materialization.metadata
    assert [asset[key].value for key in ("total", "done", "failed")] == [20, 19, 1]
    assert asset["shards a second"].value > 0
    assert asset["seconds"].value > 0


def test_the_command_line_says_how_far_it_is(
    noetl: EngineProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.05)
    engine, gate, said = noetl.engine(), tmp_path / "gate", []
    parsed = playbook(PLAYBOOK)
    execution = run_sync(engine.lifecycle.create(parsed, {"gate": str(gate)}))

    def told(pattern: str) -> bool:
        said.append(capsys.readouterr().err)
        return re.search(pattern, "".join(said)) is not None

    work = asyncio.run_coroutine_threadsafe(engine.walker.run(execution), background_loop())
    with progress.showing(engine, execution.id):
        until_now(lambda: told(r"fan: running 7/20, 1 failed, [0-9.]+/s, .+ left"))
        gate.touch()
        work.result()
    assert told(r"fan: completed 19/20, 1 failed\n"), "".join(said)
