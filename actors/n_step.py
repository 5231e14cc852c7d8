"""n-step returns of many environments at once; none spans two episodes.

A transition that starts at step t ends k steps later with (Horgan et al. 2018, appendix C)

    return   = r_0 + gamma r_1 + ... + gamma^(k-1) r_(k-1)
    discount = gamma^k, or 0 if the last of these steps terminated the episode

where k = n, or less if the episode ended first. A truncation keeps the discount, since the environment did
not terminate. The learner adds the bootstrap gamma^k max Q(s_t).
"""

from __future__ import annotations

import numpy as np

from apex.state import fill


class NStep:
    """The open windows of ``num_envs`` environments, and the transitions that each step ends.

    A return sums at most ``n`` >= 1 rewards, each discounted with ``discount`` in [0, 1] per step. The *age*
    of a transition counts the steps since its first one: 0 for the newest step, at most n - 1. A step takes
    O(num_envs * n) NumPy work and no Python loop.
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
        # Row a: the partial return of the transition that started a steps ago. Float64 keeps it equal to the
        # plain sum from left to right. Rows beyond an environment's length are not used.
        self._returns = np.zeros((n, num_envs))
        self._length = np.zeros(num_envs, np.int64)

    def step(
        self, reward: np.ndarray, terminated: np.ndarray, truncated: np.ndarray, valid: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Add one step; return the transitions that end now as ``(env, age, ret, discount)``.

        ``reward`` is float32[V]; the flags are bool[V], as in a ``Timestep``. If both flags are set,
        ``terminated`` wins. A row that is not ``valid`` empties its window and yields no transition. The
        results have m rows: ``env`` and ``age`` int64, ``ret`` and ``discount`` float32. They are sorted by
        descending age and then by env, so each environment's oldest comes first.
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
        """Restore the windows of ``state_dict``."""
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
