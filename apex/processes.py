"""Processes of this host: how commands start tied to this process, what /proc says of them, and how they end.

Linux reuses process ids. So a process is known by its id and its start time, in the kernel's ticks since
boot: the one value that every process reads alike, whatever happens to the clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

_PR_SET_PDEATHSIG = 1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20
_LOOK_AGAIN_S = 0.01
_GONE = "ZX"  # states of processes that have ended

ENVIRONMENT = {
    # glibc then keeps large blocks instead of returning them page by page after every batch.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
"""What every rank needs in its environment, whatever starts it; what the user has set wins."""


class Facts(NamedTuple):
    """What the kernel says of a process."""

    state: str
    """One letter, as in ``ps``."""
    session: int
    """The process id of the leader of its session."""
    cpu_s: float
    """User and system time so far, in seconds."""
    began: int
    """When it started, in ticks since boot."""
    resident_mb: float


def facts(pid: int) -> Facts:
    """Return the facts of a process; raises OSError where it has ended, or belongs to another user."""
    fields = (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    )  # from the third on; see proc(5)
    cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return Facts(fields[0], int(fields[3]), cpu_s, int(fields[19]), int(fields[21]) * _PAGE_MB)


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process started; raises OSError as :func:`facts` does."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def proportional_mb(pid: int) -> float:
    """Return a process's memory in MiB, with its share of mappings in common; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def all_ids() -> list[int]:
    """Return the ids of the processes of this host."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def of_session(leader: int) -> dict[int, Facts]:
    """Return pid -> facts of the living processes in the session of ``leader``."""
    found = {}
    for pid in all_ids():
        with contextlib.suppress(OSError):
            about = facts(pid)
            if about.session == leader and about.state not in _GONE:
                found[pid] = about
    return found


def own_process() -> tuple[int, int]:
    """Return ``(pid, began)`` of this process (see :class:`Facts`)."""
    return os.getpid(), facts(os.getpid()).began


def end_process(pid: int, began: int) -> bool:
    """Kill the process of that id and start time, if it is still there; return whether it was."""
    with contextlib.suppress(OSError):
        if facts(pid).began == began:
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, of which some may have ended or belong to another user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(find: Callable[[], Iterable[int]], limit_s: float) -> None:
    """Kill what ``find()`` returns until it returns none, for at most ``limit_s``: a disk may hold one."""
    until = time.monotonic() + limit_s
    while (pids := list(find())) and time.monotonic() < until:
        signal_all(pids, signal.SIGKILL)
        time.sleep(_LOOK_AGAIN_S)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent has ended, however that was."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def start(
    command: list[str],
    environment: Mapping[str, str] | None = None,
    out: int | IO[bytes] | None = None,
    err: int | IO[bytes] | None = None,
) -> subprocess.Popen[str]:
    """Start a command in a session of its own; it is told to end (SIGTERM) when this process has ended.

    Pipes (``subprocess.PIPE``) give text; ``environment`` None is this process's own.
    """
    parent = os.getpid()
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        text=True, errors="replace", start_new_session=True, preexec_fn=lambda: _tie_to(parent),
    )  # fmt: skip


def _tie_to(parent: int) -> None:
    """In a child: end with ``parent``, also where that has ended before the kernel was asked."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def end(process: subprocess.Popen[str], limit_s: float) -> None:
    """Ask a command to end (SIGTERM) and wait; kill its session where that takes longer than ``limit_s``."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)

    def left() -> dict[int, Facts]:
        found = of_session(process.pid)
        is_another_s = process.returncode is not None and process.pid in found  # the id is used again
        return {} if is_another_s else found

    kill_all(left, limit_s)
    process.wait()


def python(module: str) -> list[str]:
    """Return the command that runs a module of ours."""
    # -P: a file of the user's in this folder must not take the place of a module.
    return [sys.executable, "-P", "-m", module]


def environment_for(needed: Mapping[str, str], user: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a command of ours: what it ``needed``, the user's, which wins, our modules.

    PATH is as if the virtual environment were activated: Intel's mpirun calls what is beside it by bare
    names.
    """
    root = str(Path(__file__).resolve().parents[1])
    modules = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    beside, path = str(Path(sys.executable).parent), user.get("PATH") or os.defpath
    programs = path if beside in path.split(os.pathsep) else os.pathsep.join((beside, path))
    return {**needed, **user, "PYTHONPATH": modules, "PATH": programs}
