"""Family "gymnasium": any registered Gymnasium id with discrete actions and Box observations.

Training uses the environment's own vector implementation where it has one, else one copy per row.
Evaluation always uses one copy per row, because only then does row i have a seed of its own.
"""

from __future__ import annotations

import difflib
import importlib
import os
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from apex.config import ConfigError, EnvConfig
from apex.envs.vector import CUT, VectorEnv
from apex.schema import EnvSpec

BYTES_PER_ENV = 64 << 10
"""Those of classic control take 5 KiB, measured; others more."""


def make_envs(
    env: EnvConfig, num_envs: int, seed: int, *, evaluation: bool = False, render: bool = False
) -> VectorEnv:
    """Return ``num_envs`` environments of ``env.id``; see :func:`apex.envs.make_envs`."""
    made = _make_vec(env.id, num_envs, "sync" if evaluation else None, render)
    try:
        return VectorEnv(made, _spec_of(env.id, made), seed)
    except BaseException:
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


def rows_to_try(env: EnvConfig, num_envs: int, *, evaluation: bool) -> int:
    """Return all of a vector implementation, which may take any number in its own way; else 2 at most."""
    entry = gymnasium.registry.get(env.id.rpartition(":")[2])
    whole = entry is not None and entry.vector_entry_point is not None and not evaluation
    return num_envs if whole else min(num_envs, 2)


def is_always_the_same(env: EnvConfig) -> bool:
    """Return False: what an environment draws from its seed is not known before it is played."""
    return False


def _make_vec(name: str, num_envs: int, mode: str | None, render: bool) -> gymnasium.vector.VectorEnv:
    _check_id(name)
    options: dict[str, Any] = {}
    if render:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # draw without a screen
        options["render_mode"] = "rgb_array"
    made = gymnasium.make_vec(
        name, num_envs=num_envs, vectorization_mode=mode, wrappers=_wrappers(name, mode), **options
    )
    if render and "rgb_array" not in made.metadata.get("render_modes", ()):
        made.close()
        raise ConfigError(f"env.id = '{name}' cannot draw itself (no render mode 'rgb_array')")
    return made


def _wrappers(name: str, mode: str | None) -> tuple:
    """Return the wrappers of each environment; a vector implementation of its own takes none."""
    entry = gymnasium.registry[name.rpartition(":")[2]]
    if mode is None and entry.vector_entry_point is not None:
        return ()
    if mode == "sync" and entry.entry_point is None:
        raise ConfigError(
            f"env.id = '{name}' exists only as a vector environment; evaluation needs single ones, each with "
            "its own seed (register an entry_point too)"
        )
    return (_CutToldInInfo,)


class _CutToldInInfo(gymnasium.Wrapper):
    """A truncation that only ``info`` tells, as before Gym 0.26, is a truncation."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        cut = bool(info.get(CUT, False))
        return obs, reward, terminated and not cut, truncated or cut, info


def _spec_of(name: str, made: gymnasium.vector.VectorEnv) -> EnvSpec:
    actions, observations = made.single_action_space, made.single_observation_space
    if not isinstance(actions, Discrete) or actions.start != 0:
        raise ConfigError(
            f"env.id = '{name}' has actions {_one_line(actions)}; only Discrete(n), from 0 on, can be used"
        )
    if not isinstance(observations, Box):
        raise ConfigError(
            f"env.id = '{name}' has observations {_one_line(observations)}; only Box can be used"
        )
    if 0 in observations.shape:
        raise ConfigError(
            f"env.id = '{name}' has observations of shape {list(observations.shape)}, without any element"
        )
    dtype = observations.dtype.name if observations.dtype in (np.uint8, np.bool_) else "float32"
    return EnvSpec(tuple(observations.shape), dtype, 1, int(actions.n))


def _check_id(name: str) -> None:
    """Refuse an id that is not registered or is an Atari game; ``module:Id-v0`` imports the module first."""
    module, _, plain = name.rpartition(":")
    if module:
        importlib.import_module(module)
    known = gymnasium.registry.get(plain)
    if known is None or "ale_py" in str(known.entry_point):
        _refuse_atari(plain)
    if known is None:
        raise ConfigError(f"env.id = '{name}' is not a registered Gymnasium id; {_nearest_ids(plain)}")


def _refuse_atari(name: str) -> None:
    """Refuse ids such as ``ALE/Pong-v5``: made here, each would have other frames and other rules."""
    try:
        from apex.envs import atari
    except ImportError:  # without ale_py there are no Atari ids
        return
    rom = atari.rom_of(name)
    if rom is not None:
        raise ConfigError(
            f"env.id = '{name}' is an Atari game; use env.family = 'atari' with env.id = '{rom}'"
        )


def _nearest_ids(name: str) -> str:
    """Return the nearest few registered ids; there are too many to list."""
    lower = {known.lower(): known for known in gymnasium.registry}
    close = difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.4)
    if not close:
        return "a valid one is 'CartPole-v1'"
    others = f" (near too: {', '.join(lower[c] for c in close[1:])})" if close[1:] else ""
    return f"did you mean '{lower[close[0]]}'?{others}"


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
