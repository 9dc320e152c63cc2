"""The end of a program without the interpreter's clean-up of modules, which takes 0.1 s after a large import.

Threads are joined, functions of ``atexit`` are called, and files that are still open are written, as usual.
"""

import atexit
import gc
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)

_code: int | None = None


def call_as_program(main: Callable[[], None]) -> None:
    """Calls the main function of a program. Its process ends soon after ``sys.exit`` or the return of the function.

    Another exception ends the process in the usual way.
    """
    global _code
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            _code = (ended.code or 0) & 0xFF
        raise
    _code = 0


@atexit.register  # this module is imported before all others, so this function is called after theirs
def _end() -> None:
    if _code is None:
        return
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return  # the interpreter reports it
    for writers in _WRITERS:  # text goes to the bytes below it first
        for found in gc.get_objects():
            if type(found) is writers:
                with suppress(OSError, ValueError):  # nobody reads it, or it is closed
                    found.flush()
    os._exit(_code)
