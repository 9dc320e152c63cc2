"""The report of a campaign, as a page of the documentation."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import psutil

from tests.chaos.campaign import Outcome
from tests.chaos.secrets import Found

WORDS = ("lost", "doubled", "different", "orphaned", "left", "broken")
"""First words of defects."""

PAGE = """\
# Chaos

`make chaos` runs flows while faults hit them, and compares each end state with that of an undisturbed run: the results of all
steps by SHA-256, the rows and files of sinks, one end per command, one end per loop, and no object without a reference.
After each run, `noetl-dagster verify` must find nothing: a finding counts as *broken*.
The flows read a secret from the keychain, and print it. At the end it is searched, byte by byte and in all its encodings, in
every table, stream, object, file and page of the machine.
[Delivery guarantees](../explanation/guarantees.md) explains the promise. This page is the report of the last complete run.

| | |
|---|---|
| date | {date} |
| command | `{command}` |
| commit | `{commit}` |
| machine | {machine} |
| duration | {minutes:.0f} minutes |
| runs | {runs} |
| faults | {faults} |
| runs with a difference | {failed} |
| executions that a supervisor resumed | {resumed} |
| places of the secret | {exposed} |

A fault hits after a random time, or while a random event of the log is in its transaction. A supervisor restarts ended
services, and calls `noetl-dagster resume` when a run has ended too early.

## By kind of fault

*Recovery* is the time from the end of the fault until the next event of the execution. A killed service is restarted within
half a second. A defect counts for each fault of its run.

| fault | hits | {words} | longest recovery |
|---|--:|{lines}--:|
{kinds}

## By flow

| flow | runs | faults | runs with a difference | resumed | swept objects |
|---|--:|--:|--:|--:|--:|
{flows}

*Swept objects* have no reference, because a process was killed between storing and recording them. Maintenance removes them.

## Differences

{defects}
"""


def report(outcomes: Sequence[Outcome], exposed: Sequence[Found], arguments: Sequence[str], seconds: float) -> str:
    """Returns the page in Markdown."""
    failed = [one for one in outcomes if one.defects]
    return PAGE.format(
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        command=f"python -m tests.chaos {' '.join(arguments)}",
        commit=_commit(),
        machine=_machine(),
        minutes=seconds / 60,
        runs=len(outcomes),
        faults=sum(len(one.hits) for one in outcomes),
        failed=len(failed),
        resumed=sum(one.resumes > 0 for one in outcomes),
        exposed=", ".join(one.place for one in exposed) or "none",
        words=" | ".join(WORDS),
        lines="--:|" * len(WORDS),
        kinds=_kinds(outcomes),
        flows=_flows(outcomes),
        defects="\n".join(f"- {one.plan}: {'; '.join(one.defects[:3])}" for one in failed) or "There are none.",
    )


def _kinds(outcomes: Sequence[Outcome]) -> str:
    hits, longest = Counter[str](), dict[str, float]()
    defects: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for hit in outcome.hits:
            hits[hit.fault] += 1
            longest[hit.fault] = max(longest.get(hit.fault, 0.0), hit.recovery_seconds)
        for fault in {hit.fault for hit in outcome.hits}:
            words = Counter(defect.partition(":")[0] for defect in outcome.defects)
            defects.setdefault(fault, Counter()).update(words)
    return "\n".join(
        f"| {fault} | {hits[fault]} | {' | '.join(str(defects[fault][word]) for word in WORDS)} | {longest[fault]:.1f} s |"
        for fault in sorted(hits)
    )


def _flows(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for name in sorted({one.plan.flow.name for one in outcomes}):
        own = [one for one in outcomes if one.plan.flow.name == name]
        faults = sum(len(one.hits) for one in own)
        failed, resumed = sum(bool(one.defects) for one in own), sum(one.resumes > 0 for one in own)
        rows.append(f"| {name} | {len(own)} | {faults} | {failed} | {resumed} | {sum(one.swept for one in own)} |")
    return "\n".join(rows)


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, Python {platform.python_version()}"
