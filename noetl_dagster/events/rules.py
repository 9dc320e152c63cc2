"""The rules that the events of an execution follow, as SQL, and a check of many executions in one snapshot.

A *subject* is a query with one row for each thing that rules are about, such as a command, with the facts about it. A
rule is a condition on these facts that no row may fulfil. So one pass over the log checks all rules of a subject, and
PostgreSQL holds the intermediate rows. Where a rule compares the time of two events, it compares their transactions:
ids of events contain the clocks of several machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from noetl_dagster.events.queries import end_of
from noetl_dagster.events.types import EventType

EXAMPLES = 20
"""Findings of one rule that are kept in full; the others are counted."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of the log or of the stores.

    Attributes:
        name: the name in reports, such as ``command.ended_twice``.
        what: what a finding means.
        fix: what to do about it.
        broken: SQL condition on the facts of the rule's subject; empty if another check finds it.
    """

    name: str
    what: str
    fix: str
    broken: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """A place where a rule is broken.

    Attributes:
        iteration: the index of the iteration, if it is about one.
        place: the event, command, loop, object or row.
    """

    rule: str
    execution_id: int | None
    step: str | None = field(default=None, compare=False)
    iteration: int | None = field(default=None, compare=False)
    place: str = ""


@dataclass(slots=True)
class Findings:
    """Findings by rule: how many there are, and the first of them."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[Finding]] = field(default_factory=dict)

    def add(self, finding: Finding, count: int = 1) -> None:
        """Adds a finding, or the first of several."""
        self.counts[finding.rule] = self.counts.get(finding.rule, 0) + count
        examples = self.examples.setdefault(finding.rule, [])
        if len(examples) < EXAMPLES:
            examples.append(finding)

    def merge(self, others: Findings) -> None:
        """Adds the findings of another check."""
        for rule, findings in others.examples.items():
            self.counts[rule] = self.counts.get(rule, 0) + others.counts[rule]
            examples = self.examples.setdefault(rule, [])
            examples.extend(findings[: EXAMPLES - len(examples)])

    def confirmed_by(self, later: Findings) -> Findings:
        """Returns those of a later check whose rule had one of the same findings before."""
        both = Findings()
        for rule, findings in later.examples.items():
            if set(findings) & set(self.examples.get(rule, ())):
                both.counts[rule], both.examples[rule] = later.counts[rule], findings
        return both


AGAIN = "run the execution again, or restore the log from a backup"
"""Remedy for broken events, which are never changed."""

_TYPES = ", ".join(f"'{type_}'" for type_ in EventType)
_ENDS = "'command.completed', 'command.failed', 'loop.shard.done', 'loop.shard.failed'"
_OF_COMMANDS = f"""{_ENDS}, 'command.issued', 'command.claimed', 'command.heartbeat', 'call.partial', 'loop.item',
    'loop.shard.enqueued', 'retry_sequence_completed'"""
_OF_STEPS = "'step.enter', 'step.exit', 'step.skipped', 'check.evaluated'"
_OF_LOOPS = "'loop.started', 'loop.fanout.started', 'loop.done', 'loop.fanin.completed'"
_OPENED = "'playbook.initialized', 'execution.resumed'"
_ENDED = "'playbook.completed', 'playbook.failed', 'execution.cancelled'"

# Every event.
_EVENT = f"""
SELECT execution_id, node_name AS step, current_index AS iteration, event_type || ' ' || event_id AS place,
       event_type NOT IN ({_TYPES}) AS unknown_type,
       jsonb_typeof(meta) <> 'object'
       OR event_type IN ({_OF_COMMANDS}) AND NOT (meta ?& '{{command_id,visit,attempt}}' AND node_name IS NOT NULL)
       OR event_type IN ({_OF_STEPS}) AND NOT (meta ?& '{{visit,epoch}}' AND node_name IS NOT NULL)
       OR event_type IN ({_OF_LOOPS}) AND NOT (meta ? 'loop_id' AND node_name IS NOT NULL)
       OR event_type IN ({_OPENED}, {_ENDED}) AND NOT meta ? 'epoch' AS incomplete,
       xact_id >= pg_snapshot_xmax(pg_current_snapshot()) AS future
FROM noetl.event WHERE execution_id = ANY($1::bigint[])"""

# Facts that are recorded at most once in an execution: the rule, what a second one means, the events and the key of the
# fact. The unique indexes of schema/010_events.sql refuse the second event.
_ONCE = (
    ("command.claimed_twice", "a claim of a command was recorded twice",
     "event_type = 'command.claimed' AND meta ? 'claim'", "meta ->> 'command_id' || ' claim ' || (meta ->> 'claim')"),
    ("loop.ended_twice", "a loop or fan-out ended twice",
     "event_type IN ('loop.done', 'loop.fanin.completed')", "'loop ' || (meta ->> 'loop_id')"),
    ("step.turn_twice", "two drivers took the same turn of a step", "event_type = 'step.enter' AND meta ? 'turn'",
     "concat_ws(' ', 'visit', meta ->> 'visit', 'epoch', meta ->> 'epoch', 'turn', meta ->> 'turn')"),
    ("step.ended_twice", "a visit of a step ended twice in an epoch", "event_type = 'step.exit'",
     "concat_ws(' ', 'visit', meta ->> 'visit', 'epoch', meta ->> 'epoch')"),
    ("check.evaluated_twice", "a check was evaluated twice in an epoch", "event_type = 'check.evaluated'",
     "concat_ws(' ', 'visit', meta ->> 'visit', 'epoch', meta ->> 'epoch', 'check', meta ->> 'check')"),
    ("chunk.stored_twice", "a chunk of a result was stored twice", "event_type = 'call.partial'",
     "concat_ws(' ', 'visit', meta ->> 'visit', 'chunk', meta ->> 'chunk_index')"),
    ("execution.opened_twice", "an epoch began twice", f"event_type IN ({_OPENED})", "'epoch ' || (meta ->> 'epoch')"),
    ("execution.ended_twice", "an epoch ended twice", f"event_type IN ({_ENDED})", "'epoch ' || (meta ->> 'epoch')"),
    ("execution.reported_twice", "an epoch was reported to Dagster twice", "event_type = 'execution.reported'",
     "'epoch ' || (meta ->> 'epoch')"),
)  # fmt: skip
_ONCE_RULE = " ".join(f"WHEN {which} THEN '{name}'" for name, _, which, _ in _ONCE)
_ONCE_KEY = " ".join(f"WHEN {which} THEN {key}" for _, _, which, key in _ONCE)

# Every fact that is recorded more than once.
_REPEATED = f"""
SELECT execution_id, min(step) AS step, min(iteration) AS iteration, place, fact
FROM (
    SELECT execution_id, node_name AS step, current_index AS iteration, CASE {_ONCE_RULE} END AS fact,
           CASE {_ONCE_KEY} END AS place,
           CASE WHEN event_type IN ({_OF_STEPS}, 'call.partial') THEN node_name END AS node
    FROM noetl.event WHERE execution_id = ANY($1::bigint[])) facts
WHERE fact IS NOT NULL
GROUP BY execution_id, fact, node, place HAVING count(*) > 1"""

# Every execution: its starts, epochs and ends. A watermark that a person sets has an event without an execution.
_EXECUTION = f"""
SELECT execution_id, NULL AS step, NULL::int AS iteration, '' AS place,
       count(*) FILTER (WHERE event_type = 'playbook.initialized') AS starts,
       count(DISTINCT meta ->> 'epoch') FILTER (WHERE event_type IN ({_OPENED})) AS epochs,
       COALESCE(max((meta ->> 'epoch')::int) FILTER (WHERE event_type IN ({_OPENED})), 0) AS last_epoch,
       COALESCE(max((meta ->> 'epoch')::int) FILTER (WHERE event_type IN ({_ENDED})), 0) AS last_end,
       count(*) FILTER (WHERE event_type IN ('playbook.completed', 'playbook.failed')) AS ends,
       count(*) FILTER (WHERE event_type IN ('workflow.completed', 'workflow.failed')) AS workflow_ends,
       bool_and(event_type = 'state.set') AS is_state
FROM noetl.event WHERE execution_id = ANY($1::bigint[])
GROUP BY execution_id"""

# Every event after a cancellation.
_LATE = """
SELECT execution_id, node_name AS step, current_index AS iteration, event_type || ' ' || event_id AS place,
       event_type IN ('command.issued', 'command.claimed', 'step.exit') AS gated,
       event_type = 'execution.resumed' AS resumed
FROM noetl.event
JOIN (SELECT execution_id, xact_id AS closed FROM noetl.event
      WHERE execution_id = ANY($1::bigint[]) AND event_type = 'execution.cancelled') gate USING (execution_id)
WHERE xact_id > closed"""

# How each execution ended last; null while it runs.
_OUTCOME = f"""
SELECT DISTINCT ON (execution_id) execution_id, NULLIF(event_type, 'execution.resumed') AS outcome FROM noetl.event
WHERE execution_id = ANY($1::bigint[]) AND event_type IN ('execution.resumed', {_ENDED})
ORDER BY execution_id, event.xact_id DESC, event_id DESC"""

# Every command. A shard of several commands ends with an event whose command has the suffix /shard. A command that a
# cancellation ends may not have been issued or claimed. A cursor loop whose driver dies claims other rows.
_COMMAND = f"""
WITH command AS MATERIALIZED (
    SELECT execution_id, min(node_name) AS step, min(current_index) AS iteration, meta ->> 'command_id' AS place,
           count(*) FILTER (WHERE event_type = 'command.issued') AS issued,
           count(*) FILTER (WHERE event_type = 'command.claimed') AS claims,
           count(*) FILTER (WHERE event_type IN ({_ENDS})) AS ends,
           count(*) FILTER (WHERE event_type IN ('command.completed', 'loop.shard.done')) AS completed,
           count(*) FILTER (WHERE event_type IN ({_ENDS})
               AND result #>> '{{context,error,code}}' IS DISTINCT FROM 'EXECUTION_CANCELLED') AS own_ends,
           max(CASE WHEN event_type = 'command.issued' THEN xact_id::text::numeric END) AS issued_at,
           min(CASE WHEN event_type IN ({_ENDS}) THEN xact_id::text::numeric END) AS ended_at,
           bool_or(COALESCE(meta ->> 'loop_id' IN (
               SELECT meta ->> 'loop_id' FROM noetl.event WHERE execution_id = ANY($1::bigint[])
                 AND event_type = 'loop.started' AND meta ->> 'mode' = 'cursor'), false)) AS is_of_cursor
    FROM noetl.event
    WHERE execution_id = ANY($1::bigint[]) AND meta ? 'command_id'
      AND event_type IN ({_ENDS}, 'command.issued', 'command.claimed')
    GROUP BY execution_id, meta ->> 'command_id'
), outcome AS MATERIALIZED ({_OUTCOME})
SELECT command.*, place LIKE '%/shard' AS is_shard, outcome
FROM command LEFT JOIN outcome USING (execution_id)"""

# Every visit of a step: its entries and ends in any epoch.
_VISIT = f"""
WITH outcome AS MATERIALIZED ({_OUTCOME})
SELECT execution_id, node_name AS step, NULL::int AS iteration, 'visit ' || (meta ->> 'visit') AS place,
       count(*) FILTER (WHERE event_type = 'step.enter') AS entries,
       count(*) FILTER (WHERE event_type = 'step.exit') AS exits, min(outcome) AS outcome
FROM noetl.event LEFT JOIN outcome USING (execution_id)
WHERE execution_id = ANY($1::bigint[]) AND event_type IN ('step.enter', 'step.exit')
GROUP BY execution_id, node_name, meta ->> 'visit'"""

# Every arc that fired in a completed execution, and the numbers of visits of its target.
_ARC = f"""
WITH outcome AS MATERIALIZED ({_OUTCOME})
SELECT execution_id, node_name AS step, NULL::int AS iteration, 'arc to ' || target AS place,
       EXISTS (SELECT FROM noetl.event entered
               WHERE entered.execution_id = event.execution_id AND entered.event_type = 'step.enter'
                 AND entered.node_name = target) AS entered
FROM noetl.event JOIN outcome USING (execution_id)
CROSS JOIN LATERAL jsonb_array_elements_text(
    CASE WHEN jsonb_typeof(meta -> 'fired') = 'array' THEN meta -> 'fired' ELSE '[]' END) AS target
WHERE execution_id = ANY($1::bigint[]) AND outcome = 'playbook.completed' AND event_type = 'step.exit'"""

# Every loop and fan-out, with its size where that is known beforehand, and the iterations of it and of the earlier runs
# of the same visit that ended.
_LOOP = f"""
WITH loop AS MATERIALIZED (
    SELECT execution_id, min(node_name) AS step, meta ->> 'loop_id' AS place, min(meta ->> 'visit') AS visit,
           count(*) FILTER (WHERE event_type IN ('loop.started', 'loop.fanout.started')) AS starts,
           count(*) FILTER (WHERE event_type IN ('loop.done', 'loop.fanin.completed')) AS ends,
           max(CASE WHEN event_type = 'loop.fanout.started' OR event_type = 'loop.started'
                    AND COALESCE(meta ->> 'mode', '') NOT IN ('cursor', 'stream')
               THEN COALESCE(meta ->> 'total_shards', meta ->> 'collection_size')::bigint END) AS size,
           max((meta ->> 'done')::bigint) AS done, max((meta ->> 'failed')::bigint) AS failed
    FROM noetl.event
    WHERE execution_id = ANY($1::bigint[]) AND meta ? 'loop_id' AND event_type IN ({_OF_LOOPS})
    GROUP BY execution_id, meta ->> 'loop_id'
), iteration AS MATERIALIZED (
    SELECT execution_id, step, visit, count(*) FILTER (WHERE ended) AS ended, max(current_index) AS last FROM (
        SELECT execution_id, node_name AS step, meta ->> 'visit' AS visit, current_index,
               bool_or(event_type IN ({_ENDS})) AS ended
        FROM noetl.event
        WHERE execution_id = ANY($1::bigint[]) AND meta ? 'loop_id' AND event_type IN ({_ENDS}, 'command.issued')
        GROUP BY execution_id, node_name, meta ->> 'visit', current_index) indexes
    GROUP BY execution_id, step, visit
), closed AS MATERIALIZED (
    SELECT DISTINCT execution_id, node_name AS step, meta ->> 'visit' AS visit FROM noetl.event
    WHERE execution_id = ANY($1::bigint[]) AND event_type = 'step.exit' AND status = 'COMPLETED'
)
SELECT loop.execution_id, step, NULL::int AS iteration, 'loop ' || place AS place, starts, loop.ends, size, done,
       failed, COALESCE(iteration.ended, 0) AS ended, iteration.last, closed.step IS NOT NULL AS is_closed,
       place = max(place) OVER (PARTITION BY loop.execution_id, step, loop.visit) AS is_last
FROM loop
LEFT JOIN iteration USING (execution_id, step, visit)
LEFT JOIN closed USING (execution_id, step, visit)"""

# Every row of the queue.
QUEUED = f"""
SELECT execution_id, node_name AS step, NULL::int AS iteration, command_id AS place,
       status = 'leased' AND lease_until < now() - interval '5 minutes' AS is_dead,
       (SELECT ended.event_id FROM noetl.event ended
        WHERE {end_of("queue.execution_id", "queue.command_id")} LIMIT 1) IS NOT NULL AS has_ended,
       (SELECT issued.event_id FROM noetl.event issued
        WHERE issued.execution_id = queue.execution_id AND issued.meta ->> 'command_id' = queue.command_id
          AND issued.meta ? 'command_id' AND issued.event_type = 'command.issued' LIMIT 1) IS NULL AS unissued
FROM noetl.queue WHERE execution_id = ANY($1::bigint[])"""

# Rows that cursor loops have claimed and not released; a reaper releases them when their lease has ended.
_FRAME = """
SELECT execution_id, step, first_index AS iteration, 'noetl.cursor_frame, loop ' || loop_id AS place,
       lease_until < now() - interval '5 minutes' AS is_overdue
FROM noetl.cursor_frame WHERE execution_id = ANY($1::bigint[])"""

# References of an execution's events to its own results, without the expired ones, that have no row. Results of others
# may have been deleted. A later event of the same kind replaces a result that was made again.
_REFERENCE = """
WITH named AS MATERIALIZED (
    SELECT event.execution_id, node_name, event_type, COALESCE(meta ->> 'visit', '') AS visit, current_index,
           COALESCE(current_index, -1) AS index, xact_id::text::numeric AS stored_at, one ->> 'ref' AS ref
    FROM noetl.event
    CROSS JOIN LATERAL (VALUES (result -> 'reference'), (context -> 'collection_reference')) AS named (one)
    WHERE event.execution_id = ANY($1::bigint[]) AND one IS NOT NULL
      AND (one ->> 'execution_id')::bigint = event.execution_id
      AND COALESCE((one ->> 'expires_at')::timestamptz > now(), true)
      AND (SELECT ref_id FROM noetl.result_ref WHERE ref_id = (one ->> 'ref_id')::bigint) IS NULL
), latest AS MATERIALIZED (
    SELECT execution_id, node_name, event_type, COALESCE(meta ->> 'visit', '') AS visit,
           COALESCE(current_index, -1) AS index, max(xact_id::text::numeric) AS last
    FROM noetl.event
    WHERE execution_id IN (SELECT execution_id FROM named) AND event_type IN (SELECT event_type FROM named)
    GROUP BY 1, 2, 3, 4, 5
)
SELECT execution_id, node_name AS step, current_index AS iteration, ref AS place, stored_at >= last AS unrecorded
FROM named JOIN latest USING (execution_id, node_name, event_type, visit, index)"""

# Every manifest, and its parts without a row. Parts with a time to live may have expired before it.
_MANIFEST = """
WITH whole AS MATERIALIZED (
    SELECT execution_id, source_step, ref, ref_id, manifest_id, total_parts
    FROM noetl.result_ref LEFT JOIN noetl.manifest ON manifest_id = ref_id
    WHERE execution_id = ANY($1::bigint[]) AND kind = 'manifest' AND (expires_at IS NULL OR expires_at > now())
), part AS MATERIALIZED (
    SELECT whole.execution_id, part.manifest_id, part_ref_id, made.ref_id IS NULL AS is_gone
    FROM whole JOIN noetl.manifest_part part USING (manifest_id)
    LEFT JOIN noetl.result_ref made ON made.ref_id = part_ref_id
), expired AS MATERIALIZED (
    SELECT (result #>> '{reference,ref_id}')::bigint AS ref_id FROM noetl.event
    WHERE execution_id IN (SELECT execution_id FROM part WHERE is_gone)
      AND (result #>> '{reference,expires_at}')::timestamptz <= now()
), counted AS MATERIALIZED (
    SELECT manifest_id, count(*) AS parts,
           bool_or(is_gone AND part_ref_id NOT IN (SELECT ref_id FROM expired WHERE ref_id IS NOT NULL)) AS has_gap
    FROM part GROUP BY manifest_id
)
SELECT execution_id, source_step AS step, NULL::int AS iteration, ref AS place,
       manifest_id IS NULL OR COALESCE(parts, 0) <> total_parts OR COALESCE(has_gap, false) AS incomplete
FROM whole LEFT JOIN counted USING (manifest_id)"""


SUBJECTS: tuple[tuple[str, tuple[Rule, ...]], ...] = (
    (_EVENT, (
        Rule("event.unknown_type", "an event has a type that this version does not know",
             "use the version of the package that wrote it", "unknown_type"),
        Rule("event.incomplete", "an event lacks the step, or a field of meta that its type requires", AGAIN,
             "incomplete"),
        Rule("event.future", "an event is from a transaction that this server has not reached, so readers skip it",
             "run 'noetl-dagster provision', which adopts a log that was restored from another server", "future"),
    )),
    (_REPEATED, tuple(
        Rule(name, what, f"make sure that the unique indexes of the schema exist; {AGAIN}", f"fact = '{name}'")
        for name, what, *_ in _ONCE
    )),
    (_EXECUTION, (
        Rule("execution.unstarted", "an execution has events but no start", AGAIN, "starts = 0 AND NOT is_state"),
        Rule("execution.epochs", "the epochs of an execution are not 1, 2, 3, ..., or it ended in one that never began",
             AGAIN, "starts > 0 AND (epochs <> last_epoch OR last_end > last_epoch)"),
        Rule("execution.half_ended", "the ends of a playbook and of its workflow were not recorded together", AGAIN,
             "ends <> workflow_ends"),
    )),
    (_LATE, (
        Rule("execution.late", "a command was issued or claimed, or a step ended, after the execution was cancelled",
             "check what the command or step did", "gated"),
        Rule("execution.resumed_cancelled", "a cancelled execution was resumed",
             "cancel it again", "resumed"),
    )),
    (_COMMAND, (
        Rule("command.issued_twice", "a command was issued twice", AGAIN, "issued > 1"),
        Rule("command.ended_twice", "a command ended twice", AGAIN, "ends > 1"),
        Rule("command.unissued", "a command was claimed or ended without being issued", AGAIN,
             "issued = 0 AND NOT is_shard AND (claims > 0 OR own_ends > 0)"),
        Rule("command.unclaimed", "a command succeeded without a claim", AGAIN,
             "completed > 0 AND claims = 0 AND NOT is_shard"),
        Rule("command.disordered", "a command ended before it was issued", AGAIN, "ended_at < issued_at"),
        Rule("command.lost", "a command was claimed and never ended, but its execution has ended",
             AGAIN,
             "claims > 0 AND ends = 0 AND (outcome = 'execution.cancelled' OR outcome = 'playbook.completed' "
             "AND NOT is_of_cursor)"),
    )),
    (_VISIT, (
        Rule("step.unentered", "a visit of a step ended without having begun", AGAIN, "exits > 0 AND entries = 0"),
        Rule("step.unended", "an execution completed, but a visit of a step has no end", AGAIN,
             "entries > 0 AND exits = 0 AND outcome = 'playbook.completed'"),
    )),
    (_ARC, (
        Rule("step.unreached", "an execution completed without the step that an arc led to",
             AGAIN, "NOT entered"),
    )),
    (_LOOP, (
        Rule("loop.unstarted", "a loop ended without having started", AGAIN, "ends > 0 AND starts = 0"),
        Rule("loop.open", "a step with a loop completed, but its loop has no end", AGAIN,
             "starts > 0 AND ends = 0 AND is_last AND is_closed"),
        Rule("loop.outside", "a loop has an iteration beyond its items", AGAIN, "is_last AND last >= size"),
        Rule("loop.miscounted", "a loop counted more iterations than ended, or more than it has items", AGAIN,
             "starts > 0 AND ends > 0 AND is_last AND (done + failed > ended OR done + failed > size)"),
        Rule("loop.unfinished", "a loop ended without a failure before all of its iterations did", AGAIN,
             "ends > 0 AND is_last AND failed = 0 AND done < size"),
    )),
    (QUEUED, (
        Rule("queue.ended", "a command that has ended, or was never issued, is in the queue",
             "'noetl-dagster verify --repair' removes the row", "has_ended OR unissued"),
        Rule("queue.dead", "the claim of a command expired five minutes ago and no reaper has taken it back",
             "run 'noetl-dagster reap', or 'noetl-dagster verify --repair'", "is_dead AND NOT has_ended"),
    )),
    (_FRAME, (
        Rule("cursor.unreleased", "rows that a cursor loop claimed were not released five minutes after their lease",
             "run 'noetl-dagster reap', whose log says why; if loop.cursor.release cannot succeed, release the rows by "
             "hand and delete the row of noetl.cursor_frame", "is_overdue"),
    )),
    (_REFERENCE, (
        Rule("reference.unrecorded", "an event refers to a result that noetl.result_ref does not have",
             "resume the execution if --forget-missing has forgotten the result, else run it again", "unrecorded"),
    )),
    (_MANIFEST, (
        Rule("manifest.incomplete", "a result of several parts lacks some of them, or its list of parts",
             "run the execution again", "incomplete"),
    )),
)  # fmt: skip
"""The subjects of the log, each with its rules."""


def _statement(subject: str, rules: Sequence[Rule]) -> str:
    """Returns the first findings of each rule, in a fixed order, with their number."""
    checks = ", ".join(f"('{rule.name}', ({rule.broken}))" for rule in rules)
    return f"""
        SELECT rule, execution_id, step, iteration, place, count FROM (
            SELECT rule, execution_id, step, iteration, place, count(*) OVER (PARTITION BY rule) AS count,
                   row_number() OVER (PARTITION BY rule ORDER BY execution_id, place) AS number
            FROM ({subject}) facts CROSS JOIN LATERAL (VALUES {checks}) AS checks (rule, broken) WHERE broken) found
        WHERE number <= {EXAMPLES} ORDER BY rule, number"""


_STATEMENTS = tuple(_statement(subject, rules) for subject, rules in SUBJECTS)


async def broken_rules(connection: Any, execution_ids: Sequence[int]) -> Findings:
    """Returns where the events, queue rows and references of executions break a rule.

    Args:
        connection: in a transaction with one snapshot, so that events that are written meanwhile are either all
            seen or not at all.
    """
    findings = Findings()
    for statement in _STATEMENTS:
        for row in await connection.fetch(statement, execution_ids):
            *parts, count = row
            first = parts[0] not in findings.counts
            findings.add(Finding(*parts), count if first else 0)
    return findings
