"""Runs every peer one after another and writes the table and the chart of ``benchmarks/README.md``.

`make bench-peers` calls it, after it made the venvs. A peer that cannot run stands in the table with its reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fanout import database
from benchmarks.peers.chart import Bar, chart
from noetl_dagster import embedded
from noetl_dagster.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "benchmarks" / "README.md"
CHART = ROOT / "benchmarks" / "peers.svg"
BEGIN = "<!-- peers: what follows is written by make bench-peers -->"
END = "<!-- peers: end -->"

LIMIT_SECONDS = 180.0
END_SECONDS = 15.0


@dataclass(frozen=True)
class Peer:
    title: str
    module: str
    items: int
    mode: str = ""
    database: bool = False
    venv: bool = True
    """Has a venv of its own; else this project's."""

    @property
    def python(self) -> Path:
        return ROOT / ".venv-peers" / self.module / "bin" / "python" if self.venv else Path(sys.executable)


PEERS = [
    Peer("Dagster, multiprocess", "dagster", 8, mode="multiprocess", venv=False),
    Peer("Dagster, in process", "dagster", 200, mode="in-process", venv=False),
    Peer("Temporal, file", "temporal", 300, mode="file"),
    Peer("Temporal, memory", "temporal", 300, mode="memory"),
    Peer("Prefect, SQLite", "prefect", 300),
    Peer("Prefect, PostgreSQL", "prefect", 300, database=True),
    Peer("DBOS", "dbos", 1_000, database=True),
    Peer("ours, 1 process", "ours", 10_000, mode="1", database=True, venv=False),
    Peer("ours, 2 processes", "ours", 10_000, mode="2", database=True, venv=False),
]


@dataclass(frozen=True)
class Row:
    peer: Peer
    version: str = ""
    seconds: float = 0.0
    note: str = ""
    """What an item is, or the reason why there is no figure."""

    @property
    def rate(self) -> float | None:
        return self.peer.items / self.seconds if self.seconds else None


def measure(peer: Peer, settings: Settings) -> Row:
    if not peer.python.exists():
        return Row(peer, note="not measured: its packages could not be installed")
    with contextlib.ExitStack() as stack:
        # beside the embedded PostgreSQL's data, so that all write to the same disk
        beside = tempfile.TemporaryDirectory(prefix="peer-", dir=settings.home, ignore_cleanup_errors=True)
        folder = str(Path(stack.enter_context(beside)).resolve())
        command = [str(peer.python), "-m", f"benchmarks.peers.{peer.module}", "--items", str(peer.items)]
        command += ["--folder", folder, "--mode", peer.mode]
        if peer.database:
            url = stack.enter_context(database(settings)).db_url
            assert url is not None
            command += ["--database", url]
        code, output, errors = _run(command)
    if code is None:
        return Row(peer, note=f"not measured: it had not ended after {LIMIT_SECONDS:.0f} s")
    if code != 0:
        said = [line for line in (output + errors).splitlines() if line.strip()] or [f"it ended with {code}"]
        return Row(peer, note=f"not measured: {said[-1].strip()}")
    told = json.loads(output.splitlines()[-1])
    return Row(peer, told["version"], told["seconds"], told["note"])


def _run(command: list[str]) -> tuple[int | None, str, str]:
    """Exit code (none: it took too long), standard output and standard error.

    The program has a process group of its own, so that what it started ends with it when it has to be ended.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return None, "", ""
    else:
        return process.returncode, output, errors
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_SECONDS)


def table(rows: list[Row]) -> str:
    """Markdown, the slowest first."""
    lines = ["| | version | items | seconds | items a second | an item is |", "|---|---|--:|--:|--:|---|"]
    for row in rows:
        if row.rate is None:
            cells = ["", "", "", "", _cell(row.note)]
        else:
            cells = [
                row.version,
                f"{row.peer.items:,}",
                f"{row.seconds:.1f}",
                _rate(row.rate),
                _cell(row.note),
            ]
        lines.append(f"| {row.peer.title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: row.rate or 0.0)
    before, _, rest = README.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{README} has lost its markers: {BEGIN} and {END}")
    text = f"{BEGIN}\n\n![Items a second of each peer, on a logarithmic scale]({CHART.name})\n\n{table(rows)}\n\n"
    README.write_text(f"{before}{text}{END}{after}")
    bars = [
        Bar(
            row.peer.title,
            row.rate,
            _rate(row.rate) if row.rate else "not measured",
            row.peer.module == "ours",
        )
        for row in rows
    ]
    CHART.write_text(chart("trivial items a second, logarithmic scale", bars))


def main() -> None:
    settings = embedded.ensure(Settings())
    rows = []
    for peer in PEERS:
        row = measure(peer, settings)
        rate = f"{row.peer.items:,} items in {row.seconds:.2f} s, {_rate(row.rate)} a second; " if row.rate else ""
        print(f"{peer.title:>22}: {rate}{row.note}", flush=True)
        rows.append(row)
    write(rows)


if __name__ == "__main__":
    main()
