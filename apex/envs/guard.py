"""Environments that fail are made anew, a bounded number of times."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable

import numpy as np

from apex.envs.vector import Timestep, VectorEnv
from apex.say import warn


class EnvironmentFailure(RuntimeError):
    """The environments of a role have failed more often than ``env.max_restarts``."""


class GuardedEnvs:
    """Steps environments as a :class:`VectorEnv` does. When one raises, or gives what cannot be, all are made anew.

    ``make(attempt)`` returns the environments, for the first time with 0. A step in which they failed is one on which every
    row was only reset: not ``valid``, and ``first``, so that what came before the failure is never joined to what
    comes after. What failed goes to stderr. ``restarts`` is how often it happened; after ``most`` times
    :class:`EnvironmentFailure` is raised.
    """

    def __init__(self, make: Callable[[int], VectorEnv], most: int, who: str):
        self._make, self._most, self._who = make, most, who
        self.restarts = 0
        self._envs = make(0)
        self.spec, self.num_envs = self._envs.spec, self._envs.num_envs

    def reset(self) -> np.ndarray:
        """Start all rows again; return first observations [V, *observation_shape]."""
        while True:
            try:
                return self._checked(self._envs.reset())
            except Exception as error:
                self._restart(error)

    def step(self, actions: np.ndarray) -> Timestep:
        """Step every row with ``actions`` int[V]."""
        try:
            step = self._envs.step(actions)
            self._checked(step.obs), self._checked(step.last_obs)
            if step.reward.shape != (self.num_envs,) or not np.isfinite(step.reward).all():
                raise ValueError(f"rewards {step.reward} are not {self.num_envs} finite numbers")
            return step
        except Exception as error:
            self._restart(error)
            return self._begun(self.reset())

    def close(self) -> None:
        """Release the environments."""
        self._envs.close()

    def _checked(self, obs: np.ndarray) -> np.ndarray:
        expected = (self.num_envs, *self.spec.observation_shape)
        if obs.shape != expected:
            raise ValueError(f"observations of shape {list(obs.shape)}, expected {list(expected)}")
        if obs.dtype.kind == "f" and not np.isfinite(obs).all():
            raise ValueError("an observation is not finite")
        return obs

    def _begun(self, obs: np.ndarray) -> Timestep:
        no, yes = np.zeros(self.num_envs, bool), np.ones(self.num_envs, bool)
        return Timestep(obs, obs, np.zeros(self.num_envs, np.float32), no, no, valid=no, first=yes)

    def _restart(self, error: Exception) -> None:
        """Tell what failed, and make the environments anew unless that has been done too often."""
        with contextlib.suppress(Exception):  # what is broken may not close either
            self._envs.close()
        made = None
        while made is None:
            self._count(error)
            try:
                made = self._make(self.restarts)
            except Exception as another:
                error = another
        self._envs = made

    def _count(self, error: Exception) -> None:
        self.restarts += 1
        if self.restarts > self._most:
            why = f"{self._who}: its environments failed {self.restarts} times; env.max_restarts = {self._most}"
            raise EnvironmentFailure(why) from error
        told = "".join(traceback.format_exception(error)).rstrip()
        what = f"apex: {self._who}: its environments failed and are made anew ({self.restarts} of {self._most})"
        warn(f"{told}\n{what}")
