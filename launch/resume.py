"""`apex train --resume RUN`: which configuration goes on, from which checkpoint, and in which state its folder is to be."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from apex import checkpoint_files, look, run_folder, saved
from apex import config as configuration
from apex.config import Config, ConfigError, to_toml
from apex.run_folder import RunFolder
from apex.saved import Saved
from apex.say import say, warn
from replay_rank.index import index_class

CHECKPOINT_VARIABLE = "APEX_CHECKPOINT"  # set by `apex train` for the ranks it starts


def configure(run: str, preset: str | None, overrides: list[str]) -> tuple[Config, RunFolder]:
    """Return the configuration of a run with overrides, and its folder; a preset, if given, must be of the same environment."""
    try:
        folder = RunFolder(run_folder.resolve(run))
    except ConfigError as error:
        raise ConfigError(f"--resume {run}: {error}") from None
    if not look.is_file(folder.config_path):
        raise ConfigError(f"--resume {run}: run {folder.path} has no config.toml to resume with")
    config = configuration.load(str(folder.config_path), overrides)
    if preset is not None:
        asked, held = configuration.load(preset, overrides).env, config.env
        if (asked.family, asked.id) != (held.family, held.id):
            raise ConfigError(f"run {folder.path} trains {held.id}, preset '{preset}' trains {asked.id}; leave the preset out")
    return config, folder


def choose(config: Config, folder: RunFolder) -> Path:
    """Return the newest whole checkpoint, which ``config`` can go on from; raises :class:`ConfigError` where there is none."""
    look.read(folder.checkpoints / "best.pt")  # else its score would be taken for none, and it be replaced
    held, lost = saved.newest(folder.checkpoints, config)
    saved.check(held, config)
    _check_index(held, config)
    folder.check_rows()
    if lost:
        _set_aside(held, lost)
    return held.folder


def _set_aside(held: Saved, lost: dict[str, str]) -> None:
    """Take damaged segments out of a checkpoint, by name; what then is missing costs its places when replay is restored."""
    inside, total = held.transitions(lost)
    for name, what in lost.items():
        aside = held.folder / f"damaged-{name}"
        try:
            os.replace(held.folder / name, aside)
            what += f"; it is now called {aside.name}"
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(f"checkpoint {held.folder} cannot be written to: {error.strerror}") from None
        warn(f"apex: checkpoint {held.folder}: {name} {what}")
    warn(
        f"apex: {inside} of {total} replay transitions are lost with it; everything else in {held.folder.name} is used. "
        "If fewer than replay.min_size are left, learning waits until replay has filled up"
    )


def prepare(config: Config, folder: RunFolder, checkpoint: Path) -> None:
    """Make the folder that of a run which is at ``checkpoint``: no result, and no rows of the log from after it."""
    try:
        for name in ("result.json", "error.txt"):
            (folder.path / name).unlink(missing_ok=True)
        folder.cut_rows(Saved(checkpoint, config, 0).values("learner")["record"]["wall_s"])
        folder.write_config(to_toml(config))
        folder.reserve()
        checkpoint_files.remove_leftovers(folder.checkpoints)
    except OSError as error:
        raise ConfigError(f"run {folder.path} cannot be written to: {error.strerror}") from None
    _remove_newer(folder.checkpoints, checkpoint)


def open_and_announce(checkpoint: Path, config: Config, num_actors: int) -> Saved:
    """Say from what the run goes on, and return it."""
    held = Saved(checkpoint, config, num_actors)
    episodes = "every environment goes on where it was" if held.exact else "environments begin new episodes"
    say(f"apex: {checkpoint}: resuming at {held.learner_steps} learner steps; {episodes}")
    return held


def _remove_newer(checkpoints: Path, checkpoint: Path) -> None:
    """Set those aside that were refused: a run that goes on would come upon their names again."""
    for newer in checkpoint_files.whole(checkpoints):
        if checkpoint_files.steps_of(newer) > checkpoint_files.steps_of(checkpoint):
            aside = newer.with_name(f"damaged-{newer.name}")
            with contextlib.suppress(OSError):
                os.replace(newer, aside)
                warn(f"apex: {newer} is now called {aside.name}")


def _check_index(held: Saved, config: Config) -> None:
    """A mass is a power of a priority or, by rank, the priority itself."""
    old, new = held.config["replay"]["index"], config.replay.index
    if held.has_replay and index_class(old).rule != index_class(new).rule:
        raise ConfigError(f"replay.index = '{new}' draws by another rule than '{old}', with which {held.folder} was made; leave it out")
