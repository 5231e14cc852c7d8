"""Everything that can be refused is refused here, in one line, before anything starts."""

from __future__ import annotations

import bisect
import dataclasses
from pathlib import Path

from apex import algorithms, envs
from apex.config import Config, ConfigError
from apex.schema import EnvSpec, intake_layout, sample_layout
from apex.topology import Topology
from replay_rank.index import make_index
from replay_rank.rate_limit import RateLimiter
from replay_rank.service import memory_bytes

_PROCESS_BYTES = 350 * 2**20  # a Python process with torch and an environment, measured


def check(config: Config) -> EnvSpec:
    """Return the environment's spec; raises :class:`ConfigError` where the configuration cannot run."""
    from learner.train_step import device  # imports torch, which takes a second

    spec = envs.env_spec(config.env)
    _check_index(config)
    RateLimiter(config)
    _layout_or_refuse(config, spec)
    algorithms.load(config.algorithm.name).make_network(config, spec)
    device(config.learner.device)
    return spec


def check_memory(config: Config, spec: EnvSpec, topology: Topology) -> None:
    """Raise :class:`ConfigError` where all ranks together do not fit on this machine."""
    rest = _rest_bytes(config, spec, topology)
    ring = _ring_bytes(config, spec)
    available = available_bytes()
    if rest + ring <= available:
        return
    raise ConfigError(
        f"replay.capacity = {config.replay.capacity} is too large: the run needs {_gib(rest + ring)}, "
        f"this machine has {_gib(available)} free; {_largest_that_fits(config, spec, available - rest)}"
    )


def _largest_that_fits(config: Config, spec: EnvSpec, room: int) -> str:
    """Return, in words, the largest capacity whose rings take at most ``room`` bytes."""
    unit = config.actor.intake_batch * config.replay.ranks
    smaller = range(unit, config.replay.capacity, unit)
    fits = bisect.bisect_right(smaller, room, key=lambda capacity: _ring_bytes(config, spec, capacity)) * unit
    if not fits:
        return "not even the smallest fits: lower actor.count, actor.envs or learner.batch_size"
    too_small = f", with --set replay.min_size={fits} or less" if fits < config.replay.min_size else ""
    return f"the largest that fits is {fits}{too_small}"


def _ring_bytes(config: Config, spec: EnvSpec, capacity: int | None = None) -> int:
    """Return the memory of all replay ranks together, at another capacity if one is given."""
    replay = dataclasses.replace(config.replay, capacity=capacity or config.replay.capacity)
    return memory_bytes(dataclasses.replace(config, replay=replay), spec) * replay.ranks


def available_bytes() -> int:
    """Return the memory this machine, or the container this process is in, can still give."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min(free, _container_bytes())


def _container_bytes() -> int:
    """Return what a memory limit (cgroup v2, as set by SLURM or a container) leaves, or a huge number."""
    try:
        group = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / group.strip("/")
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, StopIteration, ValueError):  # no such group, or "max"
        return 2**62


def _check_index(config: Config) -> None:
    try:
        make_index(config.replay.index, 1)
    except (ValueError, ImportError) as error:  # unknown, or its library is not built
        raise ConfigError(f"replay.index: {error}") from None


def _layout_or_refuse(config: Config, spec: EnvSpec) -> None:
    try:
        intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step)
    except ValueError as error:
        raise ConfigError(f"actor.intake_batch: {error}") from None


def _rest_bytes(config: Config, spec: EnvSpec, topology: Topology) -> int:
    """Return what all ranks need beside the replay ranks' memory."""
    batch, n = config.actor.intake_batch, config.algorithm.n_step
    rows = (3 + n // batch) * config.actor.envs + config.actor.in_flight  # of an actor's pool
    pools = topology.num_actors * intake_layout(spec, batch, n).nbytes * rows
    samples = (config.learner.prefetch + 3) * sample_layout(spec, config.learner.batch_size).nbytes
    return pools + samples + topology.size * _PROCESS_BYTES


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
