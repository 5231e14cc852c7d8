"""Starts the ranks of a run as one job, follows it, forwards signals, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from apex import checkpoint_files
from apex.config import Config
from apex.run_folder import RunFolder
from apex.say import say, warn
from apex.topology import Topology
from apex.transport.drive import on_stop_signals
from launch import hush, spawn, view
from launch.rank import RUN_FOLDER_VARIABLE, leave_error, write_error_result
from launch.resume import CHECKPOINT_VARIABLE

_RANKS_END_S = 15.0  # once the result is written
_LAUNCHER_ENDS_S = 5.0  # it kills its ranks within a second of SIGTERM
ENVIRONMENT = {
    # glibc then keeps large blocks instead of returning them page by page after every batch.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
"""What every rank needs in its environment, whatever starts it; what the user has set wins."""


def run(
    launcher: list[str], environment: dict[str, str],
    config: Config, topology: Topology, folder: RunFolder, preset: str, arguments: list[str],
) -> int:  # fmt: skip
    """Run ``apex ARGUMENTS`` as the ranks that ``launcher`` starts; return the exit status when all have ended."""
    hushes = config.run.tolerate == "actors" and config.run.transport == "mpi"
    process = subprocess.Popen(
        [*launcher, *python("launch.main"), *arguments], env=environment_for(environment) | {RUN_FOLDER_VARIABLE: str(folder.path)},
        stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    passing_on = hush.follow(process, hushes)
    job = _Job(process, folder, config)
    try:
        resumes = CHECKPOINT_VARIABLE in environment
        view.follow(folder.path, job.is_running, f"{preset}, {topology.size} ranks", only_new=resumes)
    finally:
        job.end()
        for thread in passing_on:
            thread.join(_LAUNCHER_ENDS_S)
        process.wait()
        spawn.remove_abandoned()
    return _conclude(config, topology, folder, preset, process.wait())


def python(module: str) -> list[str]:
    """Return the command that runs a module of ours."""
    # -P: a file of the user's in this folder must not take the place of a module.
    return [sys.executable, "-P", "-m", module]


def environment_for(needed: Mapping[str, str], user: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a command of ours: what it needs, what the user has set, which wins, and where our modules are.

    PATH is as if the virtual environment were activated: Intel's mpirun calls what is beside it by bare names.
    """
    root = str(Path(__file__).resolve().parent.parent)
    modules = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    beside, path = str(Path(sys.executable).parent), user.get("PATH", os.defpath)
    programs = path if beside in path.split(os.pathsep) else os.pathsep.join((beside, path))
    return {**needed, **user, "PYTHONPATH": modules, "PATH": programs}


def _end_with_parent() -> None:
    """Have the launcher, and with it its ranks, end even if this process is killed."""
    spawn.end_with_parent(signal.SIGTERM)


class _Job:
    """The first signal asks the run to end; a second Ctrl-C ends it by force."""

    def __init__(self, process: subprocess.Popen, folder: RunFolder, config: Config):
        self.process, self.folder = process, folder
        self._tolerant = config.run.tolerate == "actors"
        self._asked = self._passed_on = self._forced = False
        self._ends_until: float | None = None
        self._event_files = self._count_event_files()
        on_stop_signals(self._on_signal)

    def is_running(self) -> bool:
        """Return whether to go on waiting; passes on the signal that has arrived since the last call."""
        # The launcher forwards SIGUSR1 to every rank. One that is still starting would die of it; once the learner
        # writes its log, all ranks have met.
        if self._asked and not self._passed_on and self._count_event_files() > self._event_files:
            self._passed_on = True
            self.process.send_signal(signal.SIGUSR1)
        # A launcher that outlives its ranks may outlive the one that the run cannot go on without.
        failed = self._tolerant and self.folder.error() is not None
        return self.process.poll() is None and not self._forced and not failed and not self._is_overdue()

    def _is_overdue(self) -> bool:
        """Whether the run has ended, but not its launcher: a process that was to take a lost one's place may hang."""
        if self._tolerant and self._ends_until is None and self.folder.result() is not None:
            self._ends_until = time.monotonic() + _RANKS_END_S
        return self._ends_until is not None and time.monotonic() > self._ends_until

    def _count_event_files(self) -> int:
        return len(list(self.folder.tensorboard.glob("*")))  # a run that is resumed has some from before

    def end(self) -> None:
        """Leave nothing behind: a launcher told to end kills its ranks; mpirun, killed itself, would leave them."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_LAUNCHER_ENDS_S)
        for pid in _session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_signal(self, number, frame) -> None:
        self._forced = self._forced or (self._asked and number == signal.SIGINT)
        if not self._asked:
            self._asked = True
            force = " (press Ctrl-C again to force it)" if number == signal.SIGINT else ""
            warn(f"apex: {signal.Signals(number).name}: ending the run{force}")


def _session(leader: int) -> list[int]:
    """Return the processes of this machine that belong to the session of ``leader``: the launcher and its ranks."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            after_name = stat.read_text().rpartition(")")[2].split()  # state, parent, group, session
            if int(after_name[3]) == leader:
                pids.append(int(stat.parent.name))
    return pids


def _conclude(config: Config, topology: Topology, folder: RunFolder, preset: str, status: int) -> int:
    """Make sure there is a result, and put what went wrong last on the screen."""
    status, result = 128 - status if status < 0 else status, folder.result()
    if result is None:
        status = status or 1
    elif config.run.tolerate == "actors":  # the launcher's own is that of the first rank that was lost
        status = result["status"] or (0 if folder.error() is None else status or 1)
    if status and config.run.tolerate == "actors" and folder.error() is None and not any(folder.tensorboard.glob("*")):
        leave_error(folder, "apex: a rank ended before all ranks had met\n")
    if status:
        write_error_result(folder, config, topology, preset, status)
    view.conclude(folder)
    if status and folder.checkpoints.is_dir():
        _tell_how_to_go_on(folder)
    error = folder.error()
    if error is not None:
        warn(error, end="")
    return status


def _tell_how_to_go_on(folder: RunFolder) -> None:
    newest = next(iter(checkpoint_files.whole(folder.checkpoints)), None)
    if newest is not None:
        say(f"apex: to go on from {newest.name}: apex train --resume {folder.path}")
