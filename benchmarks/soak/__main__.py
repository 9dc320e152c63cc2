"""An hour that stands for a day: what must stay flat is sampled while 200 executions run and workers come and go.

    python -m benchmarks.soak --minutes 60 --report docs/reports/soak.md
    python -m benchmarks.soak --minutes 5

Prints its progress at every sample and ends with the report. After Ctrl-C it reports what it has. The exit code is 1 if
a series grows, or if something is lost, doubled or failed. The load and the size of the loops follow from the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.soak.report import failed, report
from benchmarks.soak.run import Plan, soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--executions", type=int, default=200, help="at once")
    parser.add_argument("--items", type=int, help="of a large loop; default: 10^6 in an hour")
    parser.add_argument("--rate", type=float, default=900.0, help="iterations of large loops a second")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--sample", type=float, default=10.0, help="seconds between two samples")
    parser.add_argument("--churn", type=float, default=20.0, help="seconds between two changes of the workers")
    parser.add_argument("--report", type=Path, help="file of the report; default: it is printed")
    given = parser.parse_args()
    plan = Plan(
        minutes=given.minutes,
        seed=given.seed,
        executions=given.executions,
        items=given.items or round(1_000_000 * given.minutes / 60),
        rate=given.rate,
        workers=given.workers,
        sample=given.sample,
        churn=given.churn,
    )
    print(f"seed {plan.seed}", flush=True)
    result = soak(plan)
    text = report(result)
    if given.report is None:
        print(text)
    else:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(text)
    reasons = failed(result)
    print("\n".join(reasons) or "flat; nothing lost, nothing doubled")
    return 1 if reasons or result.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
