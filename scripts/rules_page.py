"""What ``noetl-dagster verify`` checks, as a page of the documentation, with the table of its rules."""

from __future__ import annotations

from page_text import cell, code, page, table

from noetl_dagster.engine.recovery.verify import RULES

HEAD = """# Verification

This page lists what `noetl-dagster verify` checks, what its findings mean, and what it repairs.

`noetl-dagster verify EXECUTION_ID` checks one execution, and `noetl-dagster verify --all` checks everything. It may
run while executions run.

| check | what is compared |
|---|---|
| events | the events with the [rules](#rules) of the log, such as one end for each command |
| queue | the rows of the queue with the log |
| projection | each row of `noetl.execution` with a replay of its events |
| results | each reference with its object: it exists, and has the recorded size and sha256 |
| objects | each object of the stores with the references; objects that are younger than a day may be on their way |

The report lists what is wrong, with the execution, step, item and place, and explains how to fix it. `--json` prints
it for programs. `--quick` compares the sizes of objects and reads none of them. Results of the tier `memory`, and
results on another machine's disk, are not checked.

| exit code | meaning |
|---|---|
| 0 | nothing is wrong |
| 1 | something is wrong |
| 2 | a store, the database or the named execution could not be checked |

`--repair` repairs what is safe, and reports it. You may repeat it, and drivers may run meanwhile:

- It replays executions whose row in `noetl.execution` differs.
- It removes rows of the queue whose commands have ended, and takes expired claims back, as the reaper does.
- It deletes objects without a reference, as `noetl-dagster maintain` does.

It never changes an event. `--forget-missing` makes the commands whose results are missing run again when the execution
is resumed, see
[Check the log and the stores](../how-to/backup-and-restore.md#check-the-log-and-the-stores).

Run `verify --all` after a [restore](../how-to/backup-and-restore.md) and after an incident.

## Rules
"""


def rules_page() -> str:
    """``docs/reference/verification.md``."""
    rows = ((code(rule.name), cell(rule.what), cell(rule.fix)) for rule in RULES.values())
    return page(HEAD, table(("finding", "meaning", "what to do"), rows))
