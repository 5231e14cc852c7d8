"""Which command starts the ranks of a run over each transport, and what it needs in its environment."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from apex import leftovers, processes
from apex.config import ConfigError
from apex.token import given_token

SHARED_MEMORY, _SEGMENTS = Path("/dev/shm"), "apex-segments-"
_BACKING, _SESSION = "OMPI_MCA_btl_sm_backing_directory", "PRTE_MCA_prte_tmpdir_base"
ENVIRONMENT = {
    # Open MPI refuses root unless told twice.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # More ranks than cores is normal here (Open MPI 5, then 4).
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    # With one or two ranks each would be tied to one core, which squeezes torch; Intel's ties any number.
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "I_MPI_PIN": "0",
    # Its start-up prints a warning where there is no such network.
    "OMPI_MCA_osc": "^ucx",
    **processes.ENVIRONMENT,
}
"""What every rank needs in its environment; what the user has set wins."""


def mpi(ranks: int, tolerant: bool = False) -> list[str]:
    """Return the mpirun prefix for ``ranks`` ranks; with ``tolerant``, the job survives lost ranks.

    Open MPI that knows of more ranks than slots gives the core away in every poll that finds nothing (a
    `sched_yield` in each MPI_Iprobe and MPI_Test, whatever mpi_yield_when_idle says): where other
    processes compute, a slice of 4 ms each time. Ranks of ours never wait inside MPI, so on a machine
    of its own it is told of a slot for each.
    """
    mpirun = find_mpirun()
    is_open_mpi = _is_open_mpi(mpirun)
    if tolerant and not is_open_mpi:
        raise ConfigError(
            f"run.fault_tolerance = 'actors' over mpi needs Open MPI 5, not {mpirun}; use --transport zmq"
        )
    # One that is started in a lost one's place takes a slot more.
    slots = (
        ["--host", f"localhost:{2 * ranks if tolerant else ranks}"] if is_open_mpi and not _in_a_job() else []
    )
    return [mpirun, *slots, *(["--with-ft", "ulfm"] if tolerant else []), "-n", str(ranks)]


def zmq(ranks: int, may_lose: int | None = None, lives: int = 0) -> list[str]:
    """Return the prefix for ``ranks`` ranks; those from ``may_lose`` on are restarted ``lives`` times.

    Raises :class:`ConfigError` for a token in the environment with which these would be refused.
    """
    given_token()
    tolerant = [] if may_lose is None else ["--may-lose", str(may_lose), "--lives", str(lives)]
    return [*processes.python("launch.run.spawn"), "-n", str(ranks), *tolerant, "--"]


@contextlib.contextmanager
def segments(tolerant: bool = False) -> Iterator[dict[str, str]]:
    """Yield variables that confine Open MPI's files to this user and host, and remove the files at the end.

    Shared memory and session files lie in a folder of the run's own: ranks that are killed leave theirs
    behind. When this process is killed, too, the next one removes them. Ranks do not listen on the network,
    where anybody could send to them; only those of a ``tolerant`` run have to, since newcomers are not
    reached through shared memory.
    """
    with contextlib.ExitStack() as stack:
        variables = {}
        if not _in_a_job():  # whose ranks may be on other hosts
            variables = {} if tolerant else {"OMPI_MCA_btl": "^tcp"}
            with contextlib.suppress(OSError):  # Open MPI will know another place
                own = stack.enter_context(leftovers.folder(_SEGMENTS, SHARED_MEMORY))
                variables |= dict.fromkeys((_BACKING, _SESSION), str(own))
        yield variables


def _is_open_mpi(mpirun: str) -> bool:
    try:
        return (
            "Open MPI"
            in subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20).stdout
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def _in_a_job() -> bool:
    """Whether a resource manager says where ranks may run."""
    return any(
        name in os.environ for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")
    )


def find_mpirun() -> str:
    """Return the mpirun beside this Python, else the first on PATH; raises :class:`ConfigError`."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.is_file() else shutil.which("mpirun")
    if found is None:
        raise ConfigError(
            "mpirun is not installed; run `pip install 'apex-mpi[mpi]'`, or load your cluster's MPI module"
        )
    return found
