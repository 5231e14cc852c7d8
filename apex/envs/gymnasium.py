"""Family "gymnasium": any registered Gymnasium id with discrete actions and Box observations.

Training uses the environment's own vector implementation where it has one, else one copy per row.
Evaluation always uses one copy per row, because only then does row i have a seed of its own.
"""

from __future__ import annotations

import difflib
import importlib
import os

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from apex.config import ConfigError, EnvConfig
from apex.envs.vector import VectorEnv
from apex.schema import EnvSpec

BYTES_PER_ENV = 64 << 10
"""Those of classic control take 5 KiB, measured; others more."""


def make_envs(env: EnvConfig, num_envs: int, seed: int, *, evaluation: bool = False, render: bool = False) -> VectorEnv:
    """Return ``num_envs`` environments of ``env.id``; see :func:`apex.envs.make_envs`."""
    made = _make_vec(env.id, num_envs, "sync" if evaluation else None, render)
    try:
        return VectorEnv(made, _spec_of(env.id, made), seed)
    except ConfigError:
        made.close()
        raise


def env_spec(env: EnvConfig) -> EnvSpec:
    """Return the spec of ``env.id``: one unstacked frame of the observation's shape.

    Frames are uint8 (pixels, which networks scale) or bool where observations are, else float32.
    """
    made = _make_vec(env.id, 1, None, render=False)
    try:
        return _spec_of(env.id, made)
    finally:
        made.close()


def _make_vec(name: str, num_envs: int, mode: str | None, render: bool) -> gymnasium.vector.VectorEnv:
    _check_id(name)
    options = {}
    if render:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
        options["render_mode"] = "rgb_array"
    try:
        made = gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode=mode, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(f"env.id = '{name}' cannot be made: {_one_line(error)}") from error
    if render and "rgb_array" not in made.metadata.get("render_modes", ()):
        made.close()
        raise ConfigError(f"env.id = '{name}' cannot draw itself (no render mode 'rgb_array')")
    return made


def _spec_of(name: str, made: gymnasium.vector.VectorEnv) -> EnvSpec:
    actions, observations = made.single_action_space, made.single_observation_space
    if not isinstance(actions, Discrete) or actions.start != 0:
        raise ConfigError(f"env.id = '{name}' has actions {_one_line(actions)}; only Discrete(n), from 0 on, can be used")
    if not isinstance(observations, Box):
        raise ConfigError(f"env.id = '{name}' has observations {_one_line(observations)}; only Box can be used")
    dtype = observations.dtype.name if observations.dtype in (np.uint8, np.bool_) else "float32"
    return EnvSpec(tuple(observations.shape), dtype, 1, int(actions.n))


def _check_id(name: str) -> None:
    """Refuse an id that is not registered or is an Atari game; ``module:Id-v0`` imports the module first."""
    module, _, plain = name.rpartition(":")
    if module:
        _import(name, module)
    known = gymnasium.registry.get(plain)
    if known is None or "ale_py" in str(known.entry_point):
        _refuse_atari(plain)
    if known is None:
        raise ConfigError(f"env.id = '{name}' is not a registered Gymnasium id; {_nearest_ids(plain)}")


def _import(name: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except (ImportError, ValueError, TypeError) as error:  # not there, or no module's name
        raise ConfigError(f"env.id = '{name}': {_one_line(error)}") from error


def _refuse_atari(name: str) -> None:
    """Refuse ids such as ``ALE/Pong-v5``: made here, each would have other frames and other rules."""
    try:
        from apex.envs import atari
    except ImportError:  # without ale_py there are no Atari ids
        return
    rom = atari.rom_of(name)
    if rom is not None:
        raise ConfigError(f"env.id = '{name}' is an Atari game; use env.family = 'atari' with env.id = '{rom}'")


def _nearest_ids(name: str) -> str:
    """Return the nearest few registered ids; there are too many to list."""
    lower = {known.lower(): known for known in gymnasium.registry}
    close = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.4)
    if not close:
        return "a valid one is 'CartPole-v1'"
    others = f" (near too: {', '.join(lower[c] for c in close[1:])})" if close[1:] else ""
    return f"did you mean '{lower[close[0]]}'?{others}"


def _one_line(value) -> str:
    return " ".join(str(value).split())
