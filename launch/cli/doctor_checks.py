"""The checks of `apex doctor`: each turns facts into findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from apex import envs, look
from apex import topology as topologies
from apex.config import Config, ConfigError, EnvConfig
from apex.schema import EnvSpec
from apex.topology import Topology
from launch.run.launchers import SHARED_MEMORY
from launch.run.world import threads
from launch.run.world import transport as transport_here

OK, WARNING, WRONG = "ok", "warning", "wrong"
# Open MPI 5.0 makes a file of 16 MiB for each rank and needs as much free space; MPICH needs less.
SHM_BYTES_PER_RANK = 16 * 2**20
_REINSTALL_ALE = "pip install --force-reinstall ale-py, or another env.id"

# Part of "launcher: why the ranks form no world" -> fix. The first part that matches counts.
_NO_WORLD_FIXES = (
    ("cannot load", "load an MPI module, pip install 'apex-mpi[mpi]', or set MPI4PY_LIBMPI=/path/libmpi.so"),
    ("nothing: ", "check what `mpirun -n 2 hostname` prints"),
    ("srun", "name the PMI of your MPI: --mpi=pmix or --mpi=pmi2 (srun --mpi=list prints the choices)"),
    ("", "use the mpirun of mpi4py's library, or unset the variables of a job (env | grep -E 'OMPI|PMI')"),
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
        return transport_here() if self.config is None else self.config.run.transport

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


class Finding(NamedTuple):
    """One line of the report, and how to fix what it reports."""

    level: str
    name: str
    text: str
    fix: str = ""


def library(facts: Facts) -> Iterator[Finding]:
    """The MPI library and the launcher belong together."""
    if facts.transport == "zmq":
        yield Finding(OK, "MPI", "not used: run.transport = 'zmq'")
        return
    seen = sorted({rank["library"] for rank in facts.ranks if "library" in rank})
    if len(seen) > 1:
        text = f"the ranks have different libraries: {', '.join(seen)}"
        yield Finding(WRONG, "MPI", text, "load the same MPI module on every node")
    elif seen:
        # The library may report `Open MPI v5.0.11`, mpirun `5.0`: compare name and major version.
        mine, theirs = (name.partition(".")[0] for name in (seen[0], facts.mpirun_version))
        if "mpirun" in facts.launcher and theirs and mine != theirs:
            text = f"mpi4py uses {seen[0]}, but mpirun is {facts.mpirun_version}"
            fix = f"put the mpirun of {seen[0]} first on PATH, or set MPI4PY_LIBMPI to mpirun's libmpi.so"
            yield Finding(WARNING, "MPI", text, fix)
        else:
            yield Finding(OK, "MPI", f"{seen[0]}, started by {facts.launcher}")


def world(facts: Facts) -> Iterator[Finding]:
    """All ranks are in one world, and there are enough of them."""
    if facts.no_world:
        fix = next(fix for part, fix in _NO_WORLD_FIXES if part in f"{facts.launcher}: {facts.no_world}")
        yield Finding(WRONG, "world", facts.no_world, fix)
        return
    hosts = facts.hosts()
    counts = ", ".join(f"{host} {len(ranks)}" for host, ranks in sorted(hosts.items()))
    sample = f", a sample of {facts.topology.size}" if facts.topology is not None and facts.is_sample else ""
    plural = "s" if len(hosts) > 1 else ""
    yield Finding(OK, "world", f"{facts.num_ranks} ranks on {len(hosts)} host{plural}: {counts}{sample}")
    if facts.config is None:
        return
    try:
        topology = facts.topology or topologies.make(facts.config, facts.num_ranks)
    except ConfigError as error:
        yield Finding(WRONG, "world", str(error), "start more ranks")
        return
    asked = facts.config.actor.count
    if topology.num_actors < asked:
        text = f"only {topology.num_actors} of the preset's {asked} actors have a rank"
        needed = topologies.make(facts.config).size
        yield Finding(WARNING, "world", text, f"start {needed} ranks, or accept slower learning")


def neighbours(facts: Facts) -> Iterator[Finding]:
    """MPI knows which ranks share a host, and these can read each other's memory."""
    for host, ranks in sorted(facts.hosts().items()) if not facts.no_world else ():
        here = [rank["rank"] for rank in ranks]
        if any("near" in rank and rank["near"] != here for rank in ranks):
            text = f"{host} has ranks {here}, but MPI puts ranks {ranks[0]['near']} on one host"
            fix = "in a heterogeneous job, run the learner on nodes whose names sort first"
            yield Finding(WRONG, "hosts", text, fix)
        elif len(here) > 1 and not all(set(here) <= set(rank.get("lends", here)) for rank in ranks):
            text = f"the ranks of {host} cannot read each other's memory, so messages are copied"
            fix = "use one user, one container (apptainer without --pid), and ulimit -f unlimited"
            yield Finding(WARNING, "hosts", text, fix)
        else:
            many = f"the {len(here)} ranks of {host} share memory"
            yield Finding(OK, "hosts", many if len(here) > 1 else f"{host} has one rank")


def slots(facts: Facts) -> Iterator[Finding]:
    """Every rank has a slot, and a core."""
    known = next((rank["slots"] for rank in facts.ranks if rank["slots"] is not None), None)
    if known is not None and known < facts.num_ranks:
        text = f"mpirun has {known} slots for {facts.num_ranks} ranks: Open MPI's polls yield the core"
        fix = f"mpirun --host localhost:{facts.num_ranks}, or more tasks from SLURM"
        yield Finding(WARNING, "slots", text, fix)
    for host, ranks in sorted(facts.hosts().items()):
        wanted, cores = facts.ranks_on(host), len(_cores(ranks))
        if wanted > cores:
            text = f"{wanted} ranks share {cores} of the {ranks[0]['host_cores']} cores of {host}"
            yield Finding(WARNING, "slots", text, "fewer --ranks, or more cores (sbatch: --cpus-per-task)")
        else:
            yield Finding(OK, "slots", f"{host}: {wanted} ranks on {cores} cores")


def binding(facts: Facts) -> Iterator[Finding]:
    """No rank is bound to fewer cores than it has threads, and no two to one core while others are free."""
    for host, ranks in sorted(facts.hosts().items()):
        all_cores = ranks[0]["host_cores"]
        tight = next((rank for rank in ranks if len(rank["cores"]) < _threads(facts, rank["rank"])), None)
        if tight is not None:
            name = f"rank {tight['rank']}" if facts.topology is None else facts.topology.name(tight["rank"])
            count = _threads(facts, tight["rank"])
            text = f"{name} has {count} threads on core {_listed(tight['cores'])} of {host}"
            fix = "mpirun --bind-to none, srun --cpu-bind=none, or more cores (--cpus-per-task)"
            yield Finding(WARNING, "binding", text, fix)
        elif len(ranks) > len(_cores(ranks)) < all_cores:
            text = f"{len(ranks)} ranks of {host} are bound to core {_listed(_cores(ranks))}, of {all_cores}"
            fix = "mpirun --bind-to none, srun --cpu-bind=none, or --cpus-per-task and --exclusive"
            yield Finding(WARNING, "binding", text, fix)
        else:
            is_free = all(len(rank["cores"]) == all_cores for rank in ranks)
            text = "ranks are not bound to cores" if is_free else "each rank has cores for its threads"
            yield Finding(OK, "binding", f"{host}: {text}")


def thread_count(facts: Facts) -> Iterator[Finding]:
    """The threads of all ranks of a host fit on its cores."""
    if facts.topology is None:
        return
    for host, ranks in sorted(facts.hosts().items()):
        numbers = range(facts.topology.size) if facts.is_sample else [rank["rank"] for rank in ranks]
        total, cores = sum(_threads(facts, number) for number in numbers), len(_cores(ranks))
        text = f"{host}: {total} threads of {len(numbers)} ranks on {cores} cores"
        if total > max(cores, len(numbers)):
            yield Finding(WARNING, "threads", text, "lower learner.threads or actor.threads")
        else:
            yield Finding(OK, "threads", text)


def _threads(facts: Facts, rank: int) -> int:
    if facts.config is None or facts.topology is None or rank >= facts.topology.size:
        return 1
    return threads(facts.config, facts.topology.role(rank)[0])


def _cores(ranks: list[dict]) -> list[int]:
    return sorted({core for rank in ranks for core in rank["cores"]})


def _listed(cores: list[int]) -> str:
    return ", ".join(map(str, cores))


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """MPI's files fit into /dev/shm: a rank that finds it full is killed."""
    if facts.transport != "mpi":
        yield Finding(OK, str(SHARED_MEMORY), f"not used by {facts.transport}")
        return
    for host, ranks in sorted(facts.hosts().items()):
        # The world that checks has already taken its share.
        free, count = min(rank["shm_free"] for rank in ranks), facts.ranks_on(host)
        needed = count * SHM_BYTES_PER_RANK
        text = f"{host}: {free / 2**20:.0f} MiB free, {count} ranks need about {needed / 2**20:.0f}"
        if free < needed:
            larger = f"docker --shm-size, or mount -o remount,size=1G {SHARED_MEMORY}"
            fix = f"enlarge it ({larger}), or set OMPI_MCA_btl_sm_backing_directory=/tmp"
            yield Finding(WRONG, str(SHARED_MEMORY), text, fix)
        else:
            yield Finding(OK, str(SHARED_MEMORY), text)


def memory(facts: Facts) -> Iterator[Finding]:
    """The run fits into the memory of every host."""
    if facts.memory_refusal:
        yield Finding(WRONG, "memory", facts.memory_refusal, "do what it says, or ask SLURM for more (--mem)")
        return
    for host, ranks in sorted(facts.hosts().items()):
        fits = "" if facts.config is None or facts.refusal else ", the run fits"
        free = min(rank["memory_free"] for rank in ranks)
        yield Finding(OK, "memory", f"{host}: {free / 2**30:.1f} GiB free{fits}")


def gpu(facts: Facts) -> Iterator[Finding]:
    """The learner's device exists, and a GPU is used if there is one."""
    found, device = facts.gpus, "cpu" if facts.config is None else facts.config.learner.device
    if device.startswith("cuda") and not found:
        text = f"learner.device = '{device}', but torch sees no GPU"
        yield Finding(WRONG, "GPU", text, "ask SLURM for one (--gres=gpu:1), or use cpu")
    elif found and facts.config is not None and device == "cpu":
        yield Finding(WARNING, "GPU", f"{found[0]} is not used", "--set learner.device=cuda")
    else:
        text = f"{len(found)}: {found[0]}" if found else "none; the learner computes on the CPU"
        yield Finding(OK, "GPU", text)


def cuda_aware(facts: Facts) -> Iterator[Finding]:
    """Whether MPI accepts GPU addresses; nothing here needs it."""
    if facts.transport == "mpi" and not facts.no_world:
        answer = "yes" if facts.ranks[0].get("cuda_aware") else "no"
        yield Finding(OK, "CUDA in MPI", f"{answer}; not needed: messages are in host memory")


def native(facts: Facts) -> Iterator[Finding]:
    """The C extension works on every host."""
    for host, ranks in sorted(facts.hosts().items()):
        error = ranks[0]["native_error"]
        if error:
            fix = "make native, or pip install . again, on a node like this one"
            yield Finding(WRONG, "C part", f"{host}: {error}", fix)
        else:
            yield Finding(OK, "C part", f"{host}: priority index in {ranks[0]['native']}")


def roms(facts: Facts) -> Iterator[Finding]:
    """The environment exists and can be stepped."""
    env = EnvConfig(family="atari", id="pong") if facts.config is None else facts.config.env
    is_atari = env.family == "atari"
    if facts.refusal.startswith("env."):
        fix = _REINSTALL_ALE if is_atari else "correct what it names, or use another env.id"
        yield Finding(WRONG, "ROMs" if is_atari else "environment", facts.refusal, fix)
        return
    if not is_atari:
        yield Finding(OK, "ROMs", f"not needed: {env.id}")
        return
    try:
        envs.env_spec(env)
        yield Finding(OK, "ROMs", f"ale_py has {env.id}")
    except ConfigError as error:
        yield Finding(WRONG, "ROMs", str(error), _REINSTALL_ALE)


def runs(facts: Facts) -> Iterator[Finding]:
    """The folder of runs is writable."""
    if facts.config is None:
        return
    folder = Path(facts.config.run.directory).absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if look.is_there(path))
        is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        error = "" if is_writable else f"{existing} cannot be written to"
    except look.Unreadable as unreadable:
        error = str(unreadable)
    if error:
        yield Finding(WRONG, "runs", f"run.directory = '{folder}': {error}", "--set run.directory=FOLDER")
    else:
        yield Finding(OK, "runs", f"{folder} can be written to")


def preset(facts: Facts) -> Iterator[Finding]:
    """`apex train` accepts the preset."""
    if facts.config is None:
        return
    if not facts.refusal:
        yield Finding(OK, "preset", "apex train accepts it")
    elif not facts.refusal.startswith(("env.", "learner.device")):  # other checks report these
        yield Finding(WRONG, "preset", facts.refusal, "do what it says")


CHECKS = (
    library, world, neighbours, slots, binding, thread_count, shared_memory, memory, gpu, cuda_aware,
    native, roms, runs, preset,
)  # fmt: skip


def findings(facts: Facts) -> list[Finding]:
    """Return the findings of all checks, in order."""
    return [finding for check in CHECKS for finding in check(facts)]
