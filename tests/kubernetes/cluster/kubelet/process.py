"""A container's processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.kubernetes.cluster.kubelet.volumes import Mount

SANDBOX = Path(__file__).with_name("sandbox.py")
_TREE = Path(__file__).parents[4]
_OWN = os.readlink("/proc/self/ns/mnt") if Path("/proc/self/ns/mnt").exists() else ""


class Process:
    """The command of a container, in a root of its own; and whatever it has started there.

    Attributes:
        pid: of the command, the same inside and outside.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        mounts: Sequence[Mount],
        log: Path,
        cwd: str = "/opt/noetl",
        read_only: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "root").mkdir(exist_ok=True)
        given: dict[str, Any] = {
            "root": str(folder / "root"),
            "tree": str(_TREE),
            "venv": sys.prefix,
            "mounts": list(mounts),
            "read_only": read_only,
            "cwd": cwd,
            "command": list(command),
        }
        path = folder / "container.json"
        path.write_text(json.dumps(given))
        interpreter = str(Path(sys.executable).resolve())
        with log.open("ab") as written:
            self._main = subprocess.Popen(
                ["/usr/bin/env", "unshare", "--mount", interpreter, "-S", "-E", str(SANDBOX), str(path)],
                env=dict(environment),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._main.pid
        self._environment = dict(environment)
        self._cwd = cwd
        self._room = ""
        self._held = -1
        self._ending = threading.Lock()
        while not self._found_room() and self._main.poll() is None:
            time.sleep(0.002)  # what it starts is found by its namespace, also when it has ended itself

    def poll(self) -> int | None:
        """The exit code, 128 and the signal's number for one that a signal ended; None while it runs."""
        code = self._main.poll()
        return code if code is None or code >= 0 else 128 - code

    def terminate(self) -> None:
        if self._main.poll() is None:
            self._main.terminate()

    def kill(self) -> None:
        """Ends everything inside, at once; afterwards there is nothing to end any more."""
        if self._main.poll() is None:
            self._main.kill()
        self._main.wait()
        with self._ending:
            while rest := self._inside():
                for pid in rest:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if self._held >= 0:
                os.close(self._held)
            self._held, self._room = -1, ""

    def run(self, command: Sequence[str], seconds: float) -> bool:
        """Runs a command inside; whether it exits with 0 in time."""
        if not self._room:
            return False
        entered = ["nsenter", "-t", str(self.pid), "-m", "-r", f"--wdns={self._cwd}", "--", *command]
        try:
            done = subprocess.run(
                ["/usr/bin/env", *entered],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _found_room(self) -> str:
        """The mount namespace; empty while the command still enters it, and after the end.

        It is held open: the number of one that is gone would be another container's.
        """
        if not self._room and self._main.returncode is None:
            with suppress(OSError):
                held = os.open(f"/proc/{self.pid}/ns/mnt", os.O_RDONLY)
                found = os.readlink(f"/proc/self/fd/{held}")
                if found == _OWN:
                    os.close(held)
                else:
                    self._held, self._room = held, found
        return self._room

    def _inside(self) -> list[int]:
        """Processes in the container, zombies not counted: they have left it."""
        found = []
        for entry in os.listdir("/proc") if self._room else ():
            with suppress(OSError):
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/mnt") == self._room:
                    found.append(int(entry))
        return found


@cache
def unavailable() -> str:
    """Why this machine cannot run containers so; empty where it can."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        process = Process(Path(folder), ["true"], {"PATH": os.environ["PATH"]}, [], log, cwd="/")
        if process._main.wait():
            return f"no mount namespaces with layers here: {log.read_text().strip()[-200:]}"
    return ""
