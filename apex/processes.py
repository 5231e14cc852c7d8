"""Which process is which on a host, so that one that hangs can be ended, and no other that has its number by now."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def own_process() -> tuple[int, int]:
    """Return this process's number, and when it began, in the kernel's ticks."""
    return os.getpid(), _began(os.getpid())


def end_process(pid: int, began: int) -> bool:
    """Kill that process of this host, if it is still there; return whether it was."""
    with contextlib.suppress(OSError, ValueError):
        if _began(pid) == began:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def _began(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
