"""A folder of playbooks as a team may have them, and as many graph-backed assets in plain Dagster.

Eight steps each: a fan-out in every third and a loop in the others, two branches that meet, checks, a schedule, daily
partitions in every fourth, and what an earlier playbook made.
"""

from __future__ import annotations

from pathlib import Path

IN_A_FOLDER = 50

_PARTITIONS = '  partitions: {kind: daily, start: "2026-01-01", workload: day}\n'
_FANOUT = "    spec: {loop_mode: fanout, fanout: {max_groups: 4, max_concurrent: 16, allow_partial: true}}\n"
_LOOP = "    spec: {loop: {mode: parallel, max_in_flight: 8}}\n"
_FROM = "    from: {{earlier: team_{folder}/flow_{earlier}/publish}}\n"

_PLAYBOOK = """\
apiVersion: noetl.io/v2
kind: Playbook
metadata:
  name: flow_{number}
  path: team_{folder}/flow_{number}
  description: Fetches what is new of source {number}, cleans it and publishes it
  tags: [flow, "source_{number}"]
dagster:
  group: team_{folder}
  owners: ["team:team_{folder}"]
  tags: {{domain: health}}
{partitions}  schedules:
    - {{name: nightly, cron: "{minute} 2 * * *", timezone: Europe/Berlin, workload: {{full: true}}}}
workload:
  day: null
  full: false
  page_size: 100
  api: records_api
  pg_auth: pg_work
  facilities: [berlin, hamburg]
workflow:
  - step: start
    desc: The batches to fetch
    tool:
      kind: postgres
      auth: "{{{{ pg_auth }}}}"
      command: |
        SELECT facility_id, min(patient_id) AS first_patient, max(patient_id) AS last_patient
        FROM flow_{number}.patient WHERE day = '{{{{ day }}}}'
        GROUP BY facility_id ORDER BY facility_id LIMIT {{{{ page_size | int }}}};
    next: [fetch]
  - step: fetch
    desc: Every page of every batch
    loop: {{in: "{{{{ start.rows }}}}", iterator: batch}}
{spread}    tool:
      - name: page
        kind: http
        method: GET
        auth: "{{{{ api }}}}"
        url: "/facilities/{{{{ batch.facility_id }}}}/sources/{number}"
        params: {{page: "{{{{ iter.page | default(1) }}}}", pageSize: "{{{{ page_size }}}}"}}
        spec:
          timeout: 10
          policy:
            rules:
              - when: "{{{{ output.status == 'error' and error.retryable }}}}"
                then: {{do: retry, attempts: 6, backoff: exponential, delay: 0.05}}
              - when: "{{{{ output.status == 'error' }}}}"
                then: {{do: fail}}
              - else:
                  then: {{do: continue, set: {{iter.page: "{{{{ (iter.page | default(1)) + 1 }}}}"}}}}
      - name: note
        kind: python
        input: {{rows: "{{{{ page.data }}}}"}}
        code: |
          result = {{"rows": rows, "count": len(rows)}}
    next: [persons, visits]
  - step: persons
    desc: Who was seen
    asset: {{kinds: [parquet], code_version: "{number}"}}
    checks:
      - {{unique: person_id, blocking: true}}
      - {{not_null: [person_id, born]}}
    tool:
      kind: python
      input: {{pages: "{{{{ fetch.results }}}}"}}
      code: |
        result = [{{"person_id": n, "born": 1970 + n % 50}} for n, page in enumerate(pages)]
    next: [joined]
  - step: visits
    desc: When they came
    tool:
      kind: python
      input: {{pages: "{{{{ fetch.results }}}}"}}
      code: |
        result = [{{"person_id": n, "visits": n % 7}} for n, page in enumerate(pages)]
    next: [joined]
  - step: joined
    asset: false
    tool:
      kind: python
      input: {{persons: "{{{{ persons }}}}", visits: "{{{{ visits }}}}"}}
      code: |
        result = [{{**a, **b}} for a, b in zip(persons, visits)]
    next:
      spec: {{mode: exclusive}}
      arcs:
        - {{step: clean, when: "{{{{ joined | length > 0 }}}}"}}
        - {{step: report}}
  - step: clean
    desc: Without what is implausible
    checks:
      - {{between: {{visits: [0, 365]}}, severity: warn}}
    tool:
      kind: python
      input: {{rows: "{{{{ joined }}}}"}}
      code: |
        result = [row for row in rows if row["visits"] >= 0]
    next: [publish]
  - step: publish
    desc: What others read
{reads}    asset: {{kinds: [table], owners: ["team:team_{folder}"], metadata: {{retention: 30}}}}
    checks:
      - {{name: enough, when: "{{{{ output | length >= 1 }}}}"}}
    tool:
      kind: python
      input: {{rows: "{{{{ clean }}}}"}}
      code: |
        result = rows
    next: [report]
  - step: report
    tool:
      kind: http
      method: POST
      auth: "{{{{ api }}}}"
      url: "/reports/{number}"
      body: {{day: "{{{{ day }}}}", full: "{{{{ full }}}}"}}
"""

_BY_HAND = '''\
"""The same number of graph-backed assets in plain Dagster, as somebody would write them."""

from dagster import (
    AssetCheckSpec, AssetKey, AssetsDefinition, AssetSelection, DailyPartitionsDefinition, Definitions,
    DependencyDefinition, GraphDefinition, In, InputMapping, MultiDependencyDefinition, NodeInvocation, Nothing,
    OpDefinition, Out, Output, OutputMapping, ScheduleDefinition, define_asset_job,
)

COUNT = {count}
IN_A_FOLDER = {in_a_folder}
DAILY = DailyPartitionsDefinition("2026-01-01")
CHECKS = {{"persons": ["unique_person_id", "not_null"], "clean": ["between_visits"], "publish": ["enough"]}}


ARCS = {{
    "start": [], "fetch": ["start"], "persons": ["fetch"], "visits": ["fetch"], "joined": ["persons", "visits"],
    "clean": ["joined"], "publish": ["clean"], "report": ["joined", "publish"],
}}
SHOWN = [name for name in ARCS if name != "joined"]


def key(number, name):
    return AssetKey([f"team_{{number // IN_A_FOLDER}}", f"flow_{{number}}", name])


def step(number, name, after, reads):
    def compute(context, inputs):
        yield Output({{"step": name}}, "result")

    outs = {{"result": Out(is_required=False)}}
    outs |= {{f"check_{{name}}_{{one}}": Out(Nothing, is_required=False) for one in CHECKS.get(name, [])}}
    return OpDefinition(
        name=f"flow_{{number}}__{{name}}",
        compute_fn=compute,
        ins={{one: In(Nothing) for one in (["after"] if after else []) + reads}},
        outs=outs,
        tags={{"dagster/kind/python": ""}},
        description=f"step {{name}} of flow_{{number}}",
    )


def flow(number):
    name, folder, reads = f"flow_{{number}}", f"team_{{number // IN_A_FOLDER}}", ["earlier"] if number else []
    checks = [
        AssetCheckSpec(check, asset=key(number, one)) for one, several in CHECKS.items() for check in several
    ]
    definition = GraphDefinition(
        name=f"{{name}}_graph",
        node_defs=[step(number, one, after, reads if one == "publish" else []) for one, after in ARCS.items()],
        dependencies={{
            NodeInvocation(f"{{name}}__{{one}}", alias=one): {{
                "after": MultiDependencyDefinition([DependencyDefinition(before, "result") for before in after])
            }} if after else {{}}
            for one, after in ARCS.items()
        }},
        input_mappings=[
            InputMapping(graph_input_name=one, mapped_node_name="publish", mapped_node_input_name=one)
            for one in reads
        ],
        output_mappings=[
            OutputMapping(
                graph_output_name=f"result__{{one}}", mapped_node_name=one, mapped_node_output_name="result"
            )
            for one in SHOWN
        ] + [
            OutputMapping(
                graph_output_name=spec.get_python_identifier(),
                mapped_node_name=spec.asset_key.path[-1],
                mapped_node_output_name=f"check_{{spec.asset_key.path[-1]}}_{{spec.name}}",
            )
            for spec in checks
        ],
    )
    deps = {{}}
    for one in SHOWN:
        before = {{other for after in ARCS[one] for other in (ARCS["joined"] if after == "joined" else [after])}}
        deps[f"result__{{one}}"] = {{key(number, other) for other in before}}
    if reads:
        deps["result__publish"].add(key(number - 1, "publish"))
    assets = AssetsDefinition.from_graph(
        definition,
        keys_by_input_name={{"earlier": key(number - 1, "publish")}} if reads else {{}},
        keys_by_output_name={{f"result__{{one}}": key(number, one) for one in SHOWN}},
        internal_asset_deps=deps,
        partitions_def=DAILY if number % 4 == 0 else None,
        group_names_by_output_name={{f"result__{{one}}": folder for one in SHOWN}},
        owners_by_output_name={{f"result__{{one}}": [f"team:{{folder}}"] for one in SHOWN}},
        tags_by_output_name={{f"result__{{one}}": {{"domain": "health"}} for one in SHOWN}},
        check_specs=checks,
    )
    job = define_asset_job(name, selection=AssetSelection.assets(*assets.keys))
    schedule = ScheduleDefinition(
        name=f"{{name}}_nightly", job=job, cron_schedule=f"{{number % 60}} 2 * * *",
        execution_timezone="Europe/Berlin",
    )
    return assets, job, schedule


found = [flow(number) for number in range(COUNT)]
defs = Definitions(
    assets=[one for one, _, _ in found], jobs=[one for _, one, _ in found], schedules=[one for _, _, one in found]
)
'''


def write_playbooks(folder: Path, count: int) -> None:
    """Playbooks ``flow_0`` to ``flow_<count - 1>``, below folders of teams."""
    for number in range(count):
        team = number // IN_A_FOLDER
        earlier = number - 1
        text = _PLAYBOOK.format(
            number=number,
            folder=team,
            minute=number % 60,
            partitions=_PARTITIONS if number % 4 == 0 else "",
            spread=_FANOUT if number % 3 == 0 else _LOOP,
            reads=_FROM.format(folder=earlier // IN_A_FOLDER, earlier=earlier) if number else "",
        )
        place = folder / f"team_{team}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"flow_{number}.yaml").write_text(text)


def write_by_hand(folder: Path, count: int) -> None:
    """The module ``by_hand`` in a folder."""
    (folder / "by_hand.py").write_text(_BY_HAND.format(count=count, in_a_folder=IN_A_FOLDER))
