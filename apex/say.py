"""The one way to tell a person something. It cannot fail: telling is not part of the work."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Write ``text`` and a line's end to stdout."""
    _write(sys.stdout, text)


def warn(text: str) -> None:
    """Write ``text`` and a line's end to stderr."""
    _write(sys.stderr, text)


def _write(stream, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal has closed, the disk is full, the stream is gone
        print(text, file=stream, flush=True)
