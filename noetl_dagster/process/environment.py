"""Environment variables: playbook code sees an allow list, and never the settings, which contain secrets.

The settings of a process are read once. While playbook code runs in a process, its ``NOETL_*`` variables are withheld
from ``os.environ``. Child processes of the platform get them from :func:`own_environment`, child processes of playbooks
get :func:`playbook_environment`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

from noetl_dagster.process.families import MARK
from noetl_dagster.settings import WITHHELD, Settings, get_settings

PREFIX = "NOETL_"

API_TOKENS = frozenset({"NOETL_SERVICE_TOKENS", "NOETL_SERVER_TOKEN"})
"""Tokens of the HTTP API, which processes of runs never get."""

BASIC_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TERM"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "JAVA_HOME", "SPARK_HOME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)
"""Patterns of variables that programs need and that are no secrets."""


_PR_SET_DUMPABLE = 4


def hide_from_children() -> None:
    """Makes the initial environment and the memory of this process unreadable for other processes of its user.

    Linux keeps the initial environment in ``/proc/<pid>/environ``, whatever is removed from ``os.environ``. The
    superuser can still read it. Forked processes inherit the protection, and started programs do not. Other systems
    have no such files.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


class _Withheld:
    """The variables that are withheld from ``os.environ``, as long as at least one caller asks for that."""

    def __init__(self) -> None:
        self._callers = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Withholds the variables of the settings."""
        with self._lock:
            self._callers += 1
            get_settings()
            for name in [name for name in os.environ if name.startswith(PREFIX)]:
                WITHHELD[name] = os.environ.pop(name)

    def end(self) -> None:
        """Restores the variables if no caller is left."""
        with self._lock:
            self._callers -= 1
            if not self._callers:
                for name, value in WITHHELD.items():
                    os.environ.setdefault(name, value)
                WITHHELD.clear()


_withheld = _Withheld()


@contextmanager
def settings_withheld() -> Iterator[None]:
    """Withholds the ``NOETL_*`` variables from ``os.environ`` during the block, in all threads.

    Blocks may overlap. The settings that the process has read stay in effect.
    """
    hide_from_children()
    _withheld.begin()
    try:
        yield
    finally:
        _withheld.end()


def withhold_settings() -> None:
    """Withholds the ``NOETL_*`` variables from ``os.environ`` until the process ends."""
    hide_from_children()
    _withheld.begin()


def own_environment() -> dict[str, str]:
    """Returns the whole environment of this process for a child process of the platform, without tokens of the API."""
    return without_tokens({**WITHHELD, **os.environ})


def without_tokens(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the tokens of the HTTP API, and without the mark of a call that ends."""
    return {name: value for name, value in environment.items() if name not in API_TOKENS and name != MARK}


def setting_variable(name: str) -> str | None:
    """Returns the value of a ``NOETL_*`` variable, even while it is withheld; None if it is not set."""
    return os.environ.get(name, WITHHELD.get(name))


def setting_variables() -> set[str]:
    """Returns the names of the ``NOETL_*`` variables, withheld ones included."""
    return {*WITHHELD, *(name for name in os.environ if name.startswith(PREFIX))}


def basic_environment() -> dict[str, str]:
    """Returns the variables that programs need and that are no secrets: for servers and helpers of the platform."""
    return {name: value for name, value in os.environ.items() if _is_named(name, BASIC_VARIABLES)}


def playbook_environment(settings: Settings) -> dict[str, str]:
    """Returns the variables that processes of playbook code get: basic ones and those of ``NOETL_PLAYBOOK_ENV``."""
    return {name: value for name, value in os.environ.items() if is_for_playbooks(name, settings)}


def is_for_playbooks(name: str, settings: Settings) -> bool:
    """Returns whether playbook code may read a variable."""
    return not name.startswith(PREFIX) and _is_named(name, (*BASIC_VARIABLES, *settings.playbook_env))


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
