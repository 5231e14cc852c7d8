"""`apex doctor`: checks this world of ranks, or a world that it starts, and says how to fix faults."""

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

from apex import leftovers, output_file, processes, variables
from apex import topology as topologies
from apex.config import Config, ConfigError
from apex.output_file import OutputFile
from apex.say import say
from apex.topology import LEARNER_RANK, Topology
from apex.transport.shared_memory import make_page, neighbours
from launch.cli import doctor_facts
from launch.cli.doctor_checks import OK, WARNING, WRONG, Facts, Finding, findings
from launch.run import launchers, memory, preflight, world

T = TypeVar("T")
_MAX_SAMPLE = 8  # ranks
_START_TIMEOUT_S = 180.0


def run(config: Config | None, ranks: int | None, json_path: Path | None, arguments: list[str]) -> int:
    """Check and, on rank 0, print the findings; return the exit status: 1 if anything is wrong."""
    if config is not None and config.run.transport == "local":
        raise ConfigError("run.transport = 'local' has no ranks to check; leave it out")
    here = _rank_and_size()
    if here is not None and here[0] != LEARNER_RANK and world.is_bare():
        return 0  # before MPI is loaded: a library that ends the process would also end rank 0
    is_reporter = variables.DOCTOR_REPORT not in os.environ and (here is None or here[0] == LEARNER_RANK)
    out = output_file.asked_for("--json", json_path, output_file.JSON) if is_reporter else None
    if here is None:
        report: dict | None = _check_sample(config, ranks, arguments)
    elif ranks not in (None, here[1]) and variables.DOCTOR_RANKS not in os.environ:
        raise ConfigError(f"--ranks {ranks} contradicts the world of {here[1]} ranks; leave --ranks out")
    else:
        report = _check_world(config, *here)
        if variables.DOCTOR_REPORT in os.environ:
            if report is not None:
                Path(os.environ[variables.DOCTOR_REPORT]).write_text(json.dumps(report))
            return 0
    return 0 if report is None else _print(report, out)


def _rank_and_size() -> tuple[int, int] | None:
    """Return ``(rank, size)`` as the launcher set them, or None outside a launcher."""
    return world.from_srun() if world.is_bare() else world.from_environment()


def _check_world(config: Config | None, rank: int, size: int) -> dict | None:
    """Check as one rank of a world; return the report on the rank that prints it, None on all others."""
    seen, worlds, transport = doctor_facts.of_rank(rank), None, world.transport()
    facts = Facts(size, doctor_facts.launcher(), [seen], config=config, topology=_topology(config, size))
    try:
        worlds, _ = world.load(transport)
        comm = worlds.world(size)
    except (ConfigError, ImportError, RuntimeError) as error:  # RuntimeError: mpi4py finds no library
        if rank != LEARNER_RANK:
            return None  # each rank is a world of its own: only rank 0 reports
        facts.no_world = _no_world(facts, worlds, size, error)
        _find_for_all(facts)
        return _report(facts)
    if transport == "mpi":
        from apex.transport.mpi_world import facts as mpi_facts

        peers = neighbours(list(range(size)), rank, make_page(size, 1), comm.allgather)
        seen |= mpi_facts(comm) | {"lends": sorted({rank, *peers})}
    facts.ranks = comm.allgather(seen)
    worlds.from_learner(comm, lambda: _find_for_all(facts))
    facts.memory_refusal = _memory_refusal(facts, worlds, comm)
    return _report(facts) if rank == LEARNER_RANK else None


def _topology(config: Config | None, size: int) -> Topology | None:
    """Return the topology of the run, or None without a preset or with too few ranks."""
    try:
        ranks = int(os.environ.get(variables.DOCTOR_RANKS, size))
        return None if config is None else topologies.make(config, ranks)
    except ConfigError:
        return None


def _no_world(facts: Facts, worlds: world.Worlds | None, size: int, error: Exception) -> str:
    """Return why the ranks form no world; add the MPI library, if there is one, to the facts."""
    if worlds is None:
        return f"mpi4py cannot load an MPI library: {str(error).splitlines()[0]}"
    if world.transport() == "zmq":
        return str(error)
    from apex.transport.mpi_world import library

    facts.ranks[0]["library"] = library()
    return f"{facts.launcher} has started {size} ranks, but {library()} sees {size} worlds of one"


def _find_for_all(facts: Facts) -> None:
    """Add the facts that one rank finds out for all."""
    config = facts.config
    facts.mpirun_version = doctor_facts.mpirun_version()
    facts.gpus = doctor_facts.gpus(must_ask=config is not None and config.learner.device != "cpu")
    if config is not None:
        facts.refusal, facts.spec = _refusal(preflight.check, config)


def _memory_refusal(facts: Facts, worlds: world.Worlds, comm: Any) -> str:
    """Return why the run does not fit into the memory of a host, or "". Collective."""
    spec = worlds.from_learner(comm, lambda: facts.spec)
    config, topology = facts.config, facts.topology
    if topology is None or spec is None:
        return ""

    def on_host(ranks: list[int]) -> str | None:
        own = None if facts.is_sample else ranks
        return _refusal(memory.check, config, spec, topology, own)[0] or None

    return worlds.first_from_each_host(comm, on_host) or ""


def _refusal(call: Callable[..., T], *args: object) -> tuple[str, T | None]:
    """Return ``("", result)`` of a call, or ``(message, None)`` if it raises :class:`ConfigError`."""
    try:
        return "", call(*args)
    except ConfigError as error:
        return str(error), None


def _report(facts: Facts) -> dict:
    """Return the report as plain values."""
    return {"findings": [finding._asdict() for finding in findings(facts)], "ranks": facts.ranks}


def _check_sample(config: Config | None, ranks: int | None, arguments: list[str]) -> dict:
    """Return the report of a small world, started as `apex train` would start the run."""
    size = topologies.make(config, ranks).size if config is not None else ranks or 2
    with leftovers.folder("apex-doctor-") as folder:
        path = folder / "report.json"
        added = {variables.DOCTOR_REPORT: str(path), variables.DOCTOR_RANKS: str(size)}
        error = _start(config, min(size, _MAX_SAMPLE), added, arguments)
        if path.exists():
            return json.loads(path.read_text())
    facts = Facts(1, "nothing", [doctor_facts.of_rank(LEARNER_RANK)], config=config, no_world=error)
    _find_for_all(facts)
    return _report(facts)


def _start(config: Config | None, ranks: int, added: dict[str, str], arguments: list[str]) -> str:
    """Run this command as the ranks of a world, silently; return what went wrong if they leave no report."""
    over_zmq = config is not None and config.run.transport == "zmq"
    try:
        launcher = (launchers.zmq if over_zmq else launchers.mpi)(ranks)
    except ConfigError as error:  # no mpirun
        return str(error)
    environment = processes.ENVIRONMENT if over_zmq else launchers.ENVIRONMENT
    nothing: AbstractContextManager[dict[str, str]] = contextlib.nullcontext({})
    with nothing if over_zmq else launchers.segments() as segments:
        command = [*launcher, *processes.python("launch.cli.main"), *arguments]
        output, status = _output(command, processes.environment_for(environment | segments) | added)
    if status is None:
        return f"{launcher[0]} -n {ranks} did not start {ranks} ranks within {_START_TIMEOUT_S:g} s"
    last = [line for line in output.splitlines() if line.strip(" -")][-1:] or ["it printed nothing"]
    return f"{launcher[0]} -n {ranks} ended with status {status}: {last[0][:300]}"


def _output(command: list[str], environment: dict[str, str]) -> tuple[str, int | None]:
    """Run a command; return its output and exit status, None if it exceeded the timeout and was ended."""
    process = processes.start(command, environment, subprocess.PIPE, subprocess.STDOUT)
    try:
        return process.communicate(timeout=_START_TIMEOUT_S)[0], process.returncode
    except BaseException as error:  # the timeout, or Ctrl-C
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return "", None


def _print(report: dict, out: OutputFile | None) -> int:
    """Print the report, one finding a line; return the exit status."""
    found = [Finding(**finding) for finding in report["findings"]]
    for finding in found:
        say(f"{finding.level:<8} {finding.name:<12} {finding.text}")
        if finding.fix:
            say(f"{'':<21} fix: {finding.fix}")
    count = {level: sum(finding.level == level for finding in found) for level in (OK, WARNING, WRONG)}
    say(f"apex: {count[WRONG]} wrong, {count[WARNING]} warnings, {count[OK]} ok")
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if count[WRONG] else 0
