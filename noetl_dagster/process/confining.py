"""Confines this process before it runs playbook code: limits, another user.

Also a program, ``python -I -S confining.py RULES COMMAND...``, which confines itself and becomes the command. It
imports only the standard library, and little of it. Its own variables are those of the command behind :data:`PREFIX`,
so that none of them, such as ``LD_PRELOAD``, has an effect before the process is confined.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

PREFIX = "_"

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38


def enter(rules: Mapping[str, Any]) -> None:
    """Confines this process and all that it starts, for good.

    Args:
        rules: ``user``, its id and its group's, or None; ``limits``, by their names in ``resource``.

    Raises:
        OSError: the kernel refuses it.
    """
    if rules["user"] is not None:
        import ctypes  # while this user may still read Python's library

        prctl = ctypes.CDLL(None).prctl
        user, group = rules["user"]
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # a change of the user has taken its own files in /proc away
        prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name, limit in rules["limits"].items():
        which = getattr(resource, name)
        _, most = resource.getrlimit(which)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(which, (limit, limit))


if __name__ == "__main__":
    try:
        enter(json.loads(sys.argv[1]))
        variables = {name[len(PREFIX) :]: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        os.execvpe(sys.argv[2], sys.argv[2:], variables)
    except OSError as error:
        sys.exit(f"{sys.argv[2]}: {error}")
