"""Starts mpirun for `apex train`, follows the run, forwards signals, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from apex.config import Config, ConfigError
from apex.run_folder import RunFolder
from apex.topology import Topology
from apex.transport.drive import on_stop_signals
from launch import view
from launch.rank import RUN_FOLDER_VARIABLE, write_error_result

_PR_SET_PDEATHSIG = 1
_MPIRUN_ENDS_S = 5.0  # mpirun kills its ranks within a second of SIGTERM
ENVIRONMENT = {
    # Open MPI refuses root unless told twice.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # More ranks than cores is normal here (Open MPI 5, then 4).
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # With one or two ranks each would be tied to one core, which squeezes torch.
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    # Its start-up prints a warning where there is no such network.
    "OMPI_MCA_osc": "^ucx",
    # glibc then keeps large blocks instead of returning them page by page after every batch.
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
"""What every rank needs in its environment; what the user has set wins."""


def run(config: Config, topology: Topology, folder: RunFolder, preset: str, arguments: list[str]) -> int:
    """Run ``apex ARGUMENTS`` as ``topology.size`` ranks; return the exit status when all have ended."""
    # -P: a file of the user's in this folder must not take the place of a module.
    command = [find_mpirun(), "-n", str(topology.size), sys.executable, "-P", "-m", "launch.main", *arguments]
    process = subprocess.Popen(
        command, env=_environment(folder), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent
    )
    job = _Job(process, folder)
    try:
        view.follow(folder.path, job.is_running, f"{preset}, {topology.size} ranks")
    finally:
        job.end()
    return _conclude(config, topology, folder, preset, process.wait())


def find_mpirun() -> str:
    """Return the mpirun beside this Python, else the first on PATH; raises :class:`ConfigError`."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        raise ConfigError("mpirun is not installed; run `pip install 'apex-mpi[mpi]'`, or load your cluster's MPI module")
    return found


def _environment(folder: RunFolder) -> dict[str, str]:
    """Return the environment of the ranks; what the user has set stays."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return ENVIRONMENT | os.environ | {RUN_FOLDER_VARIABLE: str(folder.path), "PYTHONPATH": path}


def _end_with_parent() -> None:
    """Have the kernel end mpirun, and mpirun its ranks, even if this process is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Job:
    """The first signal asks the run to end; a second Ctrl-C ends it by force."""

    def __init__(self, process: subprocess.Popen, folder: RunFolder):
        self.process, self.folder = process, folder
        self._asked = self._passed_on = self._forced = False
        on_stop_signals(self._on_signal)

    def is_running(self) -> bool:
        """Return whether to go on waiting; passes on the signal that has arrived since the last call."""
        # mpirun forwards SIGUSR1 to every rank. One that is still starting would die of it; once the learner
        # writes its log, all ranks have met.
        if self._asked and not self._passed_on and self.folder.tensorboard.exists():
            self._passed_on = True
            self.process.send_signal(signal.SIGUSR1)
        return self.process.poll() is None and not self._forced

    def end(self) -> None:
        """Leave nothing behind: mpirun told to end kills its ranks; killed itself, it would leave them."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_MPIRUN_ENDS_S)
        for pid in _session(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_signal(self, number, frame) -> None:
        self._forced = self._forced or (self._asked and number == signal.SIGINT)
        if not self._asked:
            self._asked = True
            force = " (press Ctrl-C again to force it)" if number == signal.SIGINT else ""
            print(f"apex: {signal.Signals(number).name}: ending the run{force}", file=sys.stderr, flush=True)


def _session(leader: int) -> list[int]:
    """Return the processes of this machine that belong to the session of ``leader``: mpirun and its ranks."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            after_name = stat.read_text().rpartition(")")[2].split()  # state, parent, group, session
            if int(after_name[3]) == leader:
                pids.append(int(stat.parent.name))
    return pids


def _conclude(config: Config, topology: Topology, folder: RunFolder, preset: str, status: int) -> int:
    """Make sure there is a result, and put what went wrong last on the screen."""
    status = 128 - status if status < 0 else status
    if folder.result() is None:
        status = status or 1
    if status:
        write_error_result(folder, config, topology, preset, status)
    view.conclude(folder)
    error = folder.error()
    if error is not None:
        sys.stdout.flush()
        print(error, file=sys.stderr, end="", flush=True)
    return status
