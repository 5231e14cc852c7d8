"""The environments of a run, tried before it starts: made, reset and stepped as the roles do it."""

from __future__ import annotations

import time

import numpy as np

from apex import seeds
from apex.config import Config, ConfigError
from apex.envs import GuardedEnvs, make_envs, rows_to_try
from apex.envs.guard import refusing
from apex.schema import EnvSpec

_MOST_STEPS = 32  # random play of most small environments ends an episode within as many
_MOST_S = 1.0  # of each form: an environment whose steps are slow is stepped once or twice


def try_out(config: Config, spec: EnvSpec) -> None:
    """Make a few steps with each role's form of the run's environments, which look as ``spec`` says.

    Raises :class:`ConfigError` where an actor's or the evaluator's environments cannot be made, reset or
    stepped, give what :class:`GuardedEnvs` refuses, or differ from ``spec``.
    """
    _check(config, "training", spec, config.actor.envs, seeds.environment_seed(config.run.seed, 0, 0, 0))
    _check(config, "evaluation", spec, config.evaluator.episodes, config.evaluator.seed)


def _check(config: Config, form: str, spec: EnvSpec, num_envs: int, seed: int) -> None:
    env, evaluation = config.env, form == "evaluation"
    num_envs = rows_to_try(env, num_envs, evaluation=evaluation)
    with refusing(env, form):
        envs = GuardedEnvs(lambda attempt: make_envs(env, num_envs, seed, evaluation=evaluation), 0, form)
        if (envs.spec, envs.num_envs) != (spec, num_envs):
            seen = f"{envs.num_envs} environments of {envs.spec}"
            raise ConfigError(f"env.id = '{env.id}' gives {seen} in {form}, expected {num_envs} of {spec}")
        _play(envs)
        envs.close()


def _play(envs: GuardedEnvs) -> None:
    """Reset, and step at random to the first step after an episode's end, or as far as the limits allow."""
    rng, until, ended = np.random.default_rng(0), time.monotonic() + _MOST_S, False
    envs.reset()
    for _ in range(_MOST_STEPS):
        step = envs.step(rng.integers(envs.spec.num_actions, size=envs.num_envs))
        if ended or time.monotonic() > until:
            return
        ended = bool((step.terminated | step.truncated).any())
