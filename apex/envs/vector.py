"""One view of vector environments, whichever autoreset mode Gymnasium gave them.

Gymnasium has three ways to go on after an episode's end, and misreading one joins a terminal
observation to the next episode's first. Here they become one :class:`Timestep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import ArrayLike

from apex.config import ConfigError
from apex.schema import EnvSpec

CUT = "TimeLimit.truncated"
"""The key of ``info`` in which environments made for Gym before 0.26 tell a truncation."""


class Timestep(NamedTuple):
    """What one vector step gave. All arrays are fresh: the environment never writes to them again.

    ``obs`` [V, *observation_shape] is the observation to act from next; ``last_obs``, of the same
    shape, the one that ended this step (s_t): the terminal observation where an episode ended, else
    equal to ``obs`` (the same array object when no row differs). ``reward`` float32[V].
    ``terminated`` and ``truncated`` bool[V] exclude each other. ``valid`` bool[V] is False where the
    row only carried a reset: its action was ignored and its reward is 0. ``first`` bool[V] is True
    where ``obs`` is the first observation of a new episode.

    These are what is learnt from. What a player would call the score is beside them: ``score`` float32[V],
    the reward as the environment gave it (``reward`` may be clipped), and ``game_over`` bool[V], where the
    game itself has ended (an episode may also end at a lost life, after which the same game goes on).

    An episode that ends at step t looks like this:

    - SAME_STEP, DISABLED: at t, ``last_obs`` is terminal, ``obs`` the reset observation, ``first``.
    - NEXT_STEP: at t, ``obs`` is ``last_obs`` and terminal; at t + 1 not ``valid`` but ``first``.
    """

    obs: np.ndarray
    last_obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    first: np.ndarray
    score: np.ndarray
    game_over: np.ndarray


class VectorEnv:
    """``num_envs`` environments stepped together, with observations as ``spec`` describes them.

    Wraps a ``gymnasium.vector.VectorEnv`` in any of the three autoreset modes; with DISABLED, done
    rows are reset here. Raises :class:`ConfigError` for one that does not say its mode.

    ``seed`` is what ``env.reset`` takes. ``fresh_arrays`` says that the environment hands out new
    observation arrays and never writes to them again, so that they need not be copied.
    """

    def __init__(
        self, env: gymnasium.vector.VectorEnv, spec: EnvSpec, seed: Any, *, fresh_arrays: bool = False
    ):
        self.spec = spec
        self.num_envs = env.num_envs
        self._env = env
        self._seed = seed
        self._mode = _autoreset_mode(env)
        self._copy = True if not fresh_arrays else None  # None: NumPy copies only for a cast
        self._resets_next = np.zeros(env.num_envs, bool)  # rows whose next step is a reset (NEXT_STEP)

    def reset(self) -> np.ndarray:
        """Start all rows again from the seed; return first observations [V, *observation_shape].

        Every call starts the same run again, so that each evaluation plays the same episodes.
        """
        obs, _ = self._env.reset(seed=self._seed)
        self._resets_next = np.zeros(self.num_envs, bool)
        return self._observations(obs)

    def step(self, actions: np.ndarray) -> Timestep:
        """Step every row with ``actions`` int[V]."""
        raw, reward, terminated, truncated, info = self._env.step(np.asarray(actions, np.int64))
        valid = ~self._resets_next
        reward = np.where(valid, reward, 0).astype(np.float32)
        terminated = np.logical_and(terminated, valid)
        truncated = np.logical_and(truncated, valid) & ~terminated
        terminated, truncated = self._heed_info(info, terminated, truncated, valid)
        obs, last_obs, first = self._settle(self._observations(raw), terminated | truncated, info)
        return Timestep(
            obs, last_obs, reward, terminated, truncated, valid, first, reward, terminated | truncated
        )

    def render(self) -> np.ndarray:
        """Return a picture of row 0, uint8 [H, W, 3]. Raises RuntimeError if made without ``render``."""
        pictures = self._env.render() if self._env.render_mode == "rgb_array" else None
        if pictures is None:
            raise RuntimeError("these environments were made without render=True")
        return np.array(pictures[0], np.uint8)

    def close(self) -> None:
        """Release the environments."""
        self._env.close()

    def _observations(self, raw: ArrayLike) -> np.ndarray:
        """Return observations [k, *observation_shape], C-contiguous, in the spec's dtype."""
        obs = np.array(raw, self.spec.frame_dtype, copy=self._copy, order="C")
        return obs.reshape(len(obs), *self.spec.observation_shape)

    def _heed_info(
        self,
        info: dict | Sequence[dict | None],
        terminated: np.ndarray,
        truncated: np.ndarray,
        valid: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (terminated, truncated), where rows that only ``info`` calls cut are truncated."""
        cut = cut_rows(info, self.num_envs) & valid
        if not cut.any():
            return terminated, truncated
        if self._mode is not AutoresetMode.DISABLED and (cut & ~(terminated | truncated)).any():
            raise ValueError(
                f"info['{CUT}'] is set for a row that has not ended, and that only the environment can reset"
            )
        return terminated & ~cut, truncated | cut

    def _settle(
        self, obs: np.ndarray, done: np.ndarray, info: dict
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (obs, last_obs, first) after a step that returned ``obs`` and ended ``done`` rows."""
        if self._mode is AutoresetMode.NEXT_STEP:
            first, self._resets_next = self._resets_next, done
            return obs, obs, first
        if not done.any():
            return obs, obs, done
        other = obs.copy()
        if self._mode is AutoresetMode.SAME_STEP:
            other[done] = self._final_observations(info, done)
            return obs, other, done
        reset_obs, _ = self._env.reset(options={"reset_mask": done.copy()})
        other[done] = self._observations(reset_obs)[done]
        return other, obs, done

    def _final_observations(self, info: dict, done: np.ndarray) -> np.ndarray:
        """Return the terminal observations of the ``done`` rows.

        ``final_obs`` comes as an object array of one array per done row (SyncVectorEnv) or as one
        array over all rows (AtariVectorEnv); as a list of rows the two are alike.
        """
        if "final_obs" not in info:
            raise RuntimeError("a SAME_STEP environment ended an episode without info['final_obs']")
        return self._observations(np.stack(list(info["final_obs"][done])))


def cut_rows(info: dict | Sequence[dict | None], num_envs: int) -> np.ndarray:
    """Return bool[V], the rows whose ``info`` tells a truncation.

    ``info`` is a dictionary of arrays [V] with masks (``_key``), or one dictionary a row; with SAME_STEP the
    last step's is in ``info["final_info"]``, in either form.
    """
    if not isinstance(info, dict):
        return np.array([row is not None and bool(row.get(CUT)) for row in info], bool)
    cut = np.zeros(num_envs, bool)
    if CUT in info:
        cut |= np.asarray(info[CUT], bool) & np.asarray(info.get(f"_{CUT}", True), bool)
    if "final_info" in info:
        cut |= cut_rows(info["final_info"], num_envs)
    return cut


def _autoreset_mode(env: gymnasium.vector.VectorEnv) -> AutoresetMode:
    """Return the mode the environment states, or refuse it."""
    # The dictionary of the base class is shared by all that define none of their own, and some
    # environments write their mode into it: what it says is about another environment.
    shared = env.metadata is gymnasium.vector.VectorEnv.metadata
    try:
        return AutoresetMode(None if shared else env.metadata.get("autoreset_mode"))
    except ValueError:
        name = type(env).__name__
        raise ConfigError(
            f"environment {name} does not say its autoreset mode in metadata['autoreset_mode']"
        ) from None
