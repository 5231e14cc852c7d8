"""`apex eval` and `apex play`: greedy episodes with the network of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.evaluator import Episodes
from apex import algorithms, checkpoint, look, weights
from apex import config as configuration
from apex.config import Config, ConfigError
from apex.envs import GuardedEnvs, VectorEnv, env_spec, make_envs
from apex.envs.guard import refusing
from apex.output_file import FILM, OutputFile
from apex.run_folder import RunFolder, resolve
from apex.say import say, warn

CHECKPOINTS = ("best", "latest")


class Player:
    """The network of a run, finished or not, with the weights of its best evaluation or the newest."""

    def __init__(self, run: str, which: str | None):
        import torch

        torch.set_num_threads(1)
        self.folder = RunFolder(resolve(run))
        if not look.is_file(self.folder.config_path):
            raise ConfigError(f"run {self.folder.path} has no config.toml")
        self.config: Config = configuration.load(str(self.folder.config_path))
        self.path = self._checkpoint(which)
        state = checkpoint.load(self.path)
        algorithm = algorithms.load(self.config.algorithm.name)
        self.network = algorithm.make_network(self.config, env_spec(self.config.env)).eval()
        try:
            weights.load_state(self.network, state["online"])
            self.learner_steps = int(state["learner_steps"])
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
            why = (str(error).splitlines() or [""])[0]
            raise ConfigError(f"checkpoint {self.path} does not fit the run's configuration: {why}") from None

    def _checkpoint(self, which: str | None) -> Path:
        """Return the path of the checkpoint ``which``; None: best, or latest if there is no best yet."""
        paths = {name: self.folder.checkpoints / f"{name}.pt" for name in CHECKPOINTS}
        if which is not None and not look.is_file(paths[which]):
            raise ConfigError(f"--checkpoint {which}: there is no {paths[which]}")
        if which is not None:
            return paths[which]
        found = [path for path in paths.values() if look.is_file(path)]
        if not found:
            raise ConfigError(f"run {self.folder.path} has no checkpoint yet")
        return found[0]

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Return Q-values float32[B, num_actions]."""
        import torch

        with torch.inference_mode():
            return self.network(torch.from_numpy(obs)).numpy()

    def play(
        self, episodes: int, seed: int, render: bool = False, each_step: Callable = lambda envs: None
    ) -> Episodes:
        """Play ``episodes`` greedy episodes, scored in full, with seeds ``seed``, ``seed + 1``, ..."""
        env = self.config.env

        def make(attempt: int) -> VectorEnv:
            return make_envs(env, episodes, seed, evaluation=True, render=render)

        with refusing(env, "playback"), contextlib.closing(GuardedEnvs(make, 0, "playback")) as envs:
            played = Episodes(envs, self.config.evaluator.epsilon, seed, env.max_episode_frames)
            each_step(envs)
            while not played.done:
                played.step(self.q_values)
                each_step(envs)
        if played.complaint():
            warn(f"apex: {played.complaint()}")
        return played


def evaluate(run: str, which: str | None, episodes: int | None, seed: int | None) -> int:
    """Print the mean greedy return of a run; return the exit status."""
    player = Player(run, which)
    evaluator = player.config.evaluator
    episodes, seed = episodes or evaluator.episodes, evaluator.seed if seed is None else seed
    returns = player.play(episodes, seed).returns
    say(
        f"apex: {player.path}, {player.learner_steps} learner steps: greedy return {returns.mean():.1f} "
        f"(min {returns.min():.1f}, max {returns.max():.1f}) over {episodes} episodes, "
        f"seeds {seed} to {seed + episodes - 1}"
    )
    return 0


def play(run: str, which: str | None, gif: Path, seed: int | None, max_frames: int) -> int:
    """Write one greedy episode as an animated GIF; return the exit status."""
    out = OutputFile("--gif", gif, FILM)
    player = Player(run, which)
    frames: list[np.ndarray] = []
    seed = player.config.evaluator.seed if seed is None else seed
    played = player.play(1, seed, True, lambda envs: _film(envs, frames, max_frames))
    length, total = played.lengths[0], played.returns[0]
    about = f"{len(frames)} frames of {length} steps, return {total:.1f}, from {player.path}"
    out.write(lambda path: _write_gif(frames, path), about)
    return 0


def _film(envs: GuardedEnvs, frames: list[np.ndarray], max_frames: int) -> None:
    if len(frames) < max_frames:
        frames.append(envs.render())


def _write_gif(frames: list[np.ndarray], gif: Path) -> None:
    """Write ``frames`` uint8 [H, W, 3] at 25 per second (GIF time is in hundredths)."""
    from PIL import Image

    images = [Image.fromarray(frame).quantize(64) for frame in frames]
    images[0].save(gif, save_all=True, append_images=images[1:], duration=40, loop=0, optimize=True)
