"""`apex train`: as one rank of a world, with a launcher, or with all roles in this process."""

from __future__ import annotations

import traceback

from apex import processes, run_lock, variables
from apex import topology as topologies
from apex.config import Config, ConfigError
from apex.run_folder import RunFolder
from apex.topology import Topology
from launch.run import view, world
from launch.run.beginning import importing


def train(
    config: Config, preset: str, ranks: int | None, arguments: list[str], resumed: RunFolder | None = None
) -> int:
    """Train, or resume the run of the folder ``resumed``; return the exit status.

    ``arguments`` is the whole command line, which the ranks run again.
    """
    here = world.from_environment()
    if here is not None:
        return _train_rank(config, preset, ranks, *here, resumed)
    topology = topologies.make(config, ranks)
    if config.run.transport == "local":
        return _train_here(config, topology, preset, resumed)
    return _train_under_launcher(config, topology, preset, arguments, resumed)


def resume(
    run: str, preset: str | None, overrides: list[str], ranks: int | None, arguments: list[str]
) -> int:
    """Resume a run and return the exit status."""
    from launch.run.resume import configure

    config, folder = configure(run, preset, overrides)
    return train(config, preset or folder.path.name, ranks, arguments, folder)


def _train_rank(
    config: Config, preset: str, ranks: int | None, rank: int, size: int, resumed: RunFolder | None
) -> int:
    transport, started = config.run.transport, world.transport()
    if transport != started:
        raise ConfigError(f"run.transport = '{transport}', but these {size} ranks were started for {started}")
    if ranks not in (None, size):
        raise ConfigError(f"--ranks {ranks} contradicts the world of {size} ranks; leave --ranks out")
    topology = topologies.make(config, size)
    world.limit_threads(config, topology, rank)
    from launch.run import rank as rank_module  # imports NumPy, which reads the thread variables

    return rank_module.run(config, topology, preset, resumed)


def _train_under_launcher(
    config: Config, topology: Topology, preset: str, arguments: list[str], resumed: RunFolder | None
) -> int:
    from launch.run import job, launchers, memory, preflight
    from launch.run.rank import begin
    from launch.run.resume import open_and_announce

    over_mpi = config.run.transport == "mpi"
    if config.run.fault_tolerance == "nobody":
        launcher = (launchers.mpi if over_mpi else launchers.zmq)(topology.size)
    elif over_mpi:
        launcher = launchers.mpi(topology.size, tolerant=True)
    else:
        # One more than the learner allows: the learner then reports the limit.
        launcher = launchers.zmq(topology.size, topology.evaluator_rank, config.run.max_replacements + 1)
    with importing():
        spec = preflight.check(config)
    memory.check(config, spec, topology)
    asked = job.Asked()  # from now on a signal has a run to end
    path, checkpoint = begin(config, preset, resumed)
    folder = RunFolder(path)
    try:
        view.announce(config, topology, folder.path)
        resumed_from = {}
        if checkpoint is not None:
            open_and_announce(checkpoint, config, topology.num_actors)
            resumed_from = {variables.CHECKPOINT: str(checkpoint)}
        if not over_mpi:
            needed = processes.ENVIRONMENT | resumed_from
            return job.run(launcher, needed, config, topology, folder, preset, arguments, asked)
        with launchers.segments(tolerant=config.run.fault_tolerance == "actors") as segments:
            needed = launchers.ENVIRONMENT | segments | resumed_from
            return job.run(launcher, needed, config, topology, folder, preset, arguments, asked)
    finally:
        run_lock.give(path)


def _train_here(config: Config, topology: Topology, preset: str, resumed: RunFolder | None) -> int:
    from apex.loop import Forced, StopSignals
    from launch.run import local, memory, preflight
    from launch.run.outcome import leave_error, write_error_result
    from launch.run.rank import begin
    from launch.run.resume import open_and_announce
    from launch.run.view import print_line

    with importing():
        spec = preflight.check(config)
    memory.check(config, spec, topology)
    signals = StopSignals(forces=True)
    path, checkpoint = begin(config, preset, resumed)
    folder, reader = RunFolder(path), None
    try:
        view.announce(config, topology, folder.path)
        if checkpoint is not None:
            reader = open_and_announce(checkpoint, config, topology.num_actors)
        local.run(config, spec, topology, folder, preset, print_line, reader, signals)
    except Forced as forced:
        write_error_result(folder, config, topology, preset, forced.status, "killed")
        view.conclude(folder)
        return forced.status
    except Exception as error:
        leave_error(folder, f"apex: {error}\n" if isinstance(error, ConfigError) else traceback.format_exc())
        write_error_result(folder, config, topology, preset, 1)
        view.conclude(folder)
        raise
    finally:
        run_lock.give(path)
    view.conclude(folder)
    return 0 if folder.result() is not None else 1
