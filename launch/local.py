"""All roles in this process, stepped in turn."""

from __future__ import annotations

from apex.checkpoint import Reader
from apex.config import Config
from apex.role import Role
from apex.run_folder import RunFolder
from apex.schema import EnvSpec, limits
from apex.topology import Topology
from apex.transport.drive import StopSignals
from apex.transport.local import LocalWorld
from launch.beginning import importing
from launch.roles import build, limit_torch_threads


def run(
    config: Config, spec: EnvSpec, topology: Topology, folder: RunFolder, preset: str,
    show=None, reader: Reader | None = None, signals: StopSignals | None = None,
) -> None:  # fmt: skip
    """Run to the end. Deterministic for one seed: no role waits, and each gets one step in turn."""
    world = LocalWorld(topology, limits(config, spec))
    ports = [world.port(rank) for rank in range(topology.size)]
    with importing():
        limit_torch_threads(config.learner.threads)
        roles = [build(config, spec, topology, rank, port, folder, preset, show, reader) for rank, port in enumerate(ports)]
    try:
        step_in_turn(roles, signals or StopSignals())
    finally:
        for role in roles[1:]:
            role.close()
    roles[0].close()


def step_in_turn(roles: list[Role], signals: StopSignals | None = None) -> None:
    """Give each role one step in turn until all have finished."""
    while not all(role.finished for role in roles):
        if signals is not None and signals.caught:
            roles[0].port.request_stop()
        for role in roles:
            role.step()
