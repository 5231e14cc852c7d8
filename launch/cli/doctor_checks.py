"""The checks of `apex doctor`: each turns what was seen into findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from apex import envs, look
from apex import topology as topologies
from apex.config import ConfigError, EnvConfig
from launch.cli.doctor_facts import SHM, Patient
from launch.run.world import threads

OK, WARNING, WRONG = "ok", "warning", "wrong"
# Open MPI makes a file of 16 MiB for each rank (measured with 5.0) and wants that much to be free; MPICH makes less.
SHM_BYTES_PER_RANK = 16 * 2**20


_NO_WORLD = (  # part of what is known -> what to do
    ("cannot load", "load your cluster's MPI module, or pip install 'apex-mpi[mpi]'; MPI4PY_LIBMPI=/path/libmpi.so names one"),
    ("nothing: ", "look what `mpirun -n 2 hostname` says"),
    ("srun", "name the PMI that your MPI was built for: --mpi=pmix or --mpi=pmi2 (srun --mpi=list shows those of this SLURM)"),
    ("", "use the mpirun of mpi4py's library, or unset the variables of an earlier MPI job (env | grep -E 'OMPI|PMI')"),
)


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    name: str
    text: str
    fix: str = ""


def library(patient: Patient) -> Iterator[Finding]:
    """MPI library and launcher belong together."""
    if patient.transport == "zmq":
        yield Finding(OK, "MPI", "not used: run.transport = 'zmq'")
        return
    seen = sorted({rank["library"] for rank in patient.ranks if "library" in rank})
    if len(seen) > 1:
        yield Finding(WRONG, "MPI", f"the ranks have different libraries: {', '.join(seen)}", "load the same MPI module on every node")
    elif seen:
        # What says `Open MPI v5.0.11` on one side may say `5.0` on the other: the MPI and its first number have to agree.
        mine, theirs = (name.partition(".")[0] for name in (seen[0], patient.mpirun_version))
        if "mpirun" in patient.launcher and theirs and mine != theirs:
            fix = f"put the mpirun of {seen[0]} first on PATH, or set MPI4PY_LIBMPI to the libmpi.so of {patient.mpirun_version}"
            yield Finding(WARNING, "MPI", f"mpi4py uses {seen[0]}, but mpirun is of {patient.mpirun_version}", fix)
        else:
            yield Finding(OK, "MPI", f"{seen[0]}, started by {patient.launcher}")


def world_size(patient: Patient) -> Iterator[Finding]:
    """All ranks are in one world, which is large enough."""
    if patient.no_world:
        fix = next(fix for part, fix in _NO_WORLD if part in f"{patient.launcher}: {patient.no_world}")
        yield Finding(WRONG, "world", patient.no_world, fix)
        return
    hosts = patient.hosts()
    sample = f", a sample of {patient.topology.size}" if patient.topology is not None and patient.topology.size > patient.told else ""
    yield Finding(OK, "world", f"{patient.told} ranks on {len(hosts)} host{'s'[: len(hosts) > 1]}: {_counts(hosts)}{sample}")
    if patient.config is None:
        return
    try:
        topology = patient.topology or topologies.make(patient.config, patient.told)
    except ConfigError as error:
        yield Finding(WRONG, "world", str(error), "start more ranks")
        return
    asked = patient.config.actor.count
    if topology.num_actors < asked:
        text = f"{topology.num_actors} of the {asked} actors of the preset have a rank here"
        enough = topologies.make(patient.config).size
        yield Finding(WARNING, "world", text, f"start {enough} ranks, or take the learner's speed as it comes")


def _counts(hosts: dict[str, list]) -> str:
    return ", ".join(f"{host} {len(ranks)}" for host, ranks in sorted(hosts.items()))


def neighbours(patient: Patient) -> Iterator[Finding]:
    """MPI knows which ranks share a host, and those can lend each other memory."""
    for host, ranks in sorted(patient.hosts().items()) if not patient.no_world else ():
        here = [rank["rank"] for rank in ranks]
        if any("near" in rank and rank["near"] != here for rank in ranks):
            text = f"{host} has ranks {here}, but MPI takes {ranks[0]['near']} to be together"
            yield Finding(WRONG, "hosts", text, "in a heterogeneous job, put the learner on nodes that come first in the alphabet")
        elif len(here) > 1 and not all(set(here) <= set(rank.get("lends", here)) for rank in ranks):
            text = f"the ranks of {host} cannot read each other's memory, so everything is copied through messages"
            fix = "start them as one user, in one container (apptainer: without --pid), with ulimit -f unlimited"
            yield Finding(WARNING, "hosts", text, fix)
        else:
            yield Finding(OK, "hosts", f"the {len(here)} ranks of {host} share memory" if len(here) > 1 else f"{host} has one rank")


def slots(patient: Patient) -> Iterator[Finding]:
    """Every rank has a slot, and a core."""
    known = next((rank["slots"] for rank in patient.ranks if rank["slots"] is not None), None)
    if known is not None and known < patient.told:
        text = f"mpirun has {known} slots for {patient.told} ranks: Open MPI then gives the core away in every poll"
        yield Finding(WARNING, "slots", text, f"mpirun --host localhost:{patient.told}, or ask SLURM for as many tasks")
    for host, ranks in sorted(patient.hosts().items()):
        wanted, cores = patient.ranks_on(host), len(_union(ranks))
        if wanted > cores:
            text = f"{wanted} ranks share {cores} of the {ranks[0]['host_cores']} cores of {host}: they take turns"
            yield Finding(WARNING, "slots", text, "fewer --ranks, or more cores (sbatch: --cpus-per-task)")
        else:
            yield Finding(OK, "slots", f"{host}: {wanted} ranks on {cores} cores")


def binding(patient: Patient) -> Iterator[Finding]:
    """No rank is tied to fewer cores than it has threads, and no two to one core while others are free."""
    for host, ranks in sorted(patient.hosts().items()):
        tied = [rank for rank in ranks if len(rank["cores"]) < _threads(patient, rank["rank"])]
        doubled = len(ranks) > len(_union(ranks)) < ranks[0]["host_cores"]
        if tied:
            rank, cores = tied[0]["rank"], tied[0]["cores"]
            text = f"{_name(patient, rank)} has {_threads(patient, rank)} threads on core {_listed(cores)} of {host}"
            yield Finding(WARNING, "binding", text, "mpirun --bind-to none, srun --cpu-bind=none, or more cores (--cpus-per-task)")
        elif doubled:
            text = f"{len(ranks)} ranks of {host} are tied to core {_listed(_union(ranks))}, of {ranks[0]['host_cores']}"
            yield Finding(WARNING, "binding", text, "mpirun --bind-to none, srun --cpu-bind=none, or --cpus-per-task and --exclusive")
        else:
            free = all(len(rank["cores"]) == rank["host_cores"] for rank in ranks)
            yield Finding(OK, "binding", f"{host}: {'ranks are not tied to cores' if free else 'each rank has cores for its threads'}")


def thread_count(patient: Patient) -> Iterator[Finding]:
    """The threads of all ranks of a host fit on its cores."""
    if patient.config is None or patient.topology is None:
        return
    for host, ranks in sorted(patient.hosts().items()):
        whole = patient.topology.size > patient.told
        numbers = range(patient.topology.size) if whole else [rank["rank"] for rank in ranks]
        total, cores = sum(_threads(patient, number) for number in numbers), len(_union(ranks))
        text = f"{host}: {total} threads of {len(numbers)} ranks on {cores} cores"
        if total > max(cores, len(numbers)):
            yield Finding(WARNING, "threads", text, "lower learner.threads or actor.threads")
        else:
            yield Finding(OK, "threads", text)


def _threads(patient: Patient, rank: int) -> int:
    if patient.config is None or patient.topology is None or rank >= patient.topology.size:
        return 1
    return threads(patient.config, patient.topology.role(rank)[0])


def _name(patient: Patient, rank: int) -> str:
    return f"rank {rank}" if patient.topology is None else patient.topology.name(rank)


def _union(ranks: list[dict]) -> list[int]:
    return sorted({core for rank in ranks for core in rank["cores"]})


def _listed(cores: list[int]) -> str:
    return ", ".join(map(str, cores))


def shared_memory(patient: Patient) -> Iterator[Finding]:
    """/dev/shm holds what MPI puts there; a rank that finds it full is killed."""
    if patient.transport != "mpi":
        yield Finding(OK, SHM, f"not used by {patient.transport}")
        return
    for host, ranks in sorted(patient.hosts().items()):
        # The world that is looking has taken its share already.
        free, count = min(rank["shm_free"] for rank in ranks), patient.ranks_on(host)
        text = f"{host}: {free / 2**20:.0f} MiB free, {count} ranks need about {count * SHM_BYTES_PER_RANK / 2**20:.0f}"
        if free < count * SHM_BYTES_PER_RANK:
            fix = "a larger one (docker --shm-size, mount -o remount,size=1G /dev/shm), or OMPI_MCA_btl_sm_backing_directory=/tmp"
            yield Finding(WRONG, SHM, text, fix)
        else:
            yield Finding(OK, SHM, text)


def memory(patient: Patient) -> Iterator[Finding]:
    """The run fits into the memory of every host."""
    if patient.memory_refusal:
        yield Finding(WRONG, "memory", patient.memory_refusal, "do as it says, or ask SLURM for more (--mem)")
        return
    for host, ranks in sorted(patient.hosts().items()):
        fits = "" if patient.config is None or patient.refusal else ", the run fits"
        yield Finding(OK, "memory", f"{host}: {min(rank['memory_free'] for rank in ranks) / 2**30:.1f} GiB free{fits}")


def gpu(patient: Patient) -> Iterator[Finding]:
    """The learner's device is there, and a device that is there is used."""
    found, device = patient.gpus, "cpu" if patient.config is None else patient.config.learner.device
    if device.startswith("cuda") and not found:
        yield Finding(WRONG, "GPU", f"learner.device = '{device}', but torch sees none", "ask SLURM for one (--gres=gpu:1), or use cpu")
    elif found and patient.config is not None and device == "cpu":
        yield Finding(WARNING, "GPU", f"{found[0]} is not used", "--set learner.device=cuda")
    else:
        yield Finding(OK, "GPU", f"{len(found)}: {found[0]}" if found else "none; the learner computes on the CPU")


def cuda_aware(patient: Patient) -> Iterator[Finding]:
    """Whether MPI takes addresses on a GPU: it need not."""
    told = patient.ranks[0].get("cuda_aware")
    if patient.transport == "mpi" and not patient.no_world:
        yield Finding(OK, "CUDA in MPI", f"{'yes' if told else 'no'}; not needed: messages are sent from and received into host memory")


def native(patient: Patient) -> Iterator[Finding]:
    """The C part is there on every host."""
    for host, ranks in sorted(patient.hosts().items()):
        error = ranks[0]["native_error"]
        if error:
            yield Finding(WRONG, "C part", f"{host}: {error}", "make native, or pip install . again, on a node like this one")
        else:
            yield Finding(OK, "C part", f"{host}: priority index in {ranks[0]['native']}")


def roms(patient: Patient) -> Iterator[Finding]:
    """The game is there, and environments can be made and stepped."""
    env = EnvConfig(family="atari", id="pong") if patient.config is None else patient.config.env
    if patient.refusal.startswith("env."):
        if env.family == "atari":
            name, fix = "ROMs", "pip install --force-reinstall ale-py, or another env.id"
        else:
            name, fix = "environment", "correct what it names, or use another env.id"
        yield Finding(WRONG, name, patient.refusal, fix)
        return
    if env.family != "atari":
        yield Finding(OK, "ROMs", f"not needed: {env.id}")
        return
    try:
        envs.env_spec(env)
        yield Finding(OK, "ROMs", f"ale_py has {env.id}")
    except ConfigError as error:
        yield Finding(WRONG, "ROMs", str(error), "pip install --force-reinstall ale-py, or another env.id")


def runs(patient: Patient) -> Iterator[Finding]:
    """The folder of runs can be written to."""
    if patient.config is None:
        return
    folder = Path(patient.config.run.directory).absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if look.is_there(path))
    except look.Unreadable as error:
        yield Finding(WRONG, "runs", f"run.directory = '{folder}': {error}", "--set run.directory=FOLDER")
        return
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        yield Finding(OK, "runs", f"{folder} can be written to")
    else:
        yield Finding(WRONG, "runs", f"run.directory = '{folder}': {existing} cannot be written to", "--set run.directory=FOLDER")


def preset(patient: Patient) -> Iterator[Finding]:
    """Nothing else is refused."""
    if patient.config is None:
        return
    said = not patient.refusal or patient.refusal.startswith(("env.", "learner.device"))  # by other checks
    if not said:
        yield Finding(WRONG, "preset", patient.refusal, "as said")
    elif not patient.refusal:
        yield Finding(OK, "preset", "nothing in it is refused")


CHECKS = (
    library, world_size, neighbours, slots, binding, thread_count, shared_memory, memory, gpu, cuda_aware, native, roms, runs, preset,
)  # fmt: skip


def findings(patient: Patient) -> list[Finding]:
    """Return what all checks find, in their order."""
    return [finding for check in CHECKS for finding in check(patient)]
