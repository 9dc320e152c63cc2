"""``python -m tests.chaos``: runs under random faults, and the report of what they did."""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos import clocks, faults, flows
from tests.chaos.campaign import Campaign, Outcome, Plan, plan
from tests.chaos.clusters import ClusteredMachine
from tests.chaos.machine import Machine
from tests.chaos.report import report
from tests.chaos.secrets import Found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=100, help="faults that must have hit")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begins no run after this time")
    parser.add_argument("--machines", type=int, default=1, help="runs at once, each on a machine of its own")
    parser.add_argument("--clusters", action="store_true", help="on a PostgreSQL with a standby and a cluster of NATS")
    parser.add_argument("--flow", action="append", choices=sorted(flows.BY_NAME), help="only these flows")
    parser.add_argument("--fault", action="append", help="only faults whose name contains this")
    parser.add_argument("--first", type=int, default=0, help="the first run of the seed")
    parser.add_argument("--plan", action="append", help="only this run, as it is printed")
    parser.add_argument("--logs", action="store_true", help="show the logs of runs that were resumed too")
    parser.add_argument("--report", type=Path, help="file of the report")
    given = parser.parse_args()
    among = tuple(one for one in flows.FLOWS if given.flow is None or one.name in given.flow)
    possible = faults.ON_CLUSTERS if given.clusters else faults.FAULTS
    kinds = tuple(one for one in possible if given.fault is None or any(word in one.name for word in given.fault))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # all that was started ends
    clocks.load()
    outcomes: list[Outcome] = []
    exposed: list[Found] = []
    begun = time.monotonic()
    ending = threading.Event()

    def plans() -> Iterator[Plan]:
        if given.plan is not None:
            yield from map(Plan.of, given.plan)
            return
        for number in itertools.count(given.first):
            late = time.monotonic() - begun > 60 * given.minutes
            if late or sum(len(one.hits) for one in outcomes) >= given.kills:
                return
            yield plan(given.seed, number, among, kinds)

    all_plans, lock = plans(), threading.Lock()

    def next_plan() -> Plan | None:
        with lock:
            return None if ending.is_set() else next(all_plans, None)

    def work() -> None:
        campaign = Campaign(shows_resumed=given.logs, make=ClusteredMachine if given.clusters else Machine)
        try:
            for outcome in campaign.outcomes(iter(next_plan, None)):
                outcomes.append(outcome)
                with lock:
                    _show(outcome, time.monotonic() - begun)
            exposed.extend(campaign.exposed())
        except BaseException:
            ending.set()
            raise
        finally:
            campaign.close()

    with ThreadPoolExecutor(given.machines) as pool:
        try:
            for running in [pool.submit(work) for _ in range(given.machines)]:
                running.result()
        finally:
            ending.set()
    for one in exposed:
        print(f"DEFECT a secret is exposed: {one.form} in {one.place}")
    if given.report is not None:
        given.report.write_text(report(outcomes, exposed, sys.argv[1:], time.monotonic() - begun))
    return 1 if exposed or any(one.defects for one in outcomes) else 0


def _show(outcome: Outcome, seconds: float) -> None:
    hits = ", ".join(f"{one.fault} (recovered in {one.recovery_seconds:.1f} s)" for one in outcome.hits)
    print(
        f"{seconds:.0f} s: {outcome.plan}\n    {outcome.seconds:.1f} s, {outcome.resumes} resumes, hit: {hits or 'nothing'}"
    )
    for defect in outcome.defects:
        print(f"    DEFECT {defect}")
    sys.stdout.flush()
    if outcome.said:
        print(outcome.said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
