"""Whether this process was started as a rank of a world, by the launcher's environment variables."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

from apex import variables
from apex.config import Config, ConfigError
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY, Topology

if TYPE_CHECKING:  # read before NumPy is imported, which reads the thread variables
    from apex.schema import Limits
    from apex.transport.endpoint import Endpoint
    from apex.transport.wire import Wire

T = TypeVar("T")

# (rank, size) as set by launch.run.spawn; by Open MPI's mpirun; by MPICH's and by srun --mpi=pmi2; by srun
# --mpi=pmix.
_OUR_VARIABLES = (variables.RANK, variables.SIZE)
_VARIABLES = (
    _OUR_VARIABLES,
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "SLURM_NTASKS"),
)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# The launcher passes the signal that ends a run on to all ranks. One that is still starting would die of it.
_WITHOUT_USR1 = 'trap "" USR1; exec "$@"'


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
        raise ConfigError(
            f"{names[0]}={rank} and {names[1]}={size} are no rank of a world; unset them to start alone"
        )
    return int(rank), int(size)


def from_srun(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return ``(task, tasks)`` of this process's step of SLURM, or None outside one."""
    task, tasks = (environment.get(name, "") for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    return (int(task), int(tasks)) if task.isdecimal() and tasks.isdecimal() else None


def is_bare(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started several tasks without an MPI world: each would believe that it is alone."""
    step = from_srun(environment)
    is_world = any(all(name in environment for name in pair) for pair in _VARIABLES)
    return step is not None and step[1] > 1 and not is_world


def _refuse_bare_tasks(environment: Mapping[str, str]) -> None:
    step = from_srun(environment)
    if step is not None and is_bare(environment):
        raise ConfigError(
            f"srun has started {step[1]} tasks, but no MPI world; name the PMI of your MPI, "
            "as --mpi=pmix or --mpi=pmi2 (srun --mpi=list shows those of this SLURM)"
        )


def transport() -> str:
    """Return the transport of the world that :func:`from_environment` tells of."""
    return "zmq" if all(name in os.environ for name in _OUR_VARIABLES) else "mpi"


class Worlds(Protocol):
    """The module of a transport's world (see ``apex.transport.mpi_world``); ``world`` is its world."""

    def world(self, expected_size: int) -> Any:
        """Return the world that this process is a rank of: it has ``rank``, ``size`` and ``allgather``."""

    def life(self) -> int:
        """Return how many processes had this one's rank before it."""

    def meet(self, world: Any, watchdog_s: float, meet_s: float, /) -> None:
        """Return once all ranks are there."""

    def all_begin(self, world: Any, /) -> None:
        """Return once all ranks have called this."""

    def from_learner(self, world: Any, make: Callable[[], T], /) -> T:
        """Return what ``make()`` gives on the learner's rank, on every rank."""

    def first_from_each_host(self, world: Any, make: Callable[[list[int]], T | None], /) -> T | None:
        """Return the first value other than None that ``make(ranks on the host)`` returns on any host."""

    def check_tolerance(self) -> None:
        """Raise :class:`ConfigError` where the loss of a rank would end the job."""

    def leave(self, tolerant: bool) -> int:
        """Return the exit status of a rank that has done all."""

    def abort(self, tolerant: bool) -> NoReturn:
        """End all ranks with status 1 or, where losses are survived, this one alone."""


class Wires(Protocol):
    """The module of a transport's wire (see ``apex.transport.mpi``)."""

    def make_wire(
        self, world: Any, topology: Topology, limits: Limits, /, *, command: list[str] | None = None
    ) -> Wire:
        """Return this rank's wire; with ``command``, which starts a replacement, losses are survived."""

    def connect(self, joining: Any, /) -> Any:
        """In a process that takes a lost one's place: return what ``join_wire`` needs."""

    def join_wire(self, connected: Any, topology: Topology, /) -> Wire:
        """Return the wire of that process."""


def load(name: str) -> tuple[Worlds, Wires]:
    """Return the modules of a transport between processes: that of its world, and that of its wire."""
    worlds, wires = (importlib.import_module(f"apex.transport.{name}{part}") for part in ("_world", ""))
    return cast(Worlds, worlds), cast(Wires, wires)


def threads(config: Config, role: str) -> int:
    """Return the threads a role may compute with."""
    return {
        LEARNER: config.learner.threads,
        ACTOR: config.actor.threads,
        EVALUATOR: config.actor.threads,
    }.get(role, 1)


def limit_threads(config: Config, topology: Topology, rank: int) -> None:
    """Set the thread variables of this rank; they are only read when NumPy and torch are first imported."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = str(threads(config, topology.role(rank)[0]))


def replacement_command() -> list[str]:
    """Return the command that starts a replacement of a lost actor, in any folder and environment."""
    root = str(Path(__file__).resolve().parents[2])
    program = (
        f"import sys; sys.path[:0] = [{root!r}]; from launch.run.replacement import main; sys.exit(main())"
    )
    return ["/bin/sh", "-c", _WITHOUT_USR1, "sh", sys.executable, "-P", "-c", program]


def make_port(wire: Wire, topology: Topology, limits: Limits) -> Endpoint:
    """Return the port of the wire's rank: the one place that puts an endpoint on a wire."""
    from apex.transport.endpoints import ActorEndpoint, ReplayEndpoint
    from apex.transport.learner_endpoint import LearnerEndpoint

    kinds: dict[str, type[Endpoint]] = {
        LEARNER: LearnerEndpoint, REPLAY: ReplayEndpoint, EVALUATOR: ActorEndpoint, ACTOR: ActorEndpoint,
    }  # fmt: skip
    return kinds[topology.role(wire.rank)[0]](wire, topology, limits)
