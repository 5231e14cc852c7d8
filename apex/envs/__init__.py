"""Environments, vectorised and alike: the whole API on this page.

``make_envs(env, num_envs, seed)`` returns a :class:`VectorEnv`, ``env_spec(env)`` its shape::

    envs = make_envs(config.env, num_envs=16, seed=0)
    obs = envs.reset()                   # [V, *spec.observation_shape]
    timestep = envs.step(actions)        # actions int[V] -> Timestep
    obs = timestep.obs                   # act from this next

A *family* is a module of this folder, found by its name (``env.family``), that offers what :class:`Family`
lists. ``tests/helpers/env_conformance.py`` holds the tests that every family passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from apex import plugins
from apex.config import ConfigError, EnvConfig
from apex.envs.foreign import named
from apex.envs.guard import EnvironmentFailure, GuardedEnvs
from apex.envs.vector import Timestep, VectorEnv
from apex.schema import EnvSpec

__all__ = [
    "EnvironmentFailure",
    "GuardedEnvs",
    "Timestep",
    "VectorEnv",
    "bytes_per_env",
    "env_spec",
    "families",
    "is_always_the_same",
    "make_envs",
    "rows_to_try",
]

_NOT_FAMILIES = {"foreign", "guard", "trial", "vector"}


class Family(Protocol):
    """The functions of a family's module."""

    BYTES_PER_ENV: int
    """The memory that one more environment takes, as measured."""

    def make_envs(
        self, env: EnvConfig, num_envs: int, seed: int, *, evaluation: bool = False, render: bool = False
    ) -> VectorEnv:
        """Return environments, as :func:`make_envs` does."""

    def env_spec(self, env: EnvConfig) -> EnvSpec:
        """Return their shape, without keeping one alive."""

    def rows_to_try(self, env: EnvConfig, num_envs: int, *, evaluation: bool) -> int:
        """Return how many of ``num_envs`` environments stand for all."""

    def is_always_the_same(self, env: EnvConfig) -> bool:
        """Whether it is known that equal actions give the same episode for every seed."""


def make_envs(
    env: EnvConfig, num_envs: int, seed: int, *, evaluation: bool = False, render: bool = False
) -> VectorEnv:
    """Return ``num_envs`` environments; the same arguments and actions always repeat the same run.

    Row i is seeded with ``seed + i``. (For training, an environment with a vector implementation of
    its own may instead draw all its rows from the one seed; rows still differ.) With ``evaluation``
    rewards are not clipped, a lost life ends nothing, and the first episode of row i depends only on
    ``seed + i`` and the actions of that row. With ``render``, :meth:`VectorEnv.render` shows row 0.
    Raises :class:`ConfigError` for an unknown family or id, for spaces that cannot be used, and for
    whatever the environment's own code raises.
    """
    family = _family(env.family)
    with named(env):
        return family.make_envs(env, num_envs, seed, evaluation=evaluation, render=render)


def env_spec(env: EnvConfig) -> EnvSpec:
    """Return what the environment looks like, without keeping one alive.

    Raises :class:`ConfigError` as :func:`make_envs` does.
    """
    family = _family(env.family)
    with named(env):
        return family.env_spec(env)


def rows_to_try(env: EnvConfig, num_envs: int, *, evaluation: bool) -> int:
    """Return how many environments the check before the start makes instead of ``num_envs``."""
    return _family(env.family).rows_to_try(env, num_envs, evaluation=evaluation)


def bytes_per_env(env: EnvConfig) -> int:
    """Return the memory of each environment after the first. Raises :class:`ConfigError`."""
    return _family(env.family).BYTES_PER_ENV


def is_always_the_same(env: EnvConfig) -> bool:
    """Whether equal actions surely give equal episodes for every seed. Raises :class:`ConfigError`."""
    return _family(env.family).is_always_the_same(env)


def families() -> list[str]:
    """Return the names of all environment families."""
    return plugins.names(__path__, _NOT_FAMILIES)


def _family(name: str) -> Family:
    try:
        return cast(Family, plugins.load(__name__, name, families(), f"env.family = '{name}' is unknown"))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"env.family = '{name}' needs the package '{error.name}', which is not installed"
        ) from error


if TYPE_CHECKING:  # the checker compares them with the interface
    from apex.envs import atari, gymnasium

    _of_this_folder: tuple[Family, ...] = (atari, gymnasium)
