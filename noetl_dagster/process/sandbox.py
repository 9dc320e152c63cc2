"""Confines this process before it runs playbook code: files (Landlock), limits, another user.

Also a program, ``python -I -S sandbox.py RULES COMMAND...``, which confines itself and becomes the command. It imports
only the standard library, and little of it. Its own variables are those of the command behind :data:`PREFIX`, so that
none of them, such as ``LD_PRELOAD``, has an effect before the process is confined.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PREFIX = "_"

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on all architectures
_VERSION, _PATH_BENEATH = 1, 1
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38

_CAPABILITIES = 0x20080522  # the version of the structures
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
_FILE = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15  # the rights that apply to files
_DEVICES = 1 << 6 | 1 << 11  # making them is never permitted
_loaded: list[Any] = []  # the C library; functools.cache takes long to import
_SCOPED = 1 << 0 | 1 << 1  # abstract Unix sockets and signals


def landlock_version() -> int:
    """Returns the version of Landlock in this kernel; 0 if there is none, or it is switched off."""
    if sys.platform != "linux":
        return 0
    try:
        return max(0, _syscall(_CREATE_RULESET, None, 0, _VERSION))
    except OSError:
        return 0


def enter(rules: Mapping[str, Any]) -> None:
    """Confines this process and all that it starts, for good.

    Args:
        rules: ``read`` and ``write``, folders and files without those of ``hidden``; ``own``, folders to write whatever
            is hidden; all four only with ``landlock``. ``user``: its id and its group's, or None; ``limits``: by their
            names in ``resource``.

    Raises:
        OSError: the kernel refuses it.
        RuntimeError: there are several threads; the others would stay unconfined.
    """
    ruleset = _ruleset(rules) if rules["landlock"] else None
    if rules["user"] is not None:
        _library()  # imports ctypes while this user may still read Python's library
        user, group = rules["user"]
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        _prctl(_PR_SET_DUMPABLE, 1)  # a change of the user has taken its own files in /proc away
    if rules["user"] is not None or ruleset is not None:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if ruleset is not None:
        if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - pathlib takes long to import
            raise RuntimeError("a process with several threads cannot be confined")
        _syscall(_RESTRICT_SELF, ruleset, 0)
        _drop_capabilities()
        os.close(ruleset)
    for name, limit in rules["limits"].items():
        which = getattr(resource, name)
        _, most = resource.getrlimit(which)
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(which, (limit, limit))


def _drop_capabilities() -> None:
    """Takes the privileges of root away. With them, it reads other processes' memory whatever Landlock permits."""
    import ctypes

    library = _library()
    if library.capset((ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()) < 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


def _ruleset(rules: Mapping[str, Any]) -> int:
    """Returns the descriptor of a Landlock ruleset."""
    from ctypes import byref, c_uint64

    version = landlock_version()
    handled = (1 << 13) - 1  # all rights of the first version
    handled |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0) | (1 << 15 if version >= 5 else 0)
    attributes = (c_uint64 * 3)(handled, 0, _SCOPED if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall(_CREATE_RULESET, byref(attributes), size, 0)
    hidden = [os.path.realpath(path) for path in rules["hidden"]]
    for field, rights in (("read", _READ), ("write", handled & ~_DEVICES)):
        for path in rules[field]:
            for visible in _visible(os.path.realpath(path), hidden):
                _permit(ruleset, visible, rights & handled)
    for path in rules["own"]:
        _permit(ruleset, os.path.realpath(path), handled & ~_DEVICES)
    return ruleset


def _visible(path: str, hidden: Sequence[str]) -> Iterator[str]:
    """Yields a path, or what is in it if some of that is hidden. Landlock permits whole folders only."""
    if any(_is_below(path, one) for one in hidden):
        return
    if not any(_is_below(one, path) for one in hidden):
        yield path
        return
    try:
        entries = sorted(one.path for one in os.scandir(path) if not one.is_symlink())
    except OSError:
        return
    for entry in entries:
        yield from _visible(entry, hidden)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _permit(ruleset: int, path: str, rights: int) -> None:
    import struct
    from ctypes import create_string_buffer

    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # there is none, so there is nothing to permit
        return
    try:
        if not os.path.isdir(path):  # noqa: PTH112
            rights &= _FILE
        rule = create_string_buffer(struct.pack("=Qi", rights, opened), 12)
        _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(opened)


def _syscall(number: int, *arguments: Any) -> int:
    import ctypes

    done: int = _library().syscall(number, *arguments)
    if done < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, f"Landlock: {os.strerror(failed)}")
    return done


def _prctl(option: int, value: int) -> None:
    _library().prctl(option, value, 0, 0, 0)


def _library() -> Any:
    if not _loaded:
        import ctypes

        _loaded.append(ctypes.CDLL(None, use_errno=True))
    return _loaded[0]


if __name__ == "__main__":
    try:
        enter(json.loads(sys.argv[1]))
        given = {name[len(PREFIX) :]: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        os.execvpe(sys.argv[2], sys.argv[2:], given)
    except (OSError, RuntimeError) as error:
        sys.exit(f"{sys.argv[2]}: {error}")
