"""What a process that others are forked from has read: its environment, its interpreter and files.

The client of warm commands imports this module, so it imports next to nothing.
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress

_TERMINAL_VARIABLES = {
    *("_", "SHLVL", "PWD", "OLDPWD", "TERM", "COLUMNS", "LINES", "COLORTERM", "PS1"),
    *("SSH_TTY", "SSH_CLIENT", "SSH_CONNECTION", "PYTEST_CURRENT_TEST"),
}
_DAGSTER_PREFIX = "DAGSTER_"  # variables that Dagster sets for its child processes


def fingerprint(environment: Mapping[str, str], *facts: object) -> str:
    """Returns 16 hexadecimal digits of an environment, this interpreter, this package's files, and other facts.

    Variables of the terminal, and those that Dagster sets for its child processes, make no difference. Installing or
    removing a package does.
    """
    known = {
        name: value
        for name, value in sorted(environment.items())
        if name not in _TERMINAL_VARIABLES and (name == "DAGSTER_HOME" or not name.startswith(_DAGSTER_PREFIX))
    }
    folders = [folder for folder in sys.path if folder.endswith("site-packages") and os.path.isdir(folder)]
    installed = [os.stat(folder).st_mtime_ns for folder in folders]
    package = stamp_of(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".py")
    return hashlib.sha256(repr((known, sys.executable, installed, package, facts)).encode()).hexdigest()[:16]


def stamp_of(folder: "str | os.PathLike[str]", *suffixes: str) -> list[tuple[str, int, int]]:
    """Returns a value that changes with the files below a folder that have one of the suffixes."""
    found = []
    for inside, _, names in os.walk(folder):
        for name in names:
            if name.endswith(suffixes):
                path = os.path.join(inside, name)
                with suppress(OSError):  # a dangling link of an editor, or a file that was just removed
                    status = os.stat(path)
                    found.append((path, status.st_mtime_ns, status.st_size))
    return sorted(found)
