"""One job at a time in a run folder: a lock that the kernel frees with the process that holds it.

The file is ``.lock``. It is locked by ``flock`` and tells host and process of the holder. Its descriptor is
not inherited by programs that the holder starts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from apex.config import ConfigError
from apex.say import warn

NAME = ".lock"
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_held: dict[str, tuple[int, bool]] = {}  # folder -> descriptor; whether the file was made for it


def take(folder: Path) -> None:
    """Lock a run folder for this process, until :func:`give` or its end.

    Raises :class:`ConfigError`, naming the holder, where another process holds it, and where the file cannot
    be opened. Where the file system has no locks, it warns and goes on.
    """
    path = Path(folder) / NAME
    held = _lock(folder, path)
    while held is None:
        held = _lock(folder, path)
    give(folder)
    _held[_key(folder)] = held


def give(folder: Path, withdraw: bool = False) -> None:
    """Free the lock of :func:`take`, if any. ``withdraw``: also remove the file that it made."""
    descriptor, is_new = _held.pop(_key(folder), (None, False))
    if descriptor is None:
        return
    if withdraw and is_new:
        with contextlib.suppress(OSError):
            os.unlink(Path(folder) / NAME)  # before it is free, so that none removes another's
    os.close(descriptor)


def _lock(folder: Path, path: Path) -> tuple[int, bool] | None:
    """Return the locked file and whether it is new; None where it was removed meanwhile."""
    descriptor, is_new = _open(folder, path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(path, descriptor):
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ConfigError(f"run {folder} is in use by {holder}; stop that, or wait for its end") from None
        warn(
            f"apex: warning: {path} cannot be locked ({error.strerror}): "
            "make sure that no other job runs in this folder"
        )
    return descriptor, is_new


def _open(folder: Path, path: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with contextlib.suppress(FileExistsError):
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        return os.open(path, flags | os.O_CREAT, 0o644), False
    except OSError as error:
        raise ConfigError(f"run {folder} cannot be written to: {path}: {error.strerror}") from None


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether ``path`` still leads to the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _key(folder: Path) -> str:
    return os.path.realpath(folder)


def _holder(descriptor: int) -> str:
    try:
        text = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
    except OSError:
        text = ""
    return text if text.isprintable() and text else "another process"
