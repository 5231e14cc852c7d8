"""The facts that `apex doctor` checks: what each rank sees, and what one rank finds out for all."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess

from apex import processes, variables
from apex.memory_limits import available_bytes
from launch.run import launchers
from launch.run.launchers import SHARED_MEMORY

_LAUNCHERS = (
    (variables.RANK, "launch.run.spawn"),
    ("OMPI_COMM_WORLD_RANK", "mpirun of Open MPI"),
    ("PMI_RANK", "mpirun of MPICH"),
    ("PMIX_RANK", "srun --mpi=pmix"),
)


def of_rank(rank: int) -> dict:
    """Return the facts that one rank sees, as plain values that any transport can send."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "host_cores": os.cpu_count() or 1,
        "slots": _number("OMPI_UNIVERSE_SIZE"),
        "shm_free": shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        "memory_free": available_bytes(),
        **_native(),
    }


def launcher() -> str:
    """Return the launcher that started this process as a rank, in words."""
    name = next((text for variable, text in _LAUNCHERS if variable in os.environ), "srun")
    is_srun = {"PMI_RANK", "SLURM_STEP_ID"} <= os.environ.keys() and "mpirun" in name
    return "srun --mpi=pmi2" if is_srun else name


def mpirun_version() -> str:
    """Return the MPI and version of the mpirun that `apex train` would use, or "" if there is none."""
    try:
        command, environment = [launchers.find_mpirun(), "--version"], processes.environment_for({})
        output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30).stdout
    except (ValueError, OSError, subprocess.TimeoutExpired):  # ValueError: find_mpirun finds none
        return ""
    number = re.search(r"\d+(\.\d+)+", output)
    name = "Open MPI" if "Open MPI" in output else "MPICH" if "HYDRA" in output else "MPI"
    return f"{name} {number[0] if number else '?'}"


def gpus(must_ask: bool) -> list[str]:
    """Return the names of the CUDA devices. Unless ``must_ask``, torch, slow to import, needs a driver."""
    if not must_ask and not os.path.exists("/dev/nvidiactl"):
        return []
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _native() -> dict:
    try:
        from replay_rank.index import make_index

        return {"native": make_index("wide", 1, alpha=0.6).backend, "native_error": ""}
    except ImportError as error:
        return {"native": "", "native_error": str(error)}


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None
