"""Raising an exception in another thread, and only where that thread runs the code that it is meant for.

Python raises such an exception at whatever instruction the thread comes to next. That may be one of the
program's own: a hook that the interpreter calls, a log's lock that the whole process needs. So the thread's
frames are looked at first.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
import threading
from collections.abc import Iterator
from operator import itemgetter
from types import CodeType, FrameType
from typing import Any

SHARED_MODULES = frozenset({"logging", "importlib._bootstrap"})
"""Their locks belong to the process, and an exception between taking one and the ``try`` after it keeps it."""

LOCKING = frozenset({"__enter__", "__exit__", "acquire", "release", "_acquire_restore", "_release_save"})
"""Functions of ``threading`` in which a lock is being taken or given back. Others wait for it: an event loop that is to
end a future, for example."""

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_raise_in.restype = ctypes.c_int


class Interrupted(BaseException):
    """Raised inside code whose time is up. ``except Exception`` lets it through."""


def interrupt(
    thread: int, caller: CodeType, *, everywhere: bool, error: type[BaseException] = Interrupted
) -> bool:
    """Raises ``error`` in a thread, if it is in code that was called from a frame of ``caller``.

    Never in a hook of the interpreter, which is not that code's, and never where a lock is being taken or given
    back. In what else the process shares, and in a ``__del__``, which may be of anyone's object, only when
    ``everywhere`` is set.

    Returns:
        Whether the exception was sent. It arrives in the frame that was seen, or in one of its code that the
        frame returns to.
    """
    seen = sys._current_frames().get(thread)
    if seen is None or not _belongs(seen, caller, everywhere):
        return False
    innermost = map(itemgetter(thread), iter(sys._current_frames, None))
    # Python changes threads after calls and at jumps back, never within `for`, `is` and `if`: where the frame
    # is still the one that was judged, the thread cannot move on before the exception is sent
    for frame in innermost:
        if frame is seen:
            _raise_in(thread, error)
            return True
        return False
    return False


def let_arrive() -> None:
    """Raises here what was sent to this thread and has not arrived.

    It must not be taken back, with a null pointer: Python 3.11 would go on looking for it, in every thread, for as
    long as the process lives, and for ever where a profiler or debugger watches.
    """
    for _ in range(10):  # Python looks at every jump back
        pass


def _belongs(innermost: FrameType, caller: CodeType, everywhere: bool) -> bool:
    """Whether a frame is of code that ``caller`` called and that may be interrupted here."""
    if innermost.f_code is caller:
        return False  # before the code, or after it
    if innermost.f_code.co_name in LOCKING and innermost.f_globals.get("__name__") == "threading":
        return False
    hooks = set(_hooks())
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code is not caller:
        if frame.f_code in hooks or _is_kept(frame, everywhere):
            return False
        frame = frame.f_back
    return frame is not None


def _is_kept(frame: FrameType, everywhere: bool) -> bool:
    name = frame.f_code.co_name
    if frame.f_globals.get("__name__") in SHARED_MODULES:
        return not everywhere or "acquire" in name or "release" in name
    return name == "__del__" and not everywhere


def _hooks() -> Iterator[CodeType]:
    """The code of what the interpreter itself calls in any thread, between any two instructions."""
    hooks: list[Any] = [sys.unraisablehook, threading.gettrace(), threading.getprofile(), *gc.callbacks]
    for hook in hooks:
        while isinstance(hook, functools.partial):
            hook = hook.func
        if callable(hook):
            code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
            if code is not None:
                yield code
