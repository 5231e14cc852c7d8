"""To look for a file: it is there, it is missing, or looking failed, which is neither."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from apex.errors import ConfigError

StrPath = str | os.PathLike[str]
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)  # the last: no file can have such a name


class Unreadable(ConfigError):
    """A look failed (permission, disk error, stale handle): nothing is known and nothing changes."""


def is_missing(error: OSError) -> bool:
    """Return whether ``error`` says that there is no such file, and not that looking for it failed."""
    return error.errno in _MISSING


def unreadable(path: StrPath, error: OSError) -> Unreadable:
    """Return the refusal, in one line, that names ``path`` and what the system said."""
    return Unreadable(f"{path} cannot be read: {error.strerror}; nothing has been changed")


def mode(path: StrPath) -> int | None:
    """Return the ``st_mode`` of what ``path`` leads to, or None if missing. Raises :class:`Unreadable`."""
    try:
        return os.stat(path).st_mode
    except ValueError:  # a name that no file can have
        return None
    except OSError as error:
        if is_missing(error):
            return None
        raise unreadable(path, error) from None


def is_there(path: StrPath) -> bool:
    """Return whether ``path`` leads to anything. Raises :class:`Unreadable`."""
    return mode(path) is not None


def is_file(path: StrPath) -> bool:
    """Return whether ``path`` leads to a regular file. Raises :class:`Unreadable`."""
    found = mode(path)
    return found is not None and stat.S_ISREG(found)


def read(path: StrPath) -> bytes | None:
    """Return the contents of a regular file, or None where there is none. Raises :class:`Unreadable`."""
    if not is_file(path):
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        if is_missing(error):
            return None
        raise unreadable(path, error) from None


def names(folder: StrPath) -> list[str]:
    """Return the names in ``folder``, [] where it is missing. Raises :class:`Unreadable`."""
    try:
        return sorted(os.listdir(folder))
    except ValueError:
        return []
    except OSError as error:
        if is_missing(error):
            return []
        raise unreadable(folder, error) from None
