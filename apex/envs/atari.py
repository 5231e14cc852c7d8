"""Family "atari": Atari 2600 games, preprocessed and stacked by ale_py's AtariVectorEnv.

``env.id`` is the ROM name (``pong``). Observations are uint8 [stack, size, size], oldest frame
first. Within an episode each step shifts the stack by one frame, up to and including the terminal
observation; the first observation of a game is all zero but for its newest frame. The conformance tests hold
it to both, for frames are stored once and shared on the strength of them.

With ``env.episodic_life`` a lost life ends an episode for learning: it is terminated, and no transition joins
what comes before and after. The game itself goes on with the lives that are left, without a reset, so the
next episode begins with the same observation that ended the last one.
"""

from __future__ import annotations

import difflib
import functools
import re
from typing import Any

import numpy as np
from ale_py import Action, ALEInterface, AtariVectorEnv, LoggerMode, roms
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode

from apex.config import ConfigError, EnvConfig
from apex.envs.vector import Timestep, VectorEnv
from apex.schema import EnvSpec

BYTES_PER_ENV = 1_800_000
"""Measured: 1,610,000, of which nearly all is the emulator's."""

# Loading one of these ends the process: they have no mode for one player.
_TWO_PLAYER_ROMS = {"combat", "joust", "maze_craze", "warlords"}
_GYMNASIUM_ID = re.compile(r"(?:ALE/)?(\w+?)(?:-ram)?(?:NoFrameskip|Deterministic)?(?:-v\d+)?", re.IGNORECASE)
_SCREEN = {"grayscale": False, "img_height": 210, "img_width": 160, "stack_num": 1}


class _Ale(AtariVectorEnv):
    # AtariVectorEnv writes its autoreset mode into its class's dictionary, which without this line
    # is the one that all Gymnasium vector environments share.
    metadata: dict[str, Any] = {}  # noqa: RUF012  the base class has it so

    def reset(
        self, *, seed: int | np.ndarray | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, np.ndarray]]:
        obs, info = super().reset(seed=seed, options=options)
        self.lives = info["lives"].copy()
        return obs, info

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Note the lives that are left, int32[V]: where a game has ended, those of the next."""
        result = super().step(actions)
        self.lives = result[-1]["lives"].copy()
        return result


class _Games(VectorEnv):
    """What the learner trains on: clipped rewards and, if asked for, episodes that end at each lost life."""

    def __init__(self, ale: _Ale, spec: EnvSpec, seed: np.ndarray, clip: bool, by_life: bool):
        # Its observation arrays are new at every step (a test holds on to them and looks again).
        super().__init__(ale, spec, seed, fresh_arrays=True)
        self._ale, self._clip, self._by_life = ale, clip, by_life

    def step(self, actions: np.ndarray) -> Timestep:
        lives = self._ale.lives
        step = super().step(actions)
        if self._clip:
            step = step._replace(reward=np.sign(step.score))
        if self._by_life:
            # At 0 lives some games still have a few frames to go before they are over.
            lost = (self._ale.lives < lives) & (self._ale.lives > 0) & ~step.game_over
            step = step._replace(terminated=step.terminated | lost, first=step.first | lost)
        return step


class _GamesWithScreen(_Games):
    """Row 0 is played a second time, in colour and at full size, to be shown.

    AtariVectorEnv has no picture to render, but its runs repeat exactly: the second emulator has the
    same seed and gets the same actions.
    """

    def __init__(self, *games: Any, screen: _Ale):
        super().__init__(*games)
        self._screen = screen
        self._frames = np.zeros(0, np.uint8)  # of the screen, uint8 [1, 1, 210, 160, 3]

    def reset(self) -> np.ndarray:
        self._frames, _ = self._screen.reset(seed=self._seed[:1])
        return super().reset()

    def step(self, actions: np.ndarray) -> Timestep:
        timestep = super().step(actions)
        self._frames, *shown, _ = self._screen.step(np.asarray(actions[:1], np.int64))
        reward, terminated, truncated = (values[0] for values in shown)
        if reward != timestep.score[0] or (terminated or truncated) != timestep.game_over[0]:
            raise RuntimeError("the game on the screen has left the game that is played")
        return timestep

    def render(self) -> np.ndarray:
        """Return the screen of row 0, uint8 [210, 160, 3]; where an episode ended, the new one's first."""
        return self._frames[0, -1].copy()

    def close(self) -> None:
        super().close()
        self._screen.close()


def make_envs(
    env: EnvConfig, num_envs: int, seed: int, *, evaluation: bool = False, render: bool = False
) -> VectorEnv:
    """Return ``num_envs`` games of ``env.id``; see :func:`apex.envs.make_envs`."""
    rom = _rom(env.id)
    options = _options(env)
    made = _Ale(rom, num_envs, **options)
    seeds = (seed + np.arange(num_envs)) % 2**31  # the emulator's seeds are 31 bits; -1 would be random
    games = (
        made,
        _spec_of(env, made),
        seeds,
        env.clip_rewards and not evaluation,
        env.episodic_life and not evaluation,
    )
    if render:
        return _GamesWithScreen(*games, screen=_Ale(rom, 1, **{**options, **_SCREEN}))
    return _Games(*games)


def env_spec(env: EnvConfig) -> EnvSpec:
    """Return the spec of the game ``env.id`` with the preprocessing of ``env``."""
    rom = _rom(env.id)  # refused before it is loaded
    made = _Ale(rom, 1, **_options(env))
    try:
        return _spec_of(env, made)
    finally:
        made.close()


def rows_to_try(env: EnvConfig, num_envs: int, *, evaluation: bool) -> int:
    """Return 2 at most: emulators are copies, and take 0.1 s each to make."""
    return min(num_envs, 2)


def is_always_the_same(env: EnvConfig) -> bool:
    """Whether equal actions give equal episodes for every seed: no no-ops, no sticky actions."""
    return env.noop_max == 0 and env.sticky_actions == 0.0


def rom_names() -> list[str]:
    """Return the ROM names that can be played."""
    return sorted(set(roms.get_all_rom_ids()) - _TWO_PLAYER_ROMS)


def rom_of(name: str) -> str | None:
    """Return the ROM that a name such as ``ALE/MsPacman-v5`` or ``MsPacmanNoFrameskip-v4`` stands for."""
    match = _GYMNASIUM_ID.fullmatch(name)
    by_plain_name = {rom.replace("_", ""): rom for rom in rom_names()}
    return by_plain_name.get(match[1].replace("_", "").lower()) if match else None


def _options(env: EnvConfig) -> dict:
    """Return AtariVectorEnv's arguments. Each is explicit: its defaults are not those of the ids."""
    return {
        "frameskip": env.frame_skip,
        "stack_num": env.stack,
        "img_height": env.frame_size,
        "img_width": env.frame_size,
        "repeat_action_probability": env.sticky_actions,
        # It draws 0 to one less than this, and where a game needs FIRE that takes the place of one of them.
        "noop_max": env.noop_max and env.noop_max + (2 if _starts_with_fire(env.id) else 1),
        "max_num_frames_per_episode": env.max_episode_frames,
        "episodic_life": False,  # which would reset the game; see _Games
        "reward_clipping": False,  # full scores are wanted too
        "grayscale": True,
        "maxpool": True,
        "use_fire_reset": True,
        "full_action_space": False,
        "num_threads": 1,  # a rank has one core; more ranks, not more threads
        # NEXT_STEP would spend a step of every episode on its reset.
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }


@functools.cache
def _starts_with_fire(rom: str) -> bool:
    """Whether FIRE is pressed after the no-ops of a reset: in games that have it among their actions."""
    ALEInterface.setLoggerMode(LoggerMode.Error)  # else it greets
    ale = ALEInterface()
    path = roms.get_rom_path(rom)
    assert path is not None  # the name has been looked up
    ale.loadROM(path)
    return Action.FIRE in ale.getMinimalActionSet()


def _spec_of(env: EnvConfig, made: AtariVectorEnv) -> EnvSpec:
    size = (env.frame_size, env.frame_size)
    actions = made.single_action_space
    assert isinstance(actions, Discrete)
    return EnvSpec(size, "uint8", env.stack, int(actions.n), env.frame_skip)


def _rom(name: str) -> str:
    """Return ``name`` if it is a ROM that can be played, or refuse it with the nearest ones."""
    if name in rom_names():
        return name
    if name in _TWO_PLAYER_ROMS:
        raise ConfigError(f"env.id = '{name}' is a game for two players only and cannot be played by one")
    rom = rom_of(name)
    if rom is not None:
        raise ConfigError(f"env.id = '{name}' is not a ROM name; write env.id = '{rom}'")
    close = difflib.get_close_matches(name.lower(), rom_names(), n=3, cutoff=0.4) or ["pong"]
    others = f" (near too: {', '.join(close[1:])})" if close[1:] else ""
    raise ConfigError(f"env.id = '{name}' is not an Atari ROM name; did you mean '{close[0]}'?{others}")
