"""From a rank to its role: the one place that knows all roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apex.checkpoint import Reader
from apex.config import Config
from apex.role import Role
from apex.run_folder import RunFolder
from apex.schema import EnvSpec
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY, Topology


def build(
    config: Config, spec: EnvSpec, topology: Topology, rank: int, port: Any,
    folder: RunFolder, preset: str, show: Callable[[dict], None] | None = None, reader: Reader | None = None,
) -> Role:  # fmt: skip
    """Return the role of a rank, resumed from ``reader``; imports only that role."""
    role, index = topology.role(rank)
    if role == REPLAY:
        from replay_rank.service import ReplayService

        return ReplayService(config, spec, port, index, folder.checkpoints, reader)
    if role == LEARNER:
        from learner.learner import Learner
        from learner.run_log import RunLog

        run_log = RunLog(config, topology, folder, preset, show or (lambda row: None))
        return Learner(config, spec, port, topology, run_log, reader)
    if role == EVALUATOR:
        from actors.evaluator import Evaluator

        return Evaluator(config, spec, port, folder.checkpoints, reader)
    assert role == ACTOR
    from actors.actor import Actor

    return Actor(config, spec, port, index, topology.num_actors, folder.checkpoints, reader)


def limit_torch_threads(threads: int) -> None:
    """Set torch's own thread count, which does not follow the environment once torch is imported."""
    import torch

    torch.set_num_threads(threads)
