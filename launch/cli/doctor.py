"""`apex doctor`: looks at this world of ranks, or at one that it starts, and says what is wrong and how to put it right."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from apex import processes, variables
from apex import topology as topologies
from apex.config import Config, ConfigError
from apex.say import say
from apex.topology import LEARNER_RANK, Topology
from apex.transport.shared_memory import make_page, neighbours
from launch.bench import output_file
from launch.bench.output_file import OutputFile
from launch.cli import doctor_facts as facts
from launch.cli.doctor_checks import OK, WARNING, WRONG, Finding, findings
from launch.cli.doctor_facts import Patient
from launch.run import job, leftovers, memory, mpirun, preflight, spawn, world

T = TypeVar("T")
_SAMPLE = 8  # most ranks of a world that this starts
_STARTS_S = 180.0


def run(config: Config | None, ranks: int | None, json_path: Path | None, arguments: list[str]) -> int:
    """Look, print (in a world: one rank does), and return the exit status: 1 if anything is wrong."""
    if config is not None and config.run.transport == "local":
        raise ConfigError("run.transport = 'local' has no ranks to look at; leave it out")
    told = _told()
    if told is not None and told[0] != LEARNER_RANK and world.is_bare():
        return 0  # before MPI is loaded: some end the process, and SLURM with it the one that tells
    tells = variables.DOCTOR_REPORT not in os.environ and (told is None or told[0] == LEARNER_RANK)
    out = output_file.asked_for("--json", json_path, output_file.JSON) if tells else None
    if told is None:
        report: dict | None = _in_a_sample(config, ranks, arguments)
    elif ranks not in (None, told[1]) and variables.DOCTOR_RANKS not in os.environ:
        raise ConfigError(f"--ranks {ranks} contradicts the world of {told[1]} ranks; leave --ranks out")
    else:
        report = _as_rank(config, *told)
        if variables.DOCTOR_REPORT in os.environ:
            _leave(report)
            return 0
    return 0 if report is None else _tell(report, out)


def _told() -> tuple[int, int] | None:
    """Return ``(rank, size)`` as the launcher has it, or None outside a launcher."""
    if world.is_bare():
        return world.from_srun()
    return world.from_environment()


def _as_rank(config: Config | None, rank: int, size: int) -> dict | None:
    """Look as one rank of a world; return the report on the rank that tells, None on all others."""
    seen, worlds, transport = facts.of_rank(rank), None, world.transport()
    patient = Patient(size, facts.launcher(), [seen], config=config, topology=_topology(config, size))
    try:
        worlds, _ = world.load(transport)
        comm = worlds.world(size)
    except (ConfigError, ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no library
        if rank != LEARNER_RANK:
            return None  # each is a world of its own; one of them tells
        patient.no_world = _no_world(patient, worlds, size, error)
        _look_for_all(patient)
        return _report(patient)
    if transport == "mpi":
        from apex.transport.mpi_world import facts as mpi_facts

        peers = neighbours(list(range(size)), rank, make_page(size, 1), comm.allgather)
        seen |= mpi_facts(comm) | {"lends": sorted({rank, *peers})}
    patient.ranks = comm.allgather(seen)
    worlds.from_learner(comm, lambda: _look_for_all(patient))
    patient.memory_refusal = _memory_refusal(patient, worlds, comm)
    return _report(patient) if rank == LEARNER_RANK else None


def _topology(config: Config | None, size: int) -> Topology | None:
    """Return the roles of the run, or None where there is no preset or the ranks are too few."""
    try:
        return None if config is None else topologies.make(config, int(os.environ.get(variables.DOCTOR_RANKS, size)))
    except ConfigError:
        return None


def _no_world(patient: Patient, worlds: world.Worlds | None, size: int, error: Exception) -> str:
    """Say why the ranks are no world, and note the library if there is one."""
    if worlds is None:
        return f"mpi4py cannot load an MPI library: {str(error).splitlines()[0]}"
    if world.transport() == "zmq":
        return str(error)
    from apex.transport.mpi_world import library

    patient.ranks[0]["library"] = library()
    return f"{patient.launcher} has started {size} ranks, but {library()} sees {size} worlds of one"


def _look_for_all(patient: Patient) -> None:
    """Find out what one rank can for all."""
    config = patient.config
    patient.mpirun_version = facts.mpirun_version()
    patient.gpus = facts.gpus(config is not None and config.learner.device != "cpu")
    if config is not None:
        patient.refusal, patient.spec = _refusal(preflight.check, config)


def _memory_refusal(patient: Patient, worlds: world.Worlds, comm: Any) -> str:
    """Return why the run does not fit into some host's memory, or "". Collective."""
    spec = worlds.from_learner(comm, lambda: patient.spec)
    config, topology = patient.config, patient.topology
    if topology is None or spec is None:
        return ""

    def on_host(ranks: list[int]) -> str | None:
        return _refusal(memory.check, config, spec, topology, ranks if topology.size == patient.told else None)[0] or None

    return worlds.first_from_each_host(comm, on_host) or ""


def _refusal(call: Callable[..., T], *args: object) -> tuple[str, T | None]:
    """Return ``(refusal, None)`` or ``("", result)`` of a call that may refuse."""
    try:
        return "", call(*args)
    except ConfigError as error:
        return str(error), None


def _report(patient: Patient) -> dict:
    """Return what is told: plain values."""
    return {"findings": [finding._asdict() for finding in findings(patient)], "ranks": patient.ranks}


def _leave(report: dict | None) -> None:
    """Give the report to the process that has started this world."""
    if report is not None:
        Path(os.environ[variables.DOCTOR_REPORT]).write_text(json.dumps(report))


def _in_a_sample(config: Config | None, ranks: int | None, arguments: list[str]) -> dict:
    """Return the report of a small world, started as `apex train` would start the run."""
    size = topologies.make(config, ranks).size if config is not None else ranks or 2
    with leftovers.folder("apex-doctor-") as folder:
        path = folder / "report.json"
        complaint = _start(config, min(size, _SAMPLE), {variables.DOCTOR_REPORT: str(path), variables.DOCTOR_RANKS: str(size)}, arguments)
        if path.exists():
            return json.loads(path.read_text())
    return _without_a_world(config, complaint)


def _start(config: Config | None, ranks: int, variables: dict[str, str], arguments: list[str]) -> str:
    """Run this command as the ranks of a world, quietly; return what is to be said if there is no report."""
    try:
        over_zmq = config is not None and config.run.transport == "zmq"
        launcher, environment = (spawn.launcher(ranks), job.ENVIRONMENT) if over_zmq else (mpirun.launcher(ranks), mpirun.ENVIRONMENT)
    except ConfigError as error:  # no mpirun
        return str(error)
    lent: AbstractContextManager[dict[str, str]] = contextlib.nullcontext({}) if over_zmq else mpirun.segments()
    with lent as segments:
        command = [*launcher, *job.python("launch.cli.main"), *arguments]
        said, status = _said(command, job.environment_for(environment | segments) | variables)
    if status is None:
        return f"{launcher[0]} -n {ranks} has not started {ranks} ranks within {_STARTS_S:g} s"
    last = [line for line in said.splitlines() if line.strip(" -")][-1:] or ["it said nothing"]
    return f"{launcher[0]} -n {ranks} ended with status {status}: {last[0][:300]}"


def _said(command: list[str], environment: dict[str, str]) -> tuple[str, int | None]:
    """Run a command; return its output and exit status, None where it took too long and was ended."""
    process = processes.start(command, environment, subprocess.PIPE, subprocess.STDOUT)
    try:
        return process.communicate(timeout=_STARTS_S)[0], process.returncode
    except BaseException as error:  # too long, or Ctrl-C
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return "", None


def _without_a_world(config: Config | None, complaint: str) -> dict:
    """Return a report on this process alone, where no world could be started."""
    patient = Patient(1, "nothing", [facts.of_rank(LEARNER_RANK)], config=config, no_world=complaint)
    _look_for_all(patient)
    return _report(patient)


def _tell(report: dict, out: OutputFile | None) -> int:
    """Print the report, one finding a line; return the exit status."""
    told = [Finding(**finding) for finding in report["findings"]]
    for finding in told:
        say(f"{finding.level:<8} {finding.name:<12} {finding.text}")
        if finding.fix:
            say(f"{'':<21} fix: {finding.fix}")
    count = {level: sum(finding.level == level for finding in told) for level in (OK, WARNING, WRONG)}
    say(f"apex: {count[WRONG]} wrong, {count[WARNING]} to look at, {count[OK]} ok")
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if count[WRONG] else 0
