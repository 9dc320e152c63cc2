"""Files and folders that only this user may read."""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """Creates a folder, and missing folders above it, with the mode 0700. Existing folders keep their modes."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def closed_folder(folder: Path) -> Path:
    """Creates a folder like :func:`private_folder`, or closes an existing one to all other users."""
    status = private_folder(folder).stat()
    if status.st_uid != os.geteuid() == 0:
        os.chown(folder, 0, 0)
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def private_file(path: str, flags: int) -> int:
    """Opens a file that only this user may read, as the ``opener`` of :func:`open`."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, text: str, owner: tuple[int, int] | None = None) -> None:
    """Replaces a file with one that only its owner, default: this user, may read.

    Readers see the old file or the new one. Links that another owner of the folder may have put there are not followed.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(private_file(str(fresh), os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
        file.write(text)
        if owner is not None:
            os.fchown(file.fileno(), *owner)
    fresh.replace(path)
