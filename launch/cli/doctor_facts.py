"""What `apex doctor` looks at: what each rank sees from where it is, and what one rank finds out for all."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass, field

from apex import variables
from apex.config import Config
from apex.schema import EnvSpec
from apex.topology import Topology
from launch.run import job, mpirun, world
from launch.run.memory_limits import available_bytes

SHM = "/dev/shm"
_LAUNCHERS = (
    (variables.RANK, "launch.run.spawn"),
    ("OMPI_COMM_WORLD_RANK", "mpirun of Open MPI"),
    ("PMI_RANK", "mpirun of MPICH"),
    ("PMIX_RANK", "srun --mpi=pmix"),
)


@dataclass
class Patient:
    """All that is known when the checks are made.

    Attributes:
        told: what the launcher says of the world: its ranks.
        ranks: facts of each rank (see :func:`of_rank`), in order; only of this one where the world is not one.
        config, topology, spec: what is to run; None without a preset. The topology is that of the run, of
            which the world may be a smaller sample.
        no_world: why the ranks are no world, or "".
        refusal, memory_refusal: what `apex train` would refuse the run for, or "".
    """

    told: int
    launcher: str
    ranks: list[dict]
    mpirun_version: str = ""
    config: Config | None = None
    topology: Topology | None = None
    no_world: str = ""
    spec: EnvSpec | None = None
    refusal: str = ""
    memory_refusal: str = ""
    gpus: list[str] = field(default_factory=list)

    @property
    def transport(self) -> str:
        """How the ranks exchange messages."""
        return world.transport() if self.config is None else self.config.run.transport

    def hosts(self) -> dict[str, list[dict]]:
        """Return host -> facts of its ranks."""
        found: dict[str, list[dict]] = {}
        for rank in self.ranks:
            found.setdefault(rank["host"], []).append(rank)
        return found

    def ranks_on(self, host: str) -> int:
        """Return how many ranks the run has on a host: those of the world, or all if the world is a sample on one host."""
        here = len(self.hosts()[host])
        return self.topology.size if self.topology is not None and self.topology.size > self.told else here


def of_rank(rank: int) -> dict:
    """Return what this process sees: plain values, which travel between ranks over any transport."""
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "host_cores": os.cpu_count() or 1,
        "slots": _number("OMPI_UNIVERSE_SIZE"),
        "shm_free": shutil.disk_usage(SHM).free if os.path.isdir(SHM) else 0,
        "memory_free": available_bytes(),
        **_native(),
    }


def launcher() -> str:
    """Return, in words, what has started this process as a rank."""
    name = next((text for variable, text in _LAUNCHERS if variable in os.environ), "srun")
    return "srun --mpi=pmi2" if "PMI_RANK" in os.environ and "SLURM_STEP_ID" in os.environ and "mpirun" in name else name


def mpirun_version() -> str:
    """Return the MPI and version of the mpirun that `apex train` would take, or "" where there is none."""
    try:
        command = [mpirun.find_mpirun(), "--version"]
        said = subprocess.run(command, env=job.environment_for({}), capture_output=True, text=True, timeout=30).stdout
    except (ValueError, OSError, subprocess.TimeoutExpired):  # ConfigError: there is none
        return ""
    number = re.search(r"\d+(\.\d+)+", said)
    return f"{'Open MPI' if 'Open MPI' in said else 'MPICH' if 'HYDRA' in said else 'MPI'} {number[0] if number else '?'}"


def gpus(asked: bool) -> list[str]:
    """Return the names of the CUDA devices; torch, which takes seconds to import, is only asked if there may be one."""
    if not asked and not os.path.exists("/dev/nvidiactl"):
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
