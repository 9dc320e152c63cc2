"""How processes of playbook code are confined: a sandbox for files, limits, another user."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noetl_dagster.errors import ToolError
from noetl_dagster.process import sandbox
from noetl_dagster.settings import PythonIsolation, SandboxMode, Settings

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/etc", "/proc", "/sys")
_LINKED = ("/etc/resolv.conf", "/etc/hosts", "/etc/localtime", "/etc/ssl", "/etc/pki")
"""Files of /etc that may be links to folders which are not readable otherwise."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PACKAGE = Path(sandbox.__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Confinement:
    """Rules for one process, see :func:`noetl_dagster.process.sandbox.enter`."""

    landlock: bool = False
    user: tuple[int, int] | None = None
    limits: dict[str, int] = field(default_factory=dict)
    read: Sequence[str] = ()
    write: Sequence[str] = ()
    hidden: Sequence[str] = ()

    @property
    def is_needed(self) -> bool:
        """Reports that a process with these rules differs from any other."""
        return self.landlock or self.user is not None or bool(self.limits)

    @property
    def is_apart(self) -> bool:
        """Reports that a process cannot use the home folder and the temporary folder of this process."""
        return self.landlock or self.user is not None

    def rules(self, private: Path | None) -> dict[str, Any]:
        """Returns the rules as JSON values; ``private`` may be written whatever is hidden."""
        named = {name: getattr(self, name) for name in ("landlock", "user", "limits", "read", "write", "hidden")}
        return {**named, "own": [] if private is None else [str(private)]}

    def start_of(
        self, command: Sequence[str], env: Mapping[str, str], private: Path | None
    ) -> tuple[list[str], dict[str, str]]:
        """Returns command and environment of a process that confines itself and becomes ``command`` with ``env``."""
        if not self.is_needed:
            return list(command), dict(env)
        rules = json.dumps(self.rules(private))
        own = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        passed = {f"{sandbox.PREFIX}{name}": value for name, value in env.items()}
        return [sys.executable, "-I", "-S", sandbox.__file__, rules, *command], {**own, **passed}

    def variables(self, private: Path | None) -> dict[str, str]:
        """Returns variables that name the folders which the process may write."""
        return {"HOME": str(private), "TMPDIR": str(private)} if self.is_apart else {}

    @contextmanager
    def private_folder(self, prefix: str) -> Iterator[Path]:
        """Makes a temporary folder that belongs to the user of the process, and removes it at the end."""
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            if self.user is not None:
                os.chown(folder, *self.user)
            yield folder
        finally:
            # TemporaryDirectory would change modes through links that the process has made
            shutil.rmtree(folder, ignore_errors=True)


def confinement(settings: Settings, folder: str, memory: int | None = None) -> Confinement:
    """Returns the rules for playbook code.

    Args:
        folder: of the playbook; it is readable.
        memory: of the task, in bytes. The smaller limit applies.

    Raises:
        ToolError: of kind ``schema``; a setting needs what this process or its kernel does not have.
    """
    sizes = [size for size in (memory, settings.playbook_memory_bytes) if size is not None]
    limits = {
        "RLIMIT_AS": min(sizes, default=None),
        "RLIMIT_CPU": None if settings.playbook_seconds is None else int(settings.playbook_seconds) + 1,
        "RLIMIT_NPROC": settings.playbook_processes,
    }
    limited = {name: limit for name, limit in limits.items() if limit is not None}
    user = None if settings.playbook_user is None else _user(settings.playbook_user)
    if not has_sandbox(settings):
        return Confinement(user=user, limits=limited)
    read = (
        *(*_SYSTEM, *_LINKED, sys.prefix, sys.base_prefix, str(_PACKAGE), *_libraries()),
        *(folder, str(settings.playbooks_path), *map(str, settings.file_folders)),
    )
    write = (*_DEVICES, *map(str, settings.playbook_folders))
    return Confinement(True, user, limited, read, write, _hidden(settings))


def has_sandbox(settings: Settings) -> bool:
    """Reports whether processes of playbook code are in the sandbox.

    Raises:
        ToolError: of kind ``schema``; it is required, and the kernel has none.
    """
    mode = settings.playbook_sandbox
    if mode is SandboxMode.OFF or sandbox.landlock_version():
        return mode is not SandboxMode.OFF
    if mode is SandboxMode.REQUIRED:
        raise ToolError(
            "NOETL_PLAYBOOK_SANDBOX is 'required', and this kernel has no Landlock; "
            "use Linux 5.13 or newer with Landlock switched on, or set it to 'auto'",
            kind="schema",
        )
    return False


def isolation_of(named: Any, settings: Settings) -> PythonIsolation:
    """Returns where Python code runs that names an isolation or none: a required sandbox always has a subprocess."""
    if settings.playbook_sandbox is SandboxMode.REQUIRED or named == PythonIsolation.SUBPROCESS:
        return PythonIsolation.SUBPROCESS
    return PythonIsolation.THREAD if named else settings.python_isolation


def _user(name: str) -> tuple[int, int]:
    if os.geteuid() != 0:
        raise ToolError(f"NOETL_PLAYBOOK_USER={name} needs a service that runs as root; leave it empty", kind="schema")
    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        found = entry.pw_uid, entry.pw_gid
    except KeyError:
        if not name.isdecimal():
            raise ToolError(f"NOETL_PLAYBOOK_USER={name}: there is no such user", kind="schema") from None
        found = int(name), int(name)
    if 0 in found:
        raise ToolError(f"NOETL_PLAYBOOK_USER={name} is root, or of its group; name another user", kind="schema")
    return found


def _libraries() -> list[str]:
    """Returns the folders of installed libraries. The working folder is none, although ``python -m`` searches it."""
    return [path for path in sys.path if path and Path(path).resolve() not in (Path.cwd(), Path("/"))]


def _hidden(settings: Settings) -> tuple[str, ...]:
    """Returns the files and folders of the service that no rule makes readable."""
    named = (
        *(settings.home, settings.secrets_path, settings.credentials_file, settings.service_tls_key),
        *(settings.pvc_mount_path, os.environ.get("DAGSTER_HOME"), os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")),
        *(os.environ.get("KUBECONFIG"), "/var/run/secrets", "/run/secrets"),
    )
    return tuple(str(path) for path in named if path)
