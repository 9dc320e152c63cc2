"""Run inside ``unshare --mount``: makes the container's root, enters it, and becomes the container's command.

Started by its path with one argument, a JSON file ``{root, tree, venv, mounts, read_only, cwd, command}``. The root is
the machine's own with a layer on top that nobody else sees, ``/opt/noetl`` as the image has it, and the mounts
``[source, target, read_only]``; the virtualenv is also where its scripts say that it is. It all goes with the last
process inside. Imports nothing of the project.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind)]
    if _libc.mount(*encoded, ctypes.c_ulong(flags), data.encode()):
        error = ctypes.get_errno()
        raise OSError(error, f"cannot mount {source} at {target}: {os.strerror(error)}")


def _point(source: str, target: str) -> None:
    """Makes the place that a source is mounted at."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w"):
            pass


def _bound(source: str, target: str, read_only: bool = False) -> None:
    _point(source, target)
    _mount(source, target, flags=_BIND | _REC)
    if read_only:
        _mount("none", target, flags=_BIND | _REMOUNT | _RDONLY)


def _submounts() -> list[str]:
    """What is mounted below ``/``, without what is below another of them."""
    with open("/proc/self/mountinfo") as lines:
        points = sorted({line.split()[4] for line in lines} - {"/"})
    found: list[str] = []
    for point in points:
        if not any(point.startswith(f"{above}/") for above in found):
            found.append(point)
    return found


def _root(work: str, tree: str, venv: str) -> str:
    below = _submounts()
    _mount("none", "/", flags=_PRIVATE | _REC)
    _mount("layers", work, "tmpfs")
    for name in ("upper", "work", "root"):
        os.mkdir(f"{work}/{name}")
    root = f"{work}/root"
    _mount("root", root, "overlay", data=f"lowerdir=/,upperdir={work}/upper,workdir={work}/work")
    for point in below:
        if os.path.exists(point) and os.path.exists(root + point):
            _bound(point, root + point)
    for name in sorted(os.listdir(tree)):
        if not name.startswith("."):
            _bound(f"{tree}/{name}", f"{root}/opt/noetl/{name}", read_only=True)
    _bound(venv, f"{root}/opt/noetl/.venv")
    return root


def main(path: str) -> None:
    with open(path) as text:
        given = json.load(text)
    root = _root(given["root"], given["tree"], given["venv"])
    for source, target, read_only in given["mounts"]:
        _bound(source, root + os.path.normpath(os.path.join("/", _linked(root, target))), read_only)
    if not os.path.exists(root + given["venv"]):  # a mount hides it: /tmp, and the tree lies there
        _bound(given["venv"], root + given["venv"])
    os.makedirs(root + given["cwd"], exist_ok=True)
    if given["read_only"]:
        _mount("none", root, flags=_BIND | _REMOUNT | _RDONLY)
    os.chroot(root)
    os.chdir(given["cwd"])
    # whoever runs the tests may ignore some, as a background job does
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(given["command"][0], given["command"])
    except OSError as error:
        print(f"{given['command'][0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def _linked(root: str, target: str) -> str:
    """A target with links of the root followed inside it: ``/var/run`` is ``/run``."""
    head, _, rest = target.lstrip("/").partition("/")
    if head == "var" and rest.startswith("run/") and os.path.islink(f"{root}/var/run"):
        return f"/{rest}"
    return target


main(sys.argv[1])
