"""Files that are new, whole or not there: written to the disk before they get their name."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ROOM_LEFT_BYTES = 16 << 20  # a disk is not filled to the last byte: the log goes on
_COPY_BYTES = 8 << 20
_NONE = -1  # no descriptor


class NewFile(io.RawIOBase):
    """A file that did not exist, written from front to back; it is on the disk once closed.

    ``nbytes`` and ``digest`` are its size and SHA-256.
    """

    def __init__(self, path: Path):
        self._descriptor = _NONE
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._hash, self.nbytes = hashlib.sha256(), 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: ReadableBuffer) -> int:
        """Write all of ``data``, bytes or a contiguous array; return its length. Raises OSError."""
        view = memoryview(data).cast("B")
        written = 0
        while written < len(view):
            written += os.write(self._descriptor, view[written:])
        self._hash.update(view)
        self.nbytes += written
        return written

    def close(self) -> None:
        """Flush to the disk and close. Raises OSError."""
        descriptor, self._descriptor = self._descriptor, _NONE
        if descriptor == _NONE:  # it could not be opened, or is closed
            return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @property
    def digest(self) -> str:
        """SHA-256 of what has been written."""
        return self._hash.hexdigest()


def replace(path: Path, data: ReadableBuffer) -> None:
    """Write ``data`` so that ``path`` is the old file or the new one, never half of it. Raises OSError."""
    aside = path.with_name(path.name + ".tmp")
    aside.unlink(missing_ok=True)
    try:
        with NewFile(aside) as file:
            file.write(data)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where links do not work. Raises OSError."""
    try:
        os.link(source, target)
    except OSError:  # no such links here, or too many of this file
        with open(source, "rb", buffering=0) as old, NewFile(target) as file:
            while data := old.read(_COPY_BYTES):
                file.write(data)


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_room(folder: Path, nbytes: int, left: int = ROOM_LEFT_BYTES) -> None:
    """Raise OSError (no space left) unless the disk of ``folder`` has ``nbytes`` + ``left`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < nbytes + left:
        needed, there = (nbytes + left) / 2**20, free / 2**20
        why = f"{needed:.1f} MiB are needed and {there:.1f} MiB are free in {folder}"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {why}")
