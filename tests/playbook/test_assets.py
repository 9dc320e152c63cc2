"""Dagster's words in a playbook: what they mean, and what is refused with its place and remedy."""

from __future__ import annotations

from textwrap import indent

import pytest
from dagster import ScheduleDefinition
from hypothesis import given
from hypothesis import strategies as st

from noetl_dagster.playbook.assets import (
    AutomationKind,
    CheckKind,
    DagsterSpec,
    PartitionKind,
    ScheduleStatus,
    Severity,
)
from noetl_dagster.playbook.dialects.words import cron_wrong
from noetl_dagster.playbook.loader import parse_playbook, parse_report
from tests.playbook.playbooks import HEAD, errors_of, load, step_of, warnings_of

STEP = "- {step: start, tool: {kind: noop}}"
WORKLOAD = "workload: {day: '2026-01-01', facility: berlin}\n"


def dagster_of(block: str, workload: str = WORKLOAD) -> DagsterSpec:
    return load(STEP, root=f"{workload}dagster:\n{indent(block.strip(), '  ')}\n").dagster


def refused(block: str) -> str:
    """The errors of a ``dagster`` block."""
    return "\n".join(errors_of(STEP, root=f"{WORKLOAD}dagster:\n{indent(block.strip(chr(10)), '  ')}\n"))


def refused_step(fields: str) -> str:
    return "\n".join(errors_of("- step: start\n  tool: {kind: noop}\n" + indent(fields, "  ")))


def test_where_a_playbook_belongs_may_be_said_by_its_metadata() -> None:
    spec = dagster_of(
        'group: "clinical/{{ metadata.name }}"\n'
        'owners: ["team:data", ana@example.org]\n'
        "tags: {domain: health, reviewed: true}\n"
        "pools: {api: 16}"
    )
    assert spec.group == "clinical/sample"
    assert spec.owners == ("team:data", "ana@example.org")
    assert spec.tags == {"domain": "health", "reviewed": "true"}
    assert spec.pools == {"api": 16}


def test_schedules() -> None:
    nightly, hourly = dagster_of(
        "schedules:\n"
        '  - {name: nightly, cron: "0 2 * * *", timezone: Europe/Berlin, workload: {full: true}, status: running}\n'
        '  - {cron: "@hourly", status: off}'
    ).schedules
    assert (nightly.name, nightly.cron, nightly.timezone) == ("nightly", "0 2 * * *", "Europe/Berlin")
    assert nightly.workload == {"full": True}
    assert nightly.status is ScheduleStatus.RUNNING
    assert (hourly.name, hourly.status) == ("schedule_2", ScheduleStatus.STOPPED)


def test_the_metadata_may_say_schedule_and_partitions_in_short() -> None:
    head = HEAD.replace("}", ', schedule: "0 2 * * *", partitions: {static: [a, b]}}')
    spec = parse_playbook(f"{head}workflow:\n  {STEP}\n").dagster
    assert [one.cron for one in spec.schedules] == ["0 2 * * *"]
    assert [one.keys for one in spec.partitions] == [("a", "b")]


def test_what_the_metadata_says_in_other_words_is_left_out_with_a_warning() -> None:
    head = HEAD.replace("}", ", schedule: hourly, partitions: {by: day}}")
    playbook, problems = parse_report(f"{head}workflow:\n  {STEP}\n", file="x.yaml")
    assert playbook is not None
    assert playbook.dagster == DagsterSpec()
    said = "\n".join(map(str, problems))
    assert "x.yaml:3:56: warning: metadata: schedule 'hourly' is no cron line" in said
    assert "kind is missing: hourly, daily" in said
    assert {problem.severity for problem in problems} == {"warning"}


def test_one_dimension_of_partitions() -> None:
    (daily,) = dagster_of('partitions: {kind: daily, start: "2026-01-01", workload: day}').partitions
    assert (daily.name, daily.kind, daily.start, daily.workload) == (
        "partition",
        PartitionKind.DAILY,
        "2026-01-01",
        "day",
    )
    (static,) = dagster_of("partitions: {static: [a, 1]}").partitions
    assert (static.kind, static.keys, static.workload) == (PartitionKind.STATIC, ("a", "1"), None)
    (dynamic,) = dagster_of("partitions: {dynamic: customers}").partitions
    assert (dynamic.kind, dynamic.dynamic) == (PartitionKind.DYNAMIC, "customers")


def test_two_dimensions_go_to_the_workload_keys_that_they_are_called_by() -> None:
    day, place = dagster_of(
        "partitions:\n"
        "  two:\n"
        '    day: {kind: weekly, start: "2026-01-01T06:00", timezone: Europe/Berlin}\n'
        "    place: {static: [berlin, bonn], workload: facility}"
    ).partitions
    assert (day.name, day.kind, day.workload, day.timezone) == ("day", PartitionKind.WEEKLY, "day", "Europe/Berlin")
    assert (place.name, place.workload) == ("place", "facility")


def test_automation_and_freshness() -> None:
    eager = dagster_of("automation: eager").automation
    cron = dagster_of('automation: {on_cron: "0 2 * * *", timezone: Europe/Berlin}').automation
    assert eager is not None
    assert eager.kind is AutomationKind.EAGER
    assert cron is not None
    assert (cron.kind, cron.cron, cron.timezone) == (AutomationKind.ON_CRON, "0 2 * * *", "Europe/Berlin")
    fresh = dagster_of("freshness: {warn_after: 26h, fail_after: 50h}").freshness
    assert fresh is not None
    assert (fresh.warn_after, fresh.fail_after) == (26 * 3600, 50 * 3600)


def test_a_schedules_workload_names_keys_of_the_playbook() -> None:
    root = 'workload: {full: false}\ndagster: {schedules: {cron: "0 2 * * *", workload: {ful: true}}}\n'
    [warning] = warnings_of(STEP, root=root)
    assert "schedule 'schedule_1': the workload has no key 'ful'; did you mean 'full'?" in warning
    [error] = errors_of(STEP, root=root.replace("ful: true", 'full: "no"'))
    assert "schedule 'schedule_1': workload.full is the text 'no', but its default is true or false" in error


def test_observed_sources() -> None:
    files, table = dagster_of(
        "observe:\n"
        '  - {asset: lake/raw, object: "s3://lake/raw/*.parquet", every: 10m}\n'
        "  - {asset: [shop, orders], table: public.orders, auth: pg}"
    ).observe
    assert (files.asset, files.object, files.every) == (("lake", "raw"), "s3://lake/raw/*.parquet", 600)
    assert (table.asset, table.table, table.auth) == (("shop", "orders"), "public.orders", "pg")


def test_a_step_without_words_of_its_own_is_an_asset() -> None:
    step = step_of(STEP)
    assert step.is_asset
    assert step.asset.key is None
    assert not step_of("- {step: start, tool: {kind: noop}, asset: false}").is_asset
    assert step_of("- {step: start, tool: {kind: noop}, asset: true}").is_asset


def test_an_asset() -> None:
    asset = step_of(
        """
        - step: start
          tool: {kind: noop}
          asset:
            key: "{{ metadata.name }}/patients"
            description: who there is
            owners: ["team:data"]
            kinds: [Parquet]
            tags: [gold]
            metadata: {rows: 3, from: "{{ metadata.path }}"}
            code_version: 3
        """
    ).asset
    assert asset.key == ("sample", "patients")
    assert asset.description == "who there is"
    assert asset.owners == ("team:data",)
    assert asset.kinds == ("parquet",)
    assert asset.tags == {"gold": ""}
    assert asset.metadata == {"rows": 3, "from": "tests/sample"}
    assert asset.code_version == "3"


def test_checks() -> None:
    checks = step_of(
        """
        - step: start
          tool: {kind: noop}
          checks:
            - {name: enough, when: "{{ output.row_count >= 10 }}", severity: warn}
            - {unique: [facility, patient], blocking: true}
            - {not_null: patient}
            - {name: sex, accepted: {sex: [F, M, null]}}
            - {name: age, between: {age: [0, 120], weight: [0, null]}}
            - {row_count: 10}
            - {name: most, row_count: {max: 20}}
            - {fresh: {at: 26h}}
        """
    ).checks
    assert [(one.name, one.kind, one.asks) for one in checks] == [
        ("enough", CheckKind.WHEN, "{{ output.row_count >= 10 }}"),
        ("unique_facility_patient", CheckKind.UNIQUE, ("facility", "patient")),
        ("not_null_patient", CheckKind.NOT_NULL, ("patient",)),
        ("sex", CheckKind.ACCEPTED, {"sex": ["F", "M", None]}),
        ("age", CheckKind.BETWEEN, {"age": [0, 120], "weight": [0, None]}),
        ("row_count", CheckKind.ROW_COUNT, [10, None]),
        ("most", CheckKind.ROW_COUNT, [None, 20]),
        ("fresh_at", CheckKind.FRESH, {"at": 26 * 3600}),
    ]
    assert [one.severity for one in checks[:2]] == [Severity.WARN, Severity.ERROR]
    assert [one.blocking for one in checks[:2]] == [False, True]


def test_the_oldest_shape_has_its_tools_from_in_the_step() -> None:
    step = step_of(
        "- {step: start, tool: spark, sql: SELECT 1, from: {pages: other}}\n- {step: other, tool: {kind: noop}}"
    )
    assert step.sources == {}
    assert step.tasks[0].config["from"] == {"pages": "other"}


def test_what_a_step_reads() -> None:
    sources = step_of(
        """
        - step: start
          tool: {kind: noop}
          from:
            raw: {asset: "lake/{{ metadata.name }}", partition: latest}
            patients: warehouse/patients
        """
    ).sources
    assert (sources["raw"].asset, sources["raw"].partition) == (("lake", "sample"), "latest")
    assert (sources["patients"].asset, sources["patients"].partition) == (("warehouse", "patients"), "same")


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("grup: x", "unknown key 'grup'; did you mean 'group'?"),
        ("group: a b", "group 'a b' may hold letters, digits, underscores and slashes between them only"),
        ("group: '{{ workload.day }}'", "group may use metadata only"),
        ("owners: [ana]", "owner 'ana' is neither 'team:<name>' nor an address"),
        ("tags: {'a b': c}", "tag a b: 'c': a tag holds letters"),
        ("tags: 3", "tags must be a mapping (key: value) or a list of words, found 3"),
        ("pools: {api: many}", "pools.api: input should be a valid integer, found the text 'many'"),
        ("pools: {api: 0}", "pools.api: input should be greater than or equal to 1, found 0"),
        ("schedules: [{name: a}]", "schedule 'a': 'cron' is missing"),
        ("schedules: [{cron: hourly}]", "cron 'hourly' is no cron line"),
        ("schedules: [{cron: '61 * * * *'}]", "cron '61 * * * *' is no cron line"),
        (
            "schedules: [{name: a, cron: '@daily'}, {name: a, cron: '@daily'}]",
            "two schedules are called 'a'; rename one",
        ),
        (
            "schedules: [{cron: '@daily', timezone: Berlin}]",
            "timezone 'Berlin' is unknown; use a name such as Europe/Berlin",
        ),
        ("schedules: [{cron: '@daily', status: maybe}]", "status is 'maybe'; use one of running, stopped"),
        ("partitions: {start: '2026-01-01'}", "kind is missing: hourly, daily"),
        ("partitions: {kind: daily}", "daily partitions need 'start'"),
        ("partitions: {kind: daily, start: yesterday}", "start 'yesterday' is no date"),
        ("partitions: {kind: daily, start: '2026-01-01T00:00+01:00'}", "has an offset; leave it out"),
        (
            "partitions: {kind: daily, start: '2026-01-02', end: '2026-01-01'}",
            "end 2026-01-01 is not after start 2026-01-02",
        ),
        ("partitions: {kind: daily, static: [a]}", "kind is daily, and 'static' says otherwise"),
        ("partitions: {kind: dynamic}", "dynamic needs a name of the set of keys"),
        ("partitions: {static: []}", "static must be a list of keys, found nothing"),
        ("partitions: {static: [a, a]}", "static holds a twice; keep one"),
        ("partitions: {static: [a], workload: dya}", "the workload has no key 'dya' for the partition"),
        ("partitions: {static: [a], start: '2026-01-01'}", "unknown key 'start'"),
        ("partitions: {two: {day: {static: [a]}}}", "two takes two dimensions, found 1"),
        ("automation: often", "automation is 'often'; use eager, on_missing or {on_cron:"),
        ("freshness: {warn_after: 1h}", "freshness: 'fail_after' is missing"),
        ("freshness: {fail_after: 26}", "fail_after: input should be greater than or equal to 60, found 26"),
        ("freshness: {warn_after: 2h, fail_after: 1h}", "warn_after must be shorter than fail_after"),
        ("observe: [{object: x}]", "an observed source needs 'asset'"),
        ("observe: [{asset: a}]", "is either 'object' (a bucket's or a folder's) or 'table'"),
        ("observe: [{asset: a, object: 'ftp://host/raw'}]", "known are s3://, gs://, file:// and paths"),
        ("observe: [{asset: a, table: t, every: 0}]", "every: input should be greater than 0"),
    ],
)
def test_a_block_is_refused_with_its_remedy(block: str, said: str) -> None:
    errors = refused(block)
    assert said in errors
    assert errors.startswith("sample.yaml:6:"), errors


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("asset: yes please", "asset must be false or a mapping with key, owners"),
        ("asset: {keys: a}", "unknown key 'keys'"),
        ("asset: {key: {}}", "key is an asset's key, 'warehouse/patients' or [warehouse, patients]"),
        ("asset: {key: 'a/*'}", "key is an asset's key"),
        ("asset: {kinds: [a b]}", "kind 'a b' may hold letters"),
        ("checks: unique", "check 1: expected a mapping (key: value), found the text 'unique'"),
        ("checks: [{name: a}]", "a check asks one thing: when, unique,"),
        ("checks: [{unique: a, not_null: a}]", "found unique and not_null"),
        ("checks: [{uniqe: a}]", "unknown key 'uniqe'; did you mean 'unique'?"),
        ("checks: [{name: a b, unique: a}]", "name 'a b' may hold letters, digits and underscores only"),
        ("checks: [{unique: a}, {unique: a}]", "two checks are called 'unique_a'; rename one"),
        ("checks: [{accepted: {a: 3}}]", "accepted: a needs a list of values, found 3"),
        ("checks: [{accepted: [a]}]", "accepted is a mapping of column to what it asks, found a list"),
        ("checks: [{between: {a: [null, null]}}]", "between: a needs [lowest, highest]"),
        ("checks: [{row_count: -1}]", "row_count is no number of rows"),
        ("checks: [{row_count: {min: 5, max: 1}}]", "row_count is no number of rows"),
        ("checks: [{between: {age: [9, 1]}}]", "age has its bounds the wrong way round"),
        ("checks: [{row_count: many}]", "row_count is the lowest number of rows"),
        ("checks: [{fresh: 26h}]", "expected a mapping"),
        ("checks: [{fresh: {at: soon}}]", "at must be seconds or text such as '30s'"),
        ("checks: [{when: 3}]", "when is a template such as"),
        ("checks: [{unique: a, severity: bad}]", "severity is 'bad'; use one of warn, error"),
        ("from: [a]", "from must be a mapping (key: value), found a list"),
        ("from: {a: {partition: same}}", "'asset' is missing, the key of what is read"),
        ("from: {a: {asset: x, key: y}}", "unknown key 'key'"),
        ("from: {a: 3}", "expected a mapping (key: value), found 3"),
    ],
)
def test_a_step_is_refused_with_its_remedy(fields: str, said: str) -> None:
    assert said in refused_step(fields)


@pytest.mark.parametrize(
    "line",
    ["0 2 * * *", "*/10 0-6,22 1,15 jan-jun mon-fri", "@daily", "0 0 * * 7", "5/10 * * * *", "0 22-2 L * sat-sun"],
)
def test_lines_that_say_when(line: str) -> None:
    assert cron_wrong(line) is None


@pytest.mark.parametrize(
    "line",
    ["", "hourly", "0 2 * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *", "* * * * fry", "*/0 * * * *", "0 0 */00 * *",
     "@often", "a * * * *", "* * * * 8"],
)  # fmt: skip
def test_lines_that_do_not(line: str) -> None:
    assert "is no cron line" in str(cron_wrong(line))


NEVER = ["0 0 31 2 *", "0 0 30,31 feb *", "0 0 31 4,6,9,11 *", "5 4 30/1 2 sun"]


@pytest.mark.parametrize("line", NEVER)
def test_lines_that_never_come(line: str) -> None:
    (said,) = errors_of("- {step: start, tool: {kind: noop}}", root=f"dagster: {{schedules: [{{cron: '{line}'}}]}}\n")
    assert f"cron {line!r} never comes: none of its months has such a day" in said


@pytest.mark.parametrize(
    "line", ["0 0 29 2 *", "0 0 31 2,3 *", "0 0 L 2 *", "0 0 31 11-1 *", "0 0 30-2 feb *", "@monthly", "0 0 */30 * *"]
)
def test_lines_that_come_now_and_then(line: str) -> None:
    assert cron_wrong(line) is None


_FIELDS = [
    st.lists(
        st.builds(
            lambda start, end, step: f"{start}{end}{step}",
            st.integers(low, high),
            st.one_of(st.just(""), st.integers(low, high).map("-{}".format)),
            st.sampled_from(["", "/2", "/40"]),
        )
        | st.sampled_from(["*", "*/7"]),
        min_size=1,
        max_size=2,
    ).map(",".join)
    for low, high in ((0, 59), (0, 23), (28, 31), (2, 4), (0, 7))
]


@given(st.tuples(*_FIELDS).map(" ".join))
def test_dagster_takes_whatever_line_the_loader_takes(line: str) -> None:
    """No playbook that ``check`` passes meets a message of Dagster's about its cron line."""
    if cron_wrong(line) is None:
        assert ScheduleDefinition(name="any", job_name="any", cron_schedule=line).cron_schedule == line


def test_a_pool_that_nobody_declares() -> None:
    step = "- {step: start, tool: {kind: noop}, spec: {pool: apii}}"
    assert "no pool is called 'apii'; write dagster: {pools: {name: slots}}" in "\n".join(errors_of(step))
    assert "did you mean 'api'?" in "\n".join(errors_of(step, root="dagster: {pools: {api: 2}}\n"))
    assert step_of(step.replace("apii", "api"), root="dagster: {pools: {api: 2}}\n").spec.pool == "api"


def test_names_in_from_are_nobody_elses() -> None:
    taken = errors_of("- {step: start, tool: {kind: noop}, from: {start: a/b}}")
    assert "from 'start': a step is called so too; rename one of them" in "\n".join(taken)
    taken = errors_of("- {step: start, tool: {kind: noop}, from: {day: a/b}}", root=WORKLOAD)
    assert "the workload has a key 'day' too; call what is read otherwise" in "\n".join(taken)


def test_asset_in_templates_is_read_before_the_step() -> None:
    step = step_of(
        """- {step: start, tool: {kind: noop, input: {a: "{{ asset('x/y').n + asset('z', 'latest').n }}"}}}"""
    )
    assert {name: (one.asset, one.partition) for name, one in step.sources.items()} == {
        "asset:x/y@same": (("x", "y"), "same"),
        "asset:z@latest": (("z",), "latest"),
    }
    refused = errors_of("""- {step: start, tool: {kind: noop, input: {a: "{{ asset(key) }}"}}}""")
    assert "asset() takes a key as it is" in "\n".join(refused)


def test_a_table_that_is_called_asset_is_no_read() -> None:
    step = step_of(
        "- {step: start, tool: {kind: postgres, auth: pg, command: 'INSERT INTO asset(id) VALUES ({{ day }})'}}",
        root=WORKLOAD,
    )
    assert step.sources == {}
    step = step_of("""- {step: start, tool: {kind: noop, input: {a: "{{ ctx.my.asset('k') }}"}}}""")
    assert step.sources == {}


def test_plumbing_at_the_end_is_an_asset_of_dagster() -> None:
    flow = load("- {step: start, tool: {kind: noop}, next: [last]}\n- {step: last, asset: false, tool: {kind: noop}}")
    assert [step.is_asset for step in flow.steps] == [True, True]
    flow = load("- {step: start, asset: false, tool: {kind: noop}}")
    assert not flow.steps[0].is_asset
