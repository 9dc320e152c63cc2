"""The template: ``python -m noetl_dagster.engine.helper CONTROL LIFELINE``, two file descriptors of the driver's.

It imports everything once, without a thread or a connection, and then forks a helper for each socket that comes
over CONTROL. When the driver closes LIFELINE, with its own end at the latest, template and helpers end too.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys

from noetl_dagster.engine.crew.wire import read_message
from noetl_dagster.engine.helper.work import help_driver
from noetl_dagster.process import logs
from noetl_dagster.settings import Settings, load_settings
from noetl_dagster.tools.registry import tool_for


def main() -> None:
    control, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides what an interrupt ends
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets helpers that have ended
    start = read_message(control)
    if start is None:
        return
    settings = load_settings(start["settings"])
    logs.set_up(settings)
    for kind in start["tool_kinds"]:
        tool_for(kind)
    gc.collect()
    gc.freeze()  # helpers share these pages as long as nobody writes to them
    while lifeline not in select.select([control.fileno(), lifeline], [], [])[0]:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not request:
            return
        [descriptor] = descriptors
        if not os.fork():
            control.close()
            _help(settings, descriptor, lifeline)
        os.close(descriptor)


def _help(settings: Settings, descriptor: int, lifeline: int) -> None:
    """The whole life of a helper."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        help_driver(settings, socket.socket(fileno=descriptor), lifeline)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
