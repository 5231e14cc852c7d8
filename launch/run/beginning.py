"""The first and last instants of a command: Ctrl-C then ends it with one line, and imports are quick.

It imports almost nothing, so that it is in force early.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator


def end_on_interrupt() -> None:
    """Have Ctrl-C end this process with one line and status 130: as yet there is nothing to end in order."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again, where there is something to clean up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def to_the_end(run: Callable[[], int]) -> int:
    """Return what ``run()`` returns; from then on Ctrl-C ends this process with one line."""
    try:
        return run()
    finally:
        end_on_interrupt()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Turn the garbage collector off, then exempt everything loaded by then (docs/decisions/launch.md)."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _end(number: int, frame: object) -> None:
    # Not by an exception: raised inside an import or a callback it leaves a traceback, or is lost.
    try:
        os.write(2, b"apex: interrupted\n")
    finally:
        os._exit(128 + number)
