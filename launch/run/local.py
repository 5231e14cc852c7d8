"""All roles in this process, stepped in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from apex.checkpoint import Reader
from apex.config import Config
from apex.loop import StopSignals
from apex.role import Role
from apex.run_folder import RunFolder
from apex.schema import EnvSpec, Limits, limits
from apex.topology import LEARNER_RANK, Topology
from apex.transport.endpoint import Endpoint
from apex.transport.learner_endpoint import LearnerEndpoint
from apex.transport.local import LocalWire, LocalWorld
from launch.run import world
from launch.run.beginning import importing
from launch.run.roles import build, limit_torch_threads


def run(
    config: Config, spec: EnvSpec, topology: Topology, folder: RunFolder, preset: str,
    show: Callable[[dict], None] | None = None, reader: Reader | None = None,
    signals: StopSignals | None = None,
) -> None:  # fmt: skip
    """Run to the end. Deterministic for one seed: no role waits, and each gets one step in turn."""
    ports = make_ports(topology, limits(config, spec))
    with importing():
        limit_torch_threads(config.learner.threads)
        roles = [
            build(config, spec, topology, rank, port, folder, preset, show, reader)
            for rank, port in enumerate(ports)
        ]
    try:
        step_in_turn(roles, signals or StopSignals())
    finally:
        for role in roles[1:]:
            role.close()
    roles[0].close()


def make_ports(topology: Topology, limits: Limits) -> list[Endpoint]:
    """Return the port of every rank of a world in this process."""
    wires = LocalWorld(topology.size).wires
    ports = [world.make_port(wire, topology, limits) for wire in wires[1:]]
    return [_LearnerEndpoint(wires, topology, limits, ports), *ports]


class _LearnerEndpoint(LearnerEndpoint):
    """The learner's port, whose state is that of all ports and wires of this process."""

    def __init__(self, wires: list[LocalWire], topology: Topology, limits: Limits, others: list[Endpoint]):
        super().__init__(wires[LEARNER_RANK], topology, limits)
        self._wires, self._others = wires, others

    def state_dict(self) -> dict[str, Any]:
        """Return everything in flight in this process: ``arrays``, and ``values`` that refer to them."""
        arrays: list[np.ndarray] = []

        def plain(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                arrays.append(value)
                return {"array": len(arrays) - 1}
            if isinstance(value, dict):
                return {"table": {str(key): plain(held) for key, held in value.items()}}
            return [plain(held) for held in value] if isinstance(value, list) else value

        states = [super().state_dict(), *(port.state_dict() for port in self._others)]
        values = [[plain(wire.state_dict()), plain(state)] for wire, state in zip(self._wires, states)]
        return {
            "arrays": {f"message_{i}": array for i, array in enumerate(arrays)},
            "values": {"ports": values},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``, once all ports have been made."""
        arrays = state["arrays"]

        def full(value: Any) -> Any:
            if isinstance(value, dict) and "array" in value:
                return arrays[f"message_{value['array']}"]
            if isinstance(value, dict):
                return {key: full(held) for key, held in value["table"].items()}
            return [full(held) for held in value] if isinstance(value, list) else value

        loads = [super().load_state_dict, *(port.load_state_dict for port in self._others)]
        for wire, load, (wire_state, port_state) in zip(
            self._wires, loads, state["values"]["ports"], strict=True
        ):
            wire.load_state_dict(full(wire_state))
            load(full(port_state))


def step_in_turn(roles: list[Role], signals: StopSignals | None = None) -> None:
    """Give each role one step in turn until all have finished."""
    while not all(role.finished for role in roles):
        if signals is not None and signals.caught:
            roles[0].port.request_stop()
        for role in roles:
            role.step()
