"""Whether the ranks of a run fit into the memory of the machine they are on."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from actors.intake import pool_rows
from apex import envs
from apex.config import Config, ConfigError
from apex.memory_limits import available_bytes
from apex.schema import EnvSpec, intake_layout, sample_layout
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY, Topology
from replay_rank.service import memory_bytes

# What a process of a role has for itself once it works, beside what is counted below: measured in MiB over
# mpi and zmq with CartPole and Pong 226 to 235, 24 to 31, 121 to 153, 121 to 153. A tenth of the largest is
# added or more.
_PROCESS_BYTES = {
    role: mib * 2**20 for role, mib in {LEARNER: 256, REPLAY: 36, EVALUATOR: 176, ACTOR: 176}.items()
}
# The pages of libraries, which all ranks of a host share: measured 78 to 96 MiB.
_SHARED_BYTES = 120 * 2**20
# Copies of the network in a rank's memory. In use, and the message that the next one arrives in; of the
# evaluator also best.pt, which is made in memory:
_NETWORKS = {ACTOR: 2, EVALUATOR: 3}
# Parameters, gradients, two moments of the optimiser, target; of parameters and moments copies from before
# the step:
_NETWORKS_TRAINED = 8
# The message that is published, the newest one and one that is still read; of a checkpoint on its way four,
# and their file:
_NETWORKS_SENT_AND_SAVED = 3 + 2 * 4


def check(config: Config, spec: EnvSpec, topology: Topology, ranks: Iterable[int] | None = None) -> None:
    """Raise :class:`ConfigError` where ``ranks`` (by default all) together do not fit on this machine."""
    roles = [topology.role(rank)[0] for rank in (range(topology.size) if ranks is None else ranks)]
    rest = _SHARED_BYTES + sum(roles.count(role) * _rest_bytes(config, spec, role) for role in set(roles))
    rings = roles.count(REPLAY)
    needed, available = rest + rings * memory_bytes(config, spec), available_bytes()
    if needed <= available:
        return
    machine = f"needs {_gib(needed)}, this machine has {_gib(available)} free"
    if not rings or rest > available:
        raise ConfigError(
            f"{len(roles)} ranks are too many for this machine: the run {machine}; "
            "use fewer --ranks, or lower actor.envs or evaluator.episodes"
        )
    raise ConfigError(
        f"replay.capacity = {config.replay.capacity} is too large: the run {machine}; "
        f"{_largest_that_fits(config, spec, (available - rest) // rings)}"
    )


def _largest_that_fits(config: Config, spec: EnvSpec, room: int) -> str:
    """Return, in words, the largest capacity whose share on one replay rank takes at most ``room`` bytes."""
    unit = config.actor.intake_batch * config.replay.ranks
    smaller = range(unit, config.replay.capacity, unit)
    fits = bisect.bisect_right(smaller, room, key=lambda capacity: _ring_bytes(config, spec, capacity)) * unit
    if not fits:
        return "not even the smallest fits: lower actor.count, actor.envs or learner.batch_size"
    too_small = f", with --set replay.min_size={fits} or less" if fits < config.replay.min_size else ""
    return f"the largest that fits is {fits}{too_small}"


def _ring_bytes(config: Config, spec: EnvSpec, capacity: int) -> int:
    """Return the memory of one replay rank at another capacity."""
    replay = dataclasses.replace(config.replay, capacity=capacity)
    return memory_bytes(dataclasses.replace(config, replay=replay), spec)


def _rest_bytes(config: Config, spec: EnvSpec, role: str) -> int:
    """Return what a rank of a role needs for itself, beside a replay rank's ring, index and send buffers."""
    return (
        _PROCESS_BYTES[role]
        + _buffer_bytes(config, spec, role)
        + _network_bytes(config, spec, role)
        + _env_bytes(config, role)
    )


def _buffer_bytes(config: Config, spec: EnvSpec, role: str) -> int:
    """Return what transitions take on their way."""
    intake = intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step).nbytes
    sample = sample_layout(spec, config.learner.batch_size).nbytes
    return {ACTOR: pool_rows(config) * intake, LEARNER: (config.learner.prefetch + 3) * sample}.get(role, 0)


def _network_bytes(config: Config, spec: EnvSpec, role: str) -> int:
    """Return what networks take, and what is made of them; what is on a GPU takes none of this memory."""
    copies = _NETWORKS.get(role, 0)
    if role == LEARNER:
        copies = _NETWORKS_SENT_AND_SAVED + (_NETWORKS_TRAINED if config.learner.device == "cpu" else 0)
    return copies * _one_network_bytes(config, spec) if copies else 0


def _one_network_bytes(config: Config, spec: EnvSpec) -> int:
    import torch  # takes a second

    from apex import algorithms, weights

    with torch.device("meta"):  # shapes alone: nothing is allocated or drawn
        return 4 * weights.size(algorithms.load(config.algorithm.name).make_network(config, spec))


def _env_bytes(config: Config, role: str) -> int:
    """Return what the environments of a role take."""
    return {ACTOR: config.actor.envs, EVALUATOR: config.evaluator.episodes}.get(role, 0) * envs.bytes_per_env(
        config.env
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
