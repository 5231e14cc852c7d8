"""The facts that `apex doctor` checks: what each rank sees, and what one rank finds out for all."""

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
class Facts:
    """Everything the checks use.

    Attributes:
        num_ranks: ranks that the launcher has started.
        ranks: facts of each rank (see :func:`of_rank`), in order; if they form no world, only of this one.
        config, topology, spec: the run to check; None without a preset.
        no_world: why the ranks form no world, or "".
        refusal, memory_refusal: why `apex train` would refuse the run, or "".
    """

    num_ranks: int
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
        """The transport of the ranks: mpi, zmq or local."""
        return world.transport() if self.config is None else self.config.run.transport

    def hosts(self) -> dict[str, list[dict]]:
        """Return host -> facts of its ranks."""
        found: dict[str, list[dict]] = {}
        for rank in self.ranks:
            found.setdefault(rank["host"], []).append(rank)
        return found

    def ranks_on(self, host: str) -> int:
        """Return the number of ranks of the run on a host; a sample stands for all ranks of the run."""
        return self.topology.size if self.topology is not None and self.is_sample else len(self.hosts()[host])

    @property
    def is_sample(self) -> bool:
        """Whether the world has fewer ranks than the run."""
        return self.topology is not None and self.topology.size > self.num_ranks


def of_rank(rank: int) -> dict:
    """Return the facts that one rank sees, as plain values that any transport can send."""
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
    """Return the launcher that started this process as a rank, in words."""
    name = next((text for variable, text in _LAUNCHERS if variable in os.environ), "srun")
    is_srun = {"PMI_RANK", "SLURM_STEP_ID"} <= os.environ.keys() and "mpirun" in name
    return "srun --mpi=pmi2" if is_srun else name


def mpirun_version() -> str:
    """Return the MPI and version of the mpirun that `apex train` would use, or "" if there is none."""
    try:
        command, environment = [mpirun.find_mpirun(), "--version"], job.environment_for({})
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
