"""Rank -> role and role index: the only place that knows the rank layout.

Rank 0 is the learner, then come the replay ranks, one evaluator, and all other ranks are actors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from apex.config import Config, ConfigError

LEARNER, REPLAY, EVALUATOR, ACTOR = "learner", "replay", "evaluator", "actor"
ROLES = (LEARNER, REPLAY, EVALUATOR, ACTOR)
LEARNER_RANK = 0


@dataclass(frozen=True)
class Topology:
    """The roles of a world of ``size`` ranks with ``replay_ranks`` replay ranks."""

    size: int
    replay_ranks: int

    @property
    def num_actors(self) -> int:
        """Actors in the world."""
        return self.size - self.replay_ranks - 2

    @property
    def replay_ranks_range(self) -> range:
        """World ranks of the replay ranks, in replay index order."""
        return range(1, 1 + self.replay_ranks)

    @property
    def evaluator_rank(self) -> int:
        """World rank of the evaluator."""
        return 1 + self.replay_ranks

    @property
    def actor_ranks(self) -> range:
        """World ranks of the actors, in actor index order."""
        return range(2 + self.replay_ranks, self.size)

    def is_acting(self, rank: int) -> bool:
        """Whether a rank acts in environments: an actor, or the evaluator."""
        return rank >= self.evaluator_rank

    def role(self, rank: int) -> tuple[str, int]:
        """Return ``(role, index within the role)`` of a world rank."""
        if rank == LEARNER_RANK:
            return LEARNER, 0
        if rank in self.replay_ranks_range:
            return REPLAY, rank - 1
        if rank == self.evaluator_rank:
            return EVALUATOR, 0
        if rank in self.actor_ranks:
            return ACTOR, rank - self.actor_ranks.start
        raise ValueError(f"rank {rank} is outside a world of {self.size}")

    def rank(self, role: str, index: int) -> int:
        """Return the world rank of the ``index``-th of a role: the inverse of :meth:`role`."""
        ranks = {
            LEARNER: range(1),
            REPLAY: self.replay_ranks_range,
            EVALUATOR: [self.evaluator_rank],
            ACTOR: self.actor_ranks,
        }
        if not 0 <= index < len(ranks[role]):
            raise ValueError(
                f"{role} {index} is outside a world of {self.size} ranks with {len(ranks[role])} of that role"
            )
        return ranks[role][index]

    def name(self, rank: int) -> str:
        """Return a rank's name for people, e.g. ``"actor 3 (rank 6)"``."""
        role, index = self.role(rank)
        label = role if role in (LEARNER, EVALUATOR) else f"{role} {index}"
        return f"{label} (rank {rank})"


def names_of(ranks: Iterable[int], size: int) -> str:
    """Return some ranks of a world for people, e.g. ``"ranks 3, 4 of 5"``."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))} of {size}"


def make(config: Config, ranks: int | None = None) -> Topology:
    """Return the topology of ``ranks`` processes; by default as many as ``actor.count`` asks for.

    Raises :class:`ConfigError` where the ranks cannot hold one process of each role.
    """
    least = config.replay.ranks + 3
    if ranks is None:
        ranks = config.replay.ranks + 2 + config.actor.count
    if ranks < least:
        raise ConfigError(
            f"{ranks} ranks are too few: one learner, {config.replay.ranks} replay, one evaluator "
            f"and at least one actor need {least}"
        )
    return Topology(ranks, config.replay.ranks)
