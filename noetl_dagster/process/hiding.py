"""What other processes of the same user can read about this one.

The client of the command server imports this module, so it imports next to nothing.
"""

import ctypes

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
