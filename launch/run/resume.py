"""`apex train --resume RUN`: with which configuration, from which checkpoint, in which folder."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from apex import checkpoint as checkpoint_format
from apex import config as configuration
from apex import look, run_folder
from apex.checkpoint import Corrupt, Reader
from apex.config import Config, ConfigError, EnvConfig, fields, to_tables, to_toml
from apex.run_folder import RunFolder
from apex.say import say, warn
from apex.state import require
from apex.topology import LEARNER, REPLAY
from replay_rank import persistence
from replay_rank.index import index_class

# What is stored (networks, transitions, masses) was made with these, and cannot go on with others.
_FIXED = {
    "env": tuple(name for name in fields(EnvConfig) if name != "max_restarts"),
    "algorithm": ("name", "network", "hidden", "dueling", "n_step", "discount"),
    "actor": ("intake_batch",),
    "replay": ("alpha", "eps"),
    "learner": ("optimizer",),
}
_OF_REPLAY = (
    ("algorithm", "n_step"), ("algorithm", "discount"), ("actor", "intake_batch"),
    ("replay", "alpha"), ("replay", "eps"),
)  # fmt: skip


def configure(run: str, preset: str | None, overrides: list[str]) -> tuple[Config, RunFolder]:
    """Return a run's configuration with overrides, and its folder. A preset must name its environment."""
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
            both = f"run {folder.path} trains {held.id}, preset '{preset}' trains {asked.id}"
            raise ConfigError(f"{both}; leave the preset out")
    return config, folder


def choose(config: Config, folder: RunFolder) -> Path:
    """Return the newest usable checkpoint, or raise :class:`ConfigError` where ``config`` cannot resume."""
    look.read(folder.checkpoints / "best.pt")  # else its score would be taken for none, and it be replaced
    held, lost = newest(folder.checkpoints, config)
    _check_config(held, config)
    _check_index(held, config)
    folder.check_rows()
    if lost:
        _set_aside(held, lost)
    return held.folder


def _set_aside(held: Reader, lost: dict[str, str]) -> None:
    """Rename damaged segments of a checkpoint; replay then goes on without their places."""
    inside, total = persistence.count_transitions(held, lost)
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
        f"apex: {inside} of {total} replay transitions are lost with it; "
        f"the rest of {held.folder.name} is used. With fewer than replay.min_size, learning waits for intake"
    )


def prepare(config: Config, folder: RunFolder, checkpoint: Path) -> None:
    """Bring the folder to the moment of ``checkpoint``: no result, and no later rows of the log."""
    try:
        for name in ("result.json", "error.txt"):
            (folder.path / name).unlink(missing_ok=True)
        folder.cut_rows(Reader(checkpoint, config, 0).values(LEARNER)["run_log"]["wall_s"])
        folder.write_config(to_toml(config))
        folder.reserve()
        checkpoint_format.remove_leftovers(folder.checkpoints)
    except OSError as error:
        raise ConfigError(f"run {folder.path} cannot be written to: {error.strerror}") from None
    _remove_newer(folder.checkpoints, checkpoint)


def open_and_announce(checkpoint: Path, config: Config, num_actors: int) -> Reader:
    """Say from what the run goes on, and return it."""
    held = Reader(checkpoint, config, num_actors)
    episodes = "every environment goes on where it was" if held.exact else "environments begin new episodes"
    say(f"apex: {checkpoint}: resuming at {held.learner_steps} learner steps; {episodes}")
    return held


def _remove_newer(checkpoints: Path, checkpoint: Path) -> None:
    """Set those aside that were refused: a run that goes on would come upon their names again."""
    for newer in checkpoint_format.complete(checkpoints):
        if checkpoint_format.steps_of(newer) > checkpoint_format.steps_of(checkpoint):
            aside = newer.with_name(f"damaged-{newer.name}")
            with contextlib.suppress(OSError):
                os.replace(newer, aside)
                warn(f"apex: {newer} is now called {aside.name}")


def _check_index(held: Reader, config: Config) -> None:
    """A mass is a power of a priority or, by rank, the priority itself."""
    old, new = held.config["replay"]["index"], config.replay.index
    if held.has_replay and index_class(old).rule != index_class(new).rule:
        rules = f"replay.index = '{new}' draws by another rule than '{old}'"
        raise ConfigError(f"{rules}, with which {held.folder} was made; leave it out")


def newest(checkpoints: Path, config: Config) -> tuple[Reader, dict[str, str]]:
    """Return the newest usable checkpoint, and segment -> what is wrong with it.

    A damaged segment costs its own places. A checkpoint with other damage is named and passed over. Raises
    :class:`ConfigError` where none is left, and where one cannot be read.
    """
    for folder in checkpoint_format.complete(checkpoints):
        try:
            _, wrong = checkpoint_format.examine(folder)
            held = Reader(folder, config, 0)
            _refuse_all_but_segments(held, wrong)
            _check_parts(held)
            return held, wrong
        except Corrupt as damaged:
            warn(f"apex: {damaged}; it is passed over")
    what = f"there is no whole checkpoint in {checkpoints} to resume from"
    raise ConfigError(f"{what}; without --resume a new run begins")


def _check_parts(held: Reader) -> None:
    """Raise :class:`Corrupt` for a part that every run reads and whose values are not of this program."""
    from learner import learner  # imports torch, which only the process that begins a run needs here

    for section in _FIXED:
        held.require_field(section)
    held.require_field("replay", "index")
    with held.reading(f"{LEARNER}.json"):
        require(held.values(LEARNER), learner.STATE)
    for index in range(held.replay_ranks):
        persistence.read_part(held, index)


def _refuse_all_but_segments(held: Reader, wrong: dict[str, str]) -> None:
    """Raise :class:`Corrupt` for a wrong file that is no segment; the parts that list segments come first."""
    listed = {name for name in wrong if name.endswith(".bin")}
    others = [name for name in wrong if name not in listed]
    if not others and wrong and held.has_replay:
        segments = persistence.segment_files(held)
        others = [name for name in wrong if name not in segments]
    elif not others:
        others = list(wrong)
    for name in others:
        raise Corrupt(f"checkpoint {held.folder}: {name} {wrong[name]}")


def _check_config(held: Reader, config: Config) -> None:
    """Raise :class:`ConfigError`, naming the field, where a run of ``config`` cannot go on from ``held``."""
    now = to_tables(config)
    for section, names in _FIXED.items():
        for name in names or now[section]:
            before = held.config[section].get(name, now[section][name])
            free = not held.has_replay and (section, name) in _OF_REPLAY
            if now[section][name] != before and not free:
                what = f"{section}.{name} = {now[section][name]!r} cannot go on from {held.folder}"
                raise ConfigError(f"{what}, made with {before!r}; leave it out")
    _check_capacity(held, config)
    _check_limits(held, config)


def _check_limits(held: Reader, config: Config) -> None:
    """Refuse to go on where a limit of the run has been reached: it would end at once."""
    run, log = config.run, held.values(LEARNER)["run_log"]
    if held.learner_steps >= run.max_learner_steps:
        raise ConfigError(
            f"run.max_learner_steps = {run.max_learner_steps} has been reached at {held.folder}; "
            f"raise it, for example --set run.max_learner_steps={2 * held.learner_steps}"
        )
    if run.max_wall_s and log["wall_s"] >= run.max_wall_s:
        raise ConfigError(
            f"run.max_wall_s = {run.max_wall_s:g} has been reached at {held.folder}, "
            f"after {log['wall_s']:.0f} s; "
            f"raise it, for example --set run.max_wall_s={math.ceil(2 * log['wall_s'])}"
        )
    if run.stop_at_target and log["eval_return"] >= run.target_return:
        raise ConfigError(
            f"run.target_return = {run.target_return:g} has been reached at {held.folder}, "
            f"with {log['eval_return']:g}; raise it, or do not stop there: --set run.stop_at_target=false"
        )


def _check_capacity(held: Reader, config: Config) -> None:
    ranks = range(held.replay_ranks) if held.has_replay else ()
    batches = sum(held.values(f"{REPLAY}-{index}")["places"] for index in ranks)
    least = batches * config.actor.intake_batch
    if config.replay.capacity < least:
        raise ConfigError(
            f"replay.capacity = {config.replay.capacity} is below the contents of {held.folder}: "
            f"{batches} intake batches, for which the least is {least}"
        )
