"""Raises an exception in another thread, but only while that thread runs the code to be interrupted.

Python raises such an exception at the next instruction of the thread. That instruction may belong to the program
itself: to a hook that the interpreter calls, or to a logging lock that the whole process needs. So the frames of the
thread are inspected first.
"""

from __future__ import annotations

import ctypes
import dis
import functools
import gc
import sys
import threading
from collections.abc import Iterator
from operator import itemgetter
from types import CodeType, FrameType
from typing import Any

SHARED_MODULES = frozenset({"logging", "importlib._bootstrap"})
"""Their locks belong to the process. An exception after acquiring one, before the ``try``, would
leave it locked."""

LOCKING = frozenset({"__enter__", "__exit__", "acquire", "release", "_acquire_restore", "_release_save"})
"""Functions of ``threading`` that acquire or release a lock. Other threads wait for it, such as an event loop that
completes a future."""

LOAD_SPECIAL = dis.opmap.get("LOAD_SPECIAL")
"""Loads ``__enter__`` for the call at the start of a ``with`` block, since Python 3.14. Earlier versions have one
instruction for both."""

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_raise_in.restype = ctypes.c_int


class Interrupted(BaseException):
    """Interrupts code that ran out of time. ``except Exception`` does not catch it."""


def interrupt(thread: int, caller: CodeType, *, everywhere: bool, error: type[BaseException] = Interrupted) -> bool:
    """Raises ``error`` in a thread that runs code called from a frame of ``caller``.

    Hooks of the interpreter, and functions that acquire or release a lock, are never interrupted. Modules that the
    process shares, and ``__del__`` methods, are interrupted only if ``everywhere`` is set.

    Returns:
        True if the exception was sent. It arrives in the inspected frame, or in a frame of that code to which the
        inspected one returns.
    """
    seen = sys._current_frames().get(thread)
    if seen is None or not _belongs(seen, caller, everywhere):
        return False
    innermost = map(itemgetter(thread), iter(sys._current_frames, None))
    # Python switches threads after calls and backward jumps, never within `for`, `is` and `if`. If the frame is still
    # the inspected one, the thread cannot proceed before the exception is sent
    for frame in innermost:
        if frame is seen:
            _raise_in(thread, error)
            return True
        return False
    return False


def let_arrive() -> None:
    """Gives a pending exception of this thread the chance to be raised here.

    It must not be withdrawn with a null pointer: Python 3.11 would then keep looking for it, in every thread, for as
    long as the process lives.
    """
    for _ in range(10):  # Python looks at every jump back
        pass


def _belongs(innermost: FrameType, caller: CodeType, everywhere: bool) -> bool:
    """Returns True if ``caller`` called the code of a frame and that code may be interrupted here."""
    if innermost.f_code is caller:
        return False  # the code has not started, or has ended
    if _enters_with(innermost):
        return False
    if innermost.f_code.co_name in LOCKING and innermost.f_globals.get("__name__") == "threading":
        return False
    hooks = set(_hooks())
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code is not caller:
        if frame.f_code in hooks or _is_protected(frame, everywhere):
            return False
        frame = frame.f_back
    return frame is not None


def _enters_with(frame: FrameType) -> bool:
    """Returns True if the frame calls the ``__enter__`` of a ``with`` block.

    Since Python 3.14 an exception arrives right after that call, before the block: a lock would stay locked.
    """
    last = frame.f_lasti
    return last >= 2 and LOAD_SPECIAL is not None and frame.f_code.co_code[last - 2] == LOAD_SPECIAL


def _is_protected(frame: FrameType, everywhere: bool) -> bool:
    name = frame.f_code.co_name
    if frame.f_globals.get("__name__") in SHARED_MODULES:
        return not everywhere or "acquire" in name or "release" in name
    return name == "__del__" and not everywhere


def _hooks() -> Iterator[CodeType]:
    """Yields the code that the interpreter itself calls in any thread, between any two instructions."""
    hooks: list[Any] = [sys.unraisablehook, threading.gettrace(), threading.getprofile(), *gc.callbacks]
    for hook in hooks:
        while isinstance(hook, functools.partial):
            hook = hook.func
        if callable(hook):
            code = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
            if code is not None:
                yield code
