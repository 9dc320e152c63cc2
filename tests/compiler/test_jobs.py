"""A playbook's job in Dagster: joins, skips, fan-outs and cycles are those of the language."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from dagster import AssetKey, DagsterInstance

from noetl_dagster.events.state import ExecutionStatus
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.resources.engines import EngineProvider
from tests.definitions import definitions_of
from tests.playbooks import playbook, text_of

from .conftest import DagsterRunResult

Launch = Callable[..., DagsterRunResult]


def test_arcs_become_tokens_and_results_assets(launch: Launch) -> None:
    run = launch(
        """
        workload: {n: 1}
        workflow:
          - step: start
            tool: {kind: python, input: {n: "{{ n }}"}, code: "result = {'n': n}"}
            next:
              spec: {mode: inclusive}
              arcs:
                - {step: small, when: "{{ start.n < 5 }}"}
                - {step: large, when: "{{ start.n >= 5 }}"}
                - {step: always}
          - {step: small, tool: {kind: noop}, next: [join]}
          - {step: large, tool: {kind: noop}, next: [join]}
          - {step: always, tool: {kind: noop}, next: [join]}
          - step: join
            tool: {kind: python, input: {n: "{{ start.n }}"}, code: "result = n * 2"}
        """,
        n=3,
    )
    assert run.result.success
    assert run.state.status is ExecutionStatus.COMPLETED
    assert run.state.latest["join"].envelope["data"] == 6
    made = {event.asset_key for event in run.result.get_asset_materialization_events()}
    assert made == {AssetKey(["tests", "sample", step]) for step in ("start", "small", "always", "join")}


def test_a_fan_out_of_nothing_goes_on(launch: Launch) -> None:
    run = launch(
        """
        workflow:
          - step: start
            loop: {in: [], iterator: n}
            spec: {loop_mode: fanout}
            tool: {kind: noop}
            next:
              arcs: [{step: end, when: "{{ fanin.total == 0 }}"}]
          - {step: end, tool: {kind: noop}}
        """
    )
    assert run.result.success
    assert run.state.status is ExecutionStatus.COMPLETED
    assert "end" in run.state.latest


def test_a_cycle_is_one_op(launch: Launch) -> None:
    run = launch(
        """
        workflow:
          - {step: start, tool: {kind: noop}, set: {ctx.n: 0}, next: [work]}
          - {step: work, tool: {kind: noop}, set: {ctx.n: "{{ ctx.n + 1 }}"}, next: [check]}
          - step: check
            tool: {kind: noop}
            next:
              arcs: [{step: work, when: "{{ ctx.n < 3 }}"}, {step: end}]
          - {step: end, tool: {kind: python, input: {n: "{{ ctx.n }}"}, code: "result = n"}}
        """
    )
    assert run.result.success
    assert run.state.latest["end"].envelope["data"] == 3
    assert run.state.visits["work"] == 3


def test_an_unhandled_failure_fails_the_run_and_names_the_step(launch: Launch) -> None:
    run = launch(
        """
        workflow:
          - {step: start, tool: {kind: noop}, next: [bad]}
          - {step: bad, tool: {kind: python, code: "raise ValueError('spilled')"}, next: [end]}
          - {step: end, tool: {kind: noop}}
        """
    )
    assert not run.result.success
    assert run.state.status is ExecutionStatus.FAILED
    assert "spilled" in (run.state.error or "")
    failure = next(event for event in run.result.all_events if event.is_step_failure)
    assert failure.step_key == "sample_playbook.bad"
    assert "sample.yaml" in str(failure.event_specific_data)
    shown = failure.step_failure_data.user_failure_data
    assert shown is not None
    assert "spilled" in str(shown.metadata["error"].value)


def test_the_run_of_a_lenient_playbook_shows_its_warnings(
    noetl: EngineProvider, dagster_instance: DagsterInstance
) -> None:
    steps = """
        workflow:
          - {step: start, tool: {kind: noop}, colour: red, next: [odd]}
          - {step: odd, tool: {kind: "quantum!{{ x }}"}}
        """
    lenient = parse_playbook(text_of("sample", steps), lenient=True)
    job = definitions_of([lenient], noetl).resolve_job_def("sample")

    result = job.execute_in_process(instance=dagster_instance, raise_on_error=False)

    assert not result.success
    logged = [one.user_message for one in dagster_instance.all_logs(result.run_id) if one.level == logging.WARNING]
    assert len(logged) == 2
    assert logged[0].startswith("line 6: step 'start': unknown key 'colour'")
    failure = next(event for event in result.all_events if event.is_step_failure)
    assert "tool kind 'quantum!{{ x }}' is not supported" in str(failure.event_specific_data)


def test_playbooks_with_steps_of_the_same_name_live_together(noetl: EngineProvider) -> None:
    text = "workflow: [{step: start, tool: {kind: noop}, next: [end]}, {step: end, tool: {kind: noop}}]"
    playbooks = [playbook(text, name) for name in ("first", "second")]
    repository = definitions_of(playbooks, noetl).get_repository_def()
    assert {"first", "second"} <= set(repository.job_names)
    assert repository.get_all_jobs()


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_tags_of_a_playbook_are_tags_of_its_job(noetl: EngineProvider) -> None:
    metadata = "metadata: {name: tagged, path: tests/tagged, tags: [nightly, data quality, a/b]}"
    text = f"apiVersion: noetl.io/v2\nkind: Playbook\n{metadata}\nworkflow: [{{step: start, tool: {{kind: noop}}}}]"
    definitions = definitions_of([parse_playbook(text)], noetl)
    tags = definitions.resolve_job_def("tagged").tags
    assert {"noetl_tag/nightly", "noetl_tag/data_quality", "noetl_tag/a_b"} <= tags.keys()


def test_materialisations_say_how_far_a_step_has_loaded(launch: Launch, dagster_instance: DagsterInstance) -> None:
    text = """
workload: {new: [1, 2]}
workflow:
  - step: load
    state: {key: n, initial: 0}
    tool: {kind: python, input: {new: "{{ new }}"}, code: "result = [{'n': n} for n in new]"}
"""
    shown = []
    for new in ([1, 2], [5], []):
        assert launch(text, new=new).result.success
        event = dagster_instance.get_latest_materialization_event(AssetKey(["tests", "sample", "load"]))
        assert event is not None
        assert event.asset_materialization is not None
        metadata = event.asset_materialization.metadata
        shown.append((metadata["previous_watermark"].value, metadata["watermark"].value))
    assert shown == [(0, 2), (2, 5), (5, 5)]
