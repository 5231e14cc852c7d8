"""n-step returns of many environments at once, none across an episode's end.

A transition that starts at step t ends k steps later with (Horgan et al. 2018, appendix C)

    return   = r_0 + gamma r_1 + ... + gamma^(k-1) r_(k-1)
    discount = gamma^k, or 0 if the last of these steps terminated the episode

where k = n, or fewer where the episode ended first. After a truncation the discount is kept, for the
episode would have gone on. The bootstrap gamma^k max Q(s_t) is the learner's.
"""

from __future__ import annotations

import numpy as np

from apex.state import fill


class NStep:
    """The open windows of ``num_envs`` environments: which transitions end with each step.

    ``n`` >= 1 rewards are summed at most, each discounted with ``discount`` in [0, 1] per step. A
    transition's *age* is the number of steps since the one it started with: 0 for the step just
    made, at most n - 1. Costs O(num_envs * n) NumPy work and no Python loop per step.
    """

    def __init__(self, num_envs: int, n: int, discount: float):
        if num_envs < 1 or n < 1:
            raise ValueError(f"num_envs = {num_envs} and n = {n} must be at least 1")
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"discount = {discount} must lie in [0, 1]")
        self._n = n
        powers = np.array([float(discount) ** k for k in range(n + 1)])
        self._coefficients = powers[:n, None]
        self._discounts = powers[1:].astype(np.float32)  # by age
        self._ages = np.arange(n)[:, None]
        # Row a: the partial return of the transition that started a steps ago, in float64 so that it
        # is the plain left-to-right sum. Rows beyond an environment's length hold leftovers.
        self._returns = np.zeros((n, num_envs))
        self._length = np.zeros(num_envs, np.int64)

    def step(
        self, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, valid: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Add one step; return the transitions that end now as ``(env, age, ret, discount)``.

        Takes ``reward`` float32[V] and three bool[V], as in a ``Timestep``; where both are set,
        terminated wins. A row that is not ``valid`` starts and ends nothing and empties its window.
        Returns arrays [m]: ``env`` and ``age`` int64, ``ret`` and ``discount`` float32, sorted by
        descending age, then by env: so oldest first within an environment.
        """
        self._returns[1:] = self._returns[:-1]
        self._returns[0] = 0.0
        self._returns += self._coefficients * reward
        length = np.where(valid, self._length + 1, 0)
        done = (terminated | truncated) & valid
        env, age = self._ended(length, done)
        self._length = np.where(done, 0, np.minimum(length, self._n - 1))
        discount = np.where(terminated[env], np.float32(0), self._discounts[age])
        return env, age, self._returns[age, env].astype(np.float32), discount

    def state_dict(self) -> dict:
        """Return the open windows: ``returns`` float64[n, V] and ``length`` int64[V]."""
        return {"returns": self._returns.copy(), "length": self._length.copy()}

    def load_state_dict(self, state: dict) -> None:
        """Go on with the windows of ``state_dict``."""
        fill(self._returns, state, "returns")
        fill(self._length, state, "length")

    def _ended(self, length: np.ndarray, done: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return env and age, int64[m] each, of the windows that are full or whose episode is over."""
        if not done.any():
            env = np.flatnonzero(length == self._n)
            return env, np.full(len(env), self._n - 1)
        full = self._ages == self._n - 1
        ended = (self._ages < length) & (full | done)
        row, env = np.nonzero(ended[::-1])
        return env, self._n - 1 - row
