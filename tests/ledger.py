"""Files to which playbooks write a line for every item that begins: the item, and its process."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

CODE = """
import os, pathlib, time
path = pathlib.Path(ledger)
with path.open("a") as file:
    file.write(f"{n} {os.getpid()}\\n")
begun = len(path.read_text().splitlines())
while WAITS and not path.with_name("go").exists():
    time.sleep(0.02)
result = RESULT
"""


def written_by(waits: str, result: str = "n", **more: Any) -> str:
    """The tool of a step that writes its item ``n`` to the ledger that the workload's ``ledger`` names.

    Args:
        waits: Python; the items for which it holds, of ``n`` and of how many have ``begun``, wait until there
            is a file ``go`` beside the ledger.
        result: Python; what an item gives.
        more: further fields of the tool.
    """
    names = {"n": "{{ n }}", "ledger": "{{ ledger }}"}
    code = CODE.replace("WAITS", waits).replace("RESULT", result)
    return json.dumps({"kind": "python", "input": names, "code": code, **more})


def lines(ledger: Path) -> list[tuple[int, ...]]:
    """The numbers of each line, in the order in which the items began."""
    return [tuple(map(int, line.split())) for line in ledger.read_text().splitlines()]


def assert_only_unfinished_ran_again(ledger: Path, items: int, finished: Collection[int]) -> None:
    """After a process was killed when ``finished`` were done: every item ran, and none of those twice."""
    counts = Counter(item for item, *_ in lines(ledger))
    assert set(counts) == set(range(items)), "no item is lost"
    twice = {item for item, count in counts.items() if count > 1}
    assert not twice & set(finished), "no finished item ran again"
