"""Whether this process was started as a rank of a world, by the launcher's environment variables."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType

from apex.config import Config, ConfigError
from apex.topology import ACTOR, EVALUATOR, LEARNER, Topology

# (rank, size) as set by launch.spawn; by Open MPI's mpirun; by MPICH's and by srun --mpi=pmi2; by srun --mpi=pmix.
_OUR_VARIABLES = ("APEX_RANK", "APEX_SIZE")
_VARIABLES = (_OUR_VARIABLES, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("PMIX_RANK", "SLURM_NTASKS"))
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def from_environment(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return ``(rank, size)`` of the world that a process of this environment is told it belongs to, or None.

    Raises :class:`ConfigError` where the variables make no sense.
    """
    names = next((pair for pair in _VARIABLES if all(name in environment for name in pair)), None)
    if names is None:
        _refuse_bare_tasks(environment)
        return None
    rank, size = (environment[name] for name in names)
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ConfigError(f"{names[0]}={rank} and {names[1]}={size} name no rank of a world; unset them to start on your own")
    return int(rank), int(size)


def from_srun(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return ``(task, tasks)`` of the step of SLURM that this process belongs to, or None: tasks, whether or not a world."""
    task, tasks = (environment.get(name, "") for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    return (int(task), int(tasks)) if task.isdecimal() and tasks.isdecimal() else None


def is_bare(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun has started several tasks that no MPI makes a world: each would take itself for the only one."""
    step = from_srun(environment)
    is_world = any(all(name in environment for name in pair) for pair in _VARIABLES)
    return step is not None and step[1] > 1 and not is_world


def _refuse_bare_tasks(environment: Mapping[str, str]) -> None:
    step = from_srun(environment)
    if step is not None and is_bare(environment):
        raise ConfigError(
            f"srun has started {step[1]} tasks, but no MPI world for them; name the PMI that your MPI was built for, "
            "as --mpi=pmix or --mpi=pmi2 (srun --mpi=list shows those of this SLURM)"
        )


def transport() -> str:
    """Return the transport of the world that :func:`from_environment` tells of."""
    return "zmq" if all(name in os.environ for name in _OUR_VARIABLES) else "mpi"


def load(name: str) -> tuple[ModuleType, ModuleType]:
    """Return the modules of a transport between processes: that of its world, and that of its ports."""
    return importlib.import_module(f"apex.transport.{name}_world"), importlib.import_module(f"apex.transport.{name}")


def threads(config: Config, role: str) -> int:
    """Return the threads a role may compute with."""
    return {LEARNER: config.learner.threads, ACTOR: config.actor.threads, EVALUATOR: config.actor.threads}.get(role, 1)


def limit_threads(config: Config, topology: Topology, rank: int) -> None:
    """Set the thread variables of this rank; they are only read when NumPy and torch are first imported."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads(config, topology.role(rank)[0]))
