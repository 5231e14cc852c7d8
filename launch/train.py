"""`apex train`: as one rank of an MPI world, under an mpirun of our own, or with all roles in this process."""

from __future__ import annotations

import time
import traceback

from apex import topology as topologies
from apex.config import Config, ConfigError
from apex.run_folder import RunFolder
from apex.topology import Topology
from launch import world


def train(config: Config, preset: str, ranks: int | None, arguments: list[str]) -> int:
    """Train and return the exit status. ``arguments`` are those of the whole command, for the ranks."""
    told = world.from_environment()
    if told is not None:
        return _train_rank(config, preset, ranks, *told)
    topology = topologies.make(config, ranks)
    if config.run.transport == "local":
        return _train_here(config, topology, preset)
    return _train_under_mpirun(config, topology, preset, arguments)


def _train_rank(config: Config, preset: str, ranks: int | None, rank: int, size: int) -> int:
    if config.run.transport != "mpi":
        raise ConfigError(f"run.transport = '{config.run.transport}' cannot run as {size} ranks of an MPI world; start it without mpirun")
    if ranks not in (None, size):
        raise ConfigError(f"--ranks {ranks} contradicts the MPI world of {size} ranks; leave --ranks out")
    topology = topologies.make(config, size)
    world.limit_threads(config, topology, rank)
    from launch import rank as rank_module  # imports NumPy, which reads the thread variables

    return rank_module.run(config, topology, preset)


def _train_under_mpirun(config: Config, topology: Topology, preset: str, arguments: list[str]) -> int:
    from launch import memory, mpirun, preflight
    from launch.rank import start_folder

    mpirun.find_mpirun()
    memory.check(config, preflight.check(config), topology)
    folder = RunFolder(start_folder(config, preset))
    _announce(config, topology, folder)
    return _sum_up(folder, mpirun.run(config, topology, folder, preset, arguments))


def _train_here(config: Config, topology: Topology, preset: str) -> int:
    from launch import local, memory, preflight
    from launch.rank import start_folder, write_error_result
    from launch.roles import print_line

    spec = preflight.check(config)
    memory.check(config, spec, topology)
    folder = RunFolder(start_folder(config, preset))
    _announce(config, topology, folder)
    try:
        local.run(config, spec, topology, folder, preset, print_line)
    except Exception:
        folder.write_error(traceback.format_exc())
        write_error_result(folder, config, topology, preset, 1)
        raise
    return _sum_up(folder, 0)


def _announce(config: Config, topology: Topology, folder: RunFolder) -> None:
    roles = f"1 learner, {topology.replay_ranks} replay, 1 evaluator, {topology.num_actors} actors"
    where = f"{topology.size} ranks over {config.run.transport} ({roles})"
    print(f"apex: {folder.path}: {config.env.id}, {where}, {time.strftime('%H:%M:%S')}", flush=True)


def _sum_up(folder: RunFolder, status: int) -> int:
    result = folder.result()
    if result is not None and status == 0:
        done = f"{result['wall_s']:.0f} s and {result['learner_steps']} learner steps"
        print(f"apex: ended by {result['reason']} after {done}; {_evaluated(result)}; {folder.path}", flush=True)
    return status


def _evaluated(result: dict) -> str:
    if result["eval_return"] is None:
        return "no evaluation"
    return f"greedy return {result['eval_return']:.1f} over {result['eval_episodes']} episodes"
