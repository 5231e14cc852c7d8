"""Exploration: each environment keeps one epsilon during the whole run (Horgan et al. 2018, section 4)."""

from __future__ import annotations

import numpy as np

from apex.config import ActorConfig


def epsilon_ladder(base: float, alpha: float, num_total: int) -> np.ndarray:
    """Return float64[num_total], epsilon_i = base^(1 + alpha i / (N - 1)), which falls from ``base``.

    A single environment has ``base``. Raises ValueError for ``num_total`` < 1.
    """
    if num_total < 1:
        raise ValueError(f"num_total = {num_total} must be at least 1")
    step = np.arange(num_total) / max(num_total - 1, 1)
    return float(base) ** (1.0 + alpha * step)


def actor_epsilons(actor: ActorConfig, actor_index: int, num_actors: int) -> np.ndarray:
    """Return float64[actor.envs]: this actor's part of the ladder over all actors' environments.

    Environment v of actor i is number ``i * actor.envs + v``. Raises ValueError for an index outside
    0..num_actors - 1.
    """
    if not 0 <= actor_index < num_actors:
        raise ValueError(f"actor_index = {actor_index} must lie in 0..{num_actors - 1}")
    ladder = epsilon_ladder(actor.epsilon_base, actor.epsilon_alpha, num_actors * actor.envs)
    return ladder[actor_index * actor.envs : (actor_index + 1) * actor.envs]


def epsilon_greedy(q: np.ndarray, epsilons: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return actions int64[V]: a uniform one of A with probability ``epsilons[v]``, else the best.

    ``q`` is float32[V, A]; the lowest of the best actions is chosen. Each call draws V uniforms and V
    integers whatever ``q`` and ``epsilons`` are, so that runs with other values stay comparable.
    """
    num_envs, num_actions = q.shape
    explores = rng.random(num_envs) < epsilons
    random_actions = rng.integers(num_actions, size=num_envs)
    return np.where(explores, random_actions, q.argmax(axis=1)).astype(np.int64, copy=False)
