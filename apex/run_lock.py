"""One job at a time in a run folder: a lock that the kernel frees with the process that holds it.

The file is ``.lock``. It is locked by ``flock`` and tells host and process of the holder. Its descriptor is not
inherited by programs that the holder starts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from apex.config import ConfigError
from apex.say import warn

NAME = ".lock"
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_held: dict[str, int] = {}  # folder -> descriptor


def take(folder: Path) -> None:
    """Lock a run folder for this process, until :func:`give` or its end.

    Raises :class:`ConfigError`, naming the holder, where another process holds it, and where the file cannot be
    opened. Where the file system has no locks, it warns and goes on.
    """
    path = Path(folder) / NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise ConfigError(f"run {folder} cannot be written to: {path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ConfigError(f"run {folder} is in use by {holder}; stop that, or wait for its end") from None
        warn(f"apex: warning: {path} cannot be locked ({error.strerror}): make sure that no other job runs in this folder")
    give(folder)
    _held[_key(folder)] = descriptor


def give(folder: Path) -> None:
    """Free what :func:`take` has locked, if anything."""
    descriptor = _held.pop(_key(folder), None)
    if descriptor is not None:
        os.close(descriptor)


def _key(folder: Path) -> str:
    return os.path.realpath(folder)


def _holder(descriptor: int) -> str:
    try:
        text = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
    except OSError:
        text = ""
    return text if text.isprintable() and text else "another process"
