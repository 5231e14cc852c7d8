"""Folders that go with the process that made them, or with the next one where that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_ABANDONED_S = 60.0
SOCKETS = "apex-ranks-"  # prefix of the folders in which the ranks of a host meet over ZeroMQ
_LONGEST_FOLDER = 80  # bytes; a socket's path may have 107


@contextlib.contextmanager
def folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder of mode 0700 and remove it at the end; first remove abandoned ones.

    ``parent`` is the folder for temporary files where it is None. Raises OSError where no folder can be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_abandoned(prefix, parent)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}{os.getpid()}-", dir=parent))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(
            OSError
        ):  # where a file system knows no locks, nobody else can remove it either
            stack.enter_context(_locked(made))
        made = made.rename(made.with_name(made.name[1:]))  # only now do others see it, and that it is in use
        stack.callback(shutil.rmtree, made, ignore_errors=True)
        yield made


def remove_abandoned(prefix: str, parent: Path) -> None:
    """Remove the folders of killed processes of this user; folders in use, or another user's, stay."""
    for left in [*parent.glob(f"{prefix}*"), *_unfinished(prefix, parent)]:
        with (
            contextlib.suppress(OSError),
            _locked(left, fcntl.LOCK_NB),
        ):  # OSError: it is in use, or another user's
            shutil.rmtree(left, ignore_errors=True)


def _unfinished(prefix: str, parent: Path) -> list[Path]:
    """Return old folders that were never used: their makers were killed in between."""
    found = []
    for path in parent.glob(f".{prefix}*"):
        with contextlib.suppress(OSError):  # it is in use by now
            if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                found.append(path)
    return found


@contextlib.contextmanager
def _locked(folder: Path, wait: int = 0) -> Iterator[None]:
    """Hold the lock of a folder in use; raises OSError where it is taken (LOCK_NB: at once), or the
    folder is another user's.

    The kernel frees it when this process ends, however it does. It is seen from every container that has the
    same file system; a process's number is not: each container counts its own, and numbers come again.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is another user's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | wait)
        yield
    finally:
        os.close(descriptor)


def sockets_parent() -> Path:
    """Return the folder for temporary files, unless its name leaves no room for a socket's."""
    usual = tempfile.gettempdir()
    return Path(usual if len(usual.encode()) <= _LONGEST_FOLDER - len(SOCKETS) else "/tmp")


def remove_abandoned_sockets() -> None:
    """Remove what launchers of ZeroMQ ranks that were killed have left."""
    remove_abandoned(SOCKETS, sockets_parent())
