"""The report of a soak test, in Markdown."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import version

import psutil

from benchmarks.soak.run import Result
from benchmarks.soak.series import Series, Verdict

INTRODUCTION = """\
# Soak test

`make soak` puts {hour} of load on the embedded services: {executions} executions at once, large loops, streams,
cursor loops, small executions, and workers that are started, drained and killed with `kill -9`. A partition of the
log has the executions of {width:.0f} seconds. It is dropped {retention:.0f} seconds after its end, so that the log
rolls over as in {days}.

A sample is taken every {sample:.0f} seconds. A line is fitted to the second half of each series. A series *grows* if
this line rises by more than the tolerance, and by more than three times its standard error. *Memory* is proportional
set size, so that shared pages count once. Memory of the largest process is private memory. The benchmark itself and the
memory of the embedded object store (SeaweedFS) are shown, not judged.
"""

SHORT = "This run lasted less than an hour. In a short run, caches that still fill up count as growing.\n"


def failed(result: Result) -> list[str]:
    """Returns why a run failed, empty if it did not."""
    outcome = result.outcome
    reasons = [*result.problems]
    reasons += [f"{outcome.lost} lost"] * bool(outcome.lost) + [f"{outcome.doubled} doubled"] * bool(outcome.doubled)
    reasons += [f"{len(outcome.failed)} executions failed"] * bool(outcome.failed)
    return reasons + [f"{one.name} grows" for one in series(result) if one.verdict is Verdict.GROWING]


def series(result: Result) -> list[Series]:
    return [one for one in result.recorder.series.values() if one.values]


def report(result: Result) -> str:
    """Returns the report."""
    return "\n".join([*_head(result), *_facts(result), *_verdict(result), *_table(result), *_messages(result)]) + "\n"


def _head(result: Result) -> Iterator[str]:
    plan = result.plan
    yield INTRODUCTION.format(
        hour="an hour" if plan.minutes == 60 else f"{plan.minutes:g} minutes",
        days="a day" if plan.minutes >= 60 else "a part of a day",
        executions=plan.executions,
        width=plan.partition_seconds,
        retention=plan.retention_seconds,
        sample=plan.sample,
    )
    if plan.minutes < 60:
        yield SHORT


def _facts(result: Result) -> Iterator[str]:
    plan, outcome, counts = result.plan, result.outcome, result.counts
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(outcome.executions.items()))
    rate = result.events / max(result.seconds, 1)
    yield "| | |\n|---|---|"
    yield f"| date | {result.began:%Y-%m-%d %H:%M} UTC |"
    yield f"| commit | {_commit()} |"
    yield f"| seed | {plan.seed} |"
    yield f"| machine | {_machine()}, PostgreSQL {result.server.split()[0] if result.server else 'unknown'} |"
    yield f"| time under load | {result.seconds / 60:.1f} of {plan.minutes:g} minutes |"
    if result.interrupted:
        yield f"| interrupted | {result.interrupted} |"
    yield f"| events | {result.events:,}, {rate:,.0f} a second |"
    yield f"| executions that ended | {outcome.executions.total():,}: {kinds} |"
    yield f"| iterations of loops and fan-outs | {outcome.items:,}; {outcome.largest:,} in the largest loop |"
    workers = ", ".join(f"{counts.get(f'worker {what}', 0)} {what}" for what in ("started", "drained", "killed"))
    yield f"| workers | {workers} |"
    yield f"| partitions of the log | {result.dropped} dropped under load |"
    yield f"| lost | {outcome.lost} |"
    yield f"| doubled | {outcome.doubled} |"
    yield f"| failed executions | {len(outcome.failed)} |"
    yield f"| `noetl-dagster verify --all` | {result.verified} |"
    yield ""


def _verdict(result: Result) -> Iterator[str]:
    reasons = failed(result)
    yield "## Verdict\n"
    if not reasons:
        yield "Every judged series is flat. Nothing is lost and nothing is doubled.\n"
        return
    yield "\n".join(f"- {reason}" for reason in reasons) + "\n"
    for text in result.outcome.failed[:20]:
        yield f"- {text[:300]}"
    yield ""


def _table(result: Result) -> Iterator[str]:
    yield "## Series\n"
    yield "*Start*, *half* and *end* are medians of a tenth of the time. *Growth* is that of the fitted line.\n"
    yield "| series | unit | start | half | end | growth | tolerance | verdict |"
    yield "|---|---|--:|--:|--:|--:|--:|---|"
    for one in series(result):
        allowed = "" if one.allowed is None else _number(one.allowed)
        levels = " | ".join(_number(one.level(share)) for share in (0.05, 0.5, 0.95))
        verdict = f"**{one.verdict}**" if one.verdict is Verdict.GROWING else str(one.verdict)
        yield f"| {one.name} | {one.unit} | {levels} | {_number(one.growth)} | {allowed} | {verdict} |"
    yield ""


def _messages(result: Result) -> Iterator[str]:
    if not result.messages:
        return
    yield "## Warnings and errors in the logs\n"
    yield "Digits are replaced by `#`.\n"
    yield "| count | message |\n|--:|---|"
    for text, count in sorted(result.messages.items(), key=lambda pair: -pair[1])[:30]:
        yield f"| {count:,} | `{text.replace('|', '/').replace('`', '')}` |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _machine() -> str:
    memory = psutil.virtual_memory().total / 1024**3
    system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {system}, Python {platform.python_version()}"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or f"version {version('noetl-dagster')}"
