"""Environments that fail are made anew, a bounded number of times."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator

import numpy as np

from apex.config import ConfigError, EnvConfig
from apex.envs.foreign import Failed, attempt, in_one_line
from apex.envs.vector import Timestep, VectorEnv
from apex.say import warn


class EnvironmentFailure(RuntimeError):
    """The environments of a role have failed more often than ``env.max_restarts``."""


@contextlib.contextmanager
def refusing(env: EnvConfig, where: str) -> Iterator[None]:
    """Turn an :class:`EnvironmentFailure` into a :class:`ConfigError` of one line that names ``env.id``."""
    try:
        yield
    except EnvironmentFailure as failure:
        cause = failure.__cause__
        if isinstance(cause, ConfigError):
            raise cause from failure
        raise ConfigError(
            f"env.id = '{env.id}' fails in {where}: {in_one_line(cause or failure)}"
        ) from failure


class GuardedEnvs:
    """Steps environments; makes all again when one raises, or returns impossible values.

    ``make(attempt)`` returns the environments, for the first time with 0. A step in which they failed is one
    on which every row was only reset: not ``valid``, and ``first``, so that what came before the failure is
    never joined to what comes after. What failed goes to stderr. ``restarts`` is how often it happened; after
    ``most`` times :class:`EnvironmentFailure` is raised.
    """

    def __init__(self, make: Callable[[int], VectorEnv], most: int, who: str):
        self._make, self._most, self._who = make, most, who
        self.restarts = 0
        self._envs = self._made()
        self.spec, self.num_envs = self._envs.spec, self._envs.num_envs

    def reset(self) -> np.ndarray:
        """Start all rows again; return first observations [V, *observation_shape]."""
        while True:
            obs = attempt(lambda: self._checked(self._envs.reset()))
            if not isinstance(obs, Failed):
                return obs
            self._restart(obs.error)

    def step(self, actions: np.ndarray) -> Timestep:
        """Step every row with ``actions`` int[V]."""
        step = attempt(lambda: self._checked_step(self._envs.step(actions)))
        if not isinstance(step, Failed):
            return step
        self._restart(step.error)
        return self._begun(self.reset())

    def render(self) -> np.ndarray:
        """Return a picture of row 0, as :meth:`VectorEnv.render` does."""
        return self._envs.render()

    def close(self) -> None:
        """Release the environments; those that cannot even close cost a line, not the run."""
        closed = attempt(self._envs.close)
        if closed is not None:
            warn(f"apex: {self._who}: its environments do not close: {in_one_line(closed.error)}")

    def _checked_step(self, step: Timestep) -> Timestep:
        self._checked(step.obs), self._checked(step.last_obs)
        if step.reward.shape != (self.num_envs,) or not np.isfinite(step.reward).all():
            raise ValueError(f"rewards {step.reward} are not {self.num_envs} finite numbers")
        for name, flags in (("terminated", step.terminated), ("truncated", step.truncated)):
            if flags.shape != (self.num_envs,):
                raise ValueError(f"{name} of shape {list(flags.shape)}, expected [{self.num_envs}]")
        return step

    def _checked(self, obs: np.ndarray) -> np.ndarray:
        expected = (self.num_envs, *self.spec.observation_shape)
        if obs.shape != expected:
            raise ValueError(f"observations of shape {list(obs.shape)}, expected {list(expected)}")
        if obs.dtype.kind == "f" and not np.isfinite(obs).all():
            raise ValueError("an observation is not finite")
        return obs

    def _begun(self, obs: np.ndarray) -> Timestep:
        no, yes = np.zeros(self.num_envs, bool), np.ones(self.num_envs, bool)
        none = np.zeros(self.num_envs, np.float32)
        return Timestep(obs, obs, none, no, no, valid=no, first=yes, score=none, game_over=no)

    def _restart(self, error: BaseException) -> None:
        """Tell what failed, and make the environments anew unless that has been done too often."""
        attempt(self._envs.close)  # what is broken may not close either
        self._count(error)
        self._envs = self._made()

    def _made(self) -> VectorEnv:
        """Return new environments; each failure to make them counts as a restart."""
        while True:
            made = attempt(lambda: self._make(self.restarts))
            if not isinstance(made, Failed):
                return made
            self._count(made.error)

    def _count(self, error: BaseException) -> None:
        self.restarts += 1
        if self.restarts > self._most:
            why = (
                f"{self._who}: its environments failed {self.restarts} times; env.max_restarts = {self._most}"
            )
            raise EnvironmentFailure(why) from error
        told = "".join(traceback.format_exception(error)).rstrip()
        what = (
            f"apex: {self._who}: its environments failed and are made anew ({self.restarts} of {self._most})"
        )
        warn(f"{told}\n{what}")
