"""`apex train`: as one rank of a world, under a launcher of our own, or with all roles in this process."""

from __future__ import annotations

import traceback

from apex import topology as topologies
from apex.config import Config, ConfigError
from apex.run_folder import RunFolder
from apex.topology import Topology
from launch import view, world


def train(config: Config, preset: str, ranks: int | None, arguments: list[str]) -> int:
    """Train and return the exit status. ``arguments`` are those of the whole command, for the ranks."""
    told = world.from_environment()
    if told is not None:
        return _train_rank(config, preset, ranks, *told)
    topology = topologies.make(config, ranks)
    if config.run.transport == "local":
        return _train_here(config, topology, preset)
    return _train_under_launcher(config, topology, preset, arguments)


def _train_rank(config: Config, preset: str, ranks: int | None, rank: int, size: int) -> int:
    if config.run.transport != world.transport():
        started = "by launch.spawn" if world.transport() == "zmq" else "as an MPI world"
        raise ConfigError(f"run.transport = '{config.run.transport}' cannot run as these {size} ranks, which were started {started}")
    if ranks not in (None, size):
        raise ConfigError(f"--ranks {ranks} contradicts the world of {size} ranks; leave --ranks out")
    topology = topologies.make(config, size)
    world.limit_threads(config, topology, rank)
    from launch import rank as rank_module  # imports NumPy, which reads the thread variables

    return rank_module.run(config, topology, preset)


def _train_under_launcher(config: Config, topology: Topology, preset: str, arguments: list[str]) -> int:
    from launch import job, memory, mpirun, preflight, spawn
    from launch.rank import start_folder

    over_mpi = config.run.transport == "mpi"
    launcher = (mpirun if over_mpi else spawn).launcher(topology.size)
    memory.check(config, preflight.check(config), topology)
    folder = RunFolder(start_folder(config, preset))
    view.announce(config, topology, folder.path)
    if not over_mpi:
        return job.run(launcher, job.ENVIRONMENT, config, topology, folder, preset, arguments)
    with mpirun.segments() as segments:
        return job.run(launcher, mpirun.ENVIRONMENT | segments, config, topology, folder, preset, arguments)


def _train_here(config: Config, topology: Topology, preset: str) -> int:
    from launch import local, memory, preflight
    from launch.rank import leave_error, start_folder, write_error_result
    from launch.roles import print_line

    spec = preflight.check(config)
    memory.check(config, spec, topology)
    folder = RunFolder(start_folder(config, preset))
    view.announce(config, topology, folder.path)
    try:
        local.run(config, spec, topology, folder, preset, print_line)
    except Exception:
        leave_error(folder, traceback.format_exc())
        write_error_result(folder, config, topology, preset, 1)
        view.conclude(folder)
        raise
    view.conclude(folder)
    return 0
