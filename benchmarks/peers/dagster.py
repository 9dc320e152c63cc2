"""Plain Dagster: a dynamic output an item, in process or with a process a step."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fanout_dagster import in_process_rate, multiprocess_rate
from benchmarks.peers.report import RUNS, WARM_ITEMS, Watch, task


def main() -> None:
    told, watch = task(), Watch()
    if told.mode == "multiprocess":
        rate, note = multiprocess_rate, "a dynamic output an item, a process each; SQLite"
    else:
        rate, note = in_process_rate, "a dynamic output an item; SQLite"
        rate(WARM_ITEMS, _made(told.folder / "warm"))
    for run in range(RUNS):
        watch.seconds.append(told.items / rate(told.items, _made(told.folder / str(run))))
    watch.report("dagster", told.items, note)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
