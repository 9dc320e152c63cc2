"""The function that a spark task names, asked for by several shards at the same moment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from noetl_dagster.errors import ToolError
from noetl_dagster.spark.functions import load_function

SHARDS = 4


def test_shards_that_name_one_file_load_it_once(tmp_path: Path) -> None:
    executed = tmp_path / "executed.txt"
    (tmp_path / "slow.py").write_text(
        f"import time\nopen({str(executed)!r}, 'a').write('once ')\ntime.sleep(0.2)\ndef crunch(spark): return 1\n"
    )
    with ThreadPoolExecutor(SHARDS) as shards:
        found = list(shards.map(lambda _: load_function("slow.py:crunch", str(tmp_path)), range(SHARDS)))
    assert len({id(one) for one in found}) == 1
    assert executed.read_text() == "once "


def test_a_file_that_fails_is_executed_again(tmp_path: Path) -> None:
    ready = tmp_path / "ready.txt"
    (tmp_path / "early.py").write_text(f"open({str(ready)!r}).close()\ndef crunch(spark): return 1\n")
    with pytest.raises(ToolError, match=r"ready\.txt"):
        load_function("early.py:crunch", str(tmp_path))
    ready.touch()
    assert load_function("early.py:crunch", str(tmp_path))(None) == 1
