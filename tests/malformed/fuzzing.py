"""``python -m tests.malformed.fuzzing --minutes 10`` looks for inputs that break what they are given to.

Half of the time it checks generated playbooks and templates, and half of it inputs that coverage guides. Each input has 5
seconds and 512 MB. ``--seed 4711`` repeats one generated text and shows it; ``--target codec --input FILE`` repeats another.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.malformed.generated import check, corpus, template, text_of
from tests.malformed.guided import TARGETS, Fuzzer

SECONDS = 5
BYTES = 512 * 1024**2


@contextmanager
def limited(name: str) -> Iterator[None]:
    """Gives an input its time; prints what it raises."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    except BaseException:
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(f"{name}:\n{traceback.format_exc(limit=-6)}", flush=True)
    signal.setitimer(signal.ITIMER_PROF, 0)


def generated(first: int, note: Path, until: float) -> None:
    """Checks generated texts from a number on."""
    texts = corpus()
    while time.monotonic() < until:
        note.write_text(str(first), encoding="utf-8")
        with limited(f"seed {first}"):
            check(first, texts)
        first += 1


def guided(name: str, seed: int, note: Path, until: float) -> None:
    """Runs inputs of a target; those that it must not refuse in this way are written to files."""
    fuzzer, count = Fuzzer(TARGETS[name], seed), 0
    while time.monotonic() < until:
        count += 1
        note.write_text(f"{count}", encoding="utf-8")
        with limited(f"{name} (seed {seed})"):
            try:
                fuzzer.step()
            except BaseException:
                print(f"--target {name!r} --input {kept(fuzzer.last)}")
                raise
    print(f"{name}: {count} inputs, of which {len(fuzzer.inputs)} reached something new")


def kept(content: bytes) -> Path:
    """Writes an input to a file of the temporary folder."""
    path = Path(tempfile.gettempdir()) / f"noetl-fuzz-{hashlib.sha256(content).hexdigest()[:12]}"
    path.write_bytes(content)
    return path


def in_process(work: str, seed: int, until: float) -> int:
    """Runs one kind of work in a process with limits; returns the seed at which to go on if it died, else 0."""
    note = Path(tempfile.gettempdir()) / f"noetl-fuzz-{os.getpid()}"
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TimeoutError(f"more than {SECONDS} seconds")))
        if work == "generated":
            generated(seed, note, until)
        else:
            guided(work, seed, note, until)
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    reached = note.read_text(encoding="utf-8")
    note.unlink()
    if status:
        print(f"{work}: the process ended with status {status} at {reached}", flush=True)
        return int(reached) + 1 if work == "generated" else seed + 1
    if work == "generated":
        print(f"generated: up to seed {reached}")
    return 0


def main() -> None:
    """Checks inputs until the time is over, or repeats one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--first", type=int, default=1, help="the first number of generated texts, and the seed of others"
    )
    parser.add_argument("--seed", type=int, help="repeats a generated text")
    parser.add_argument("--target", choices=TARGETS, help="this target alone")
    parser.add_argument("--input", type=Path, help="repeats an input of the target")
    given = parser.parse_args()
    if given.seed is not None:
        texts = corpus()
        print(text_of(given.seed, texts)[:10_000])
        print(template(random.Random(given.seed)))
        check(given.seed, texts)
        return
    if given.input is not None:
        print(TARGETS[given.target].run(given.input.read_bytes()))
        return
    works = [given.target] if given.target else [*TARGETS, *["generated"] * len(TARGETS)]
    for work in works:
        until, seed = time.monotonic() + 60 * given.minutes / len(works), given.first
        while seed and time.monotonic() < until:
            seed = in_process(work, seed, until)


if __name__ == "__main__":
    main()
