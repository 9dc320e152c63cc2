"""Two runs at the same time in one process: each has its own assets, resources and jobs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dagster import AssetKey, AssetObservation, DagsterInstance, ResourceDefinition

from noetl_dagster.compiler.runs import EXECUTION_TAG
from noetl_dagster.process.event_loop import run_sync
from noetl_dagster.resources.engines import EngineProvider
from tests.definitions import definitions_of
from tests.playbooks import playbook
from tests.waiting import until_now

CHILD = """
apiVersion: noetl.io/v2
kind: Playbook
metadata: {name: child, path: tests/child}
workload: {folder: "", name: ""}
workflow:
  - step: start
    tool:
      kind: python
      input: {folder: "{{ folder }}", name: "{{ name }}"}
      code: |
        import pathlib, time
        pathlib.Path(folder, name + ".begun").touch()
        while not pathlib.Path(folder, name + ".go").exists():
            time.sleep(0.02)
        result = 1
    next: [{step: read}]
  - step: read
    from: {source: lake/source}
    tool: {kind: python, input: {source: "{{ source }}"}, code: "result = source['run']"}
"""
PARENT = """
workload: {name: ""}
workflow:
  - step: start
    tool: {kind: playbook, path: "FOLDER/child.yaml", input: {folder: "FOLDER", name: "{{ workload.name }}"}}
"""
SESSIONS = """
workload: {name: ""}
workflow:
  - step: start
    tool:
      - name: wait
        kind: python
        input: {folder: "FOLDER", name: "{{ workload.name }}"}
        code: |
          import pathlib, time
          pathlib.Path(folder, name + ".begun").touch()
          while not pathlib.Path(folder, name + ".go").exists():
              time.sleep(0.02)
          result = 1
      - {name: crunch, kind: spark, command: select 1}
"""


class Session:
    """Stands for a run's Spark session; it only says whose it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def spark_session(self) -> Any:
        raise RuntimeError(f"the session of run {self._name}")


class Flow:
    """Runs of one playbook, each with its own Dagster instance and resources."""

    def __init__(self, noetl: EngineProvider, folder: Path, text: str) -> None:
        self._noetl = noetl
        self._folder = folder
        self._playbook = playbook(text.replace("FOLDER", str(folder)))

    def run(self, name: str, instance: DagsterInstance) -> Any:
        """Runs the playbook, and returns the value of its step, or its error."""
        session = ResourceDefinition.hardcoded_resource(Session(name))
        job = definitions_of([self._playbook], self._noetl).resolve_job_def("sample")
        result = job.execute_in_process(
            run_config={"ops": {"sample_playbook": {"config": {"name": name}}}},
            instance=instance,
            resources={"pyspark": session},
            raise_on_error=False,
        )
        record = instance.get_run_by_id(result.run_id)
        assert record is not None
        state = run_sync(self._noetl.engine().runtime.load(int(record.tags[EXECUTION_TAG]))).state
        end = state.latest["start"].envelope
        return end["error"]["message"] if "error" in end else end["data"]

    def both(self) -> tuple[Any, Any]:
        """Lets the second run begin while the first waits, and the first go on before the second does."""
        with (
            ThreadPoolExecutor(2) as threads,
            DagsterInstance.ephemeral() as one,
            DagsterInstance.ephemeral() as other,
        ):
            begun = {}
            for name, instance in (("one", one), ("other", other)):
                source = AssetObservation(AssetKey(["lake", "source"]), metadata={"run": name})
                instance.report_runless_asset_event(source)
                begun[name] = running = threads.submit(self.run, name, instance)
                file = self._folder / f"{name}.begun"
                until_now(lambda running=running, file=file: running.done() or file.exists())  # type: ignore[misc]
            values = []
            for name, running in begun.items():
                (self._folder / f"{name}.go").touch()
                values.append(running.result())
            return values[0], values[1]


def test_each_run_reads_the_assets_of_its_own_instance(noetl: EngineProvider, tmp_path: Path) -> None:
    (tmp_path / "child.yaml").write_text(CHILD)
    assert Flow(noetl, tmp_path, PARENT).both() == ("one", "other")


def test_each_run_uses_its_own_spark_session(noetl: EngineProvider, tmp_path: Path) -> None:
    one, other = Flow(noetl, tmp_path, SESSIONS).both()
    assert "the session of run one" in one
    assert "the session of run other" in other
