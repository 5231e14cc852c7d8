"""The one way to tell a person something. It cannot fail: telling is not part of the work.

A line goes straight to the descriptor of stdout or stderr, so nothing is left to be flushed at the end of the
process, and a signal handler may write at any time. If a terminal is closed, a reader has gone or a disk is
full, the line is lost and the work goes on. While a process shows a live table it takes the lines in
(:func:`divert`) and shows them above it.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_WRITABLE_WITHIN_S = 1.0  # a terminal in non-blocking mode takes the rest a moment later
_KEPT = 10_000  # lines, while the view does not take them
_diverted: deque[tuple[bool, str]] | None = None


def say(text: str, end: str = "\n") -> None:
    """Write ``text`` and ``end`` to stdout."""
    _tell(False, text + end)


def warn(text: str, end: str = "\n") -> None:
    """Write ``text`` and ``end`` to stderr."""
    _tell(True, text + end)


@contextlib.contextmanager
def divert() -> Iterator[deque[tuple[bool, str]]]:
    """Yield a queue of ``(is for stderr, text)`` that receives all output; its rest is written at the end.

    For one part of the process at a time, which takes from the queue's left. The oldest of too many lines are
    lost.
    """
    global _diverted
    lines: deque[tuple[bool, str]] = deque(maxlen=_KEPT)
    _diverted = lines
    try:
        yield lines
    finally:
        _diverted = None
        while lines:
            write(*lines.popleft())


def write(to_stderr: bool, text: str) -> None:
    """Write ``text`` as it is, past :func:`divert`."""
    stream = _stream(to_stderr)
    if stream is None:  # the process was started without
        return
    data = text.encode(stream.encoding or "utf-8", "backslashreplace")
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # it has none, or is closed
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
        return
    with contextlib.suppress(OSError):
        _write_all(descriptor, data)


def protect() -> None:
    """Make stdout and stderr of this process take whatever is written to them, by libraries and at exit too.

    An environment that prints must not fail because the terminal has closed, nor the process because Python's
    last flush does. Any of the descriptors 0 to 2 that is closed is opened on the null device: a file opened
    later would take its number.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gives the lowest number that is free
    if sys.stdout is sys.__stdout__:
        sys.stdout = _unfailing(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _unfailing(2, sys.stderr)


def is_terminal(to_stderr: bool) -> bool:
    """Whether stdout, or stderr, is there, and a terminal."""
    stream = _stream(to_stderr)
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # it is closed
        return False


class _Unfailing(io.RawIOBase):
    """A descriptor that takes all bytes; those that cannot be written are lost."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer) -> int:
        written = bytes(data)
        with contextlib.suppress(OSError):
            _write_all(self._descriptor, written)
        return len(written)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def _unfailing(descriptor: int, replaced: TextIO | None) -> io.TextIOWrapper:
    encoding = "utf-8" if replaced is None else replaced.encoding
    buffer = io.BufferedWriter(
        _Unfailing(descriptor)
    )  # a line of several parts is one write: ranks share a pipe
    return io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True)


def _stream(is_stderr: bool) -> TextIO | None:
    return sys.stderr if is_stderr else sys.stdout


def _tell(to_stderr: bool, text: str) -> None:
    lines = _diverted
    if lines is None:
        write(to_stderr, text)
    else:
        lines.append((to_stderr, text))


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``. Raises OSError where the rest of it cannot be written."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            if not select.select([], [descriptor], [], _WRITABLE_WITHIN_S)[1]:
                raise
