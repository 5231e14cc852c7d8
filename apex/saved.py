"""A checkpoint as a run that resumes sees it, and whether this run's configuration can go on from it."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from apex import checkpoint_files, look, part_values
from apex.checkpoint_files import Damaged
from apex.config import Config, ConfigError, EnvConfig, fields, to_tables
from apex.metrics import REPORT_FIELDS, Counters
from apex.say import warn
from apex.state import join
from apex.topology import LEARNER, REPLAY

# What is stored (networks, transitions, masses) was made with these, and cannot go on with others.
_FIXED = {
    "env": tuple(name for name in fields(EnvConfig) if name != "max_restarts"),
    "algorithm": ("name", "network", "hidden", "dueling", "n_step", "discount"),
    "actor": ("intake_batch",),
    "replay": ("alpha", "eps"),
    "learner": ("optimizer",),
}
_OF_REPLAY = (("algorithm", "n_step"), ("algorithm", "discount"), ("actor", "intake_batch"), ("replay", "alpha"), ("replay", "eps"))
# What a run in one process goes on with to the last bit is in buffers of these sizes.
_SIZES = (
    ("run", "transport"), ("actor", "envs"), ("actor", "in_flight"), ("replay", "ranks"), ("replay", "capacity"),
    ("learner", "batch_size"), ("learner", "prefetch"),
)  # fmt: skip


class Saved:
    """A whole checkpoint, for a run of ``config``. Methods raise :class:`Damaged` where it cannot be read.

    ``exact``: the run goes on to the last bit, in one process as before and with buffers as before.
    """

    def __init__(self, folder: Path, config: Config, num_actors: int):
        self.folder = Path(folder)
        self.manifest = checkpoint_files.read_manifest(self.folder)
        self.config: dict[str, dict] = self.manifest["config"]
        self._check_config()
        self.learner_steps: int = self.manifest["learner_steps"]
        self.replay_ranks: int = self.manifest["replay_ranks"]
        self.exact = self._is_exact(to_tables(config), num_actors)

    @property
    def has_replay(self) -> bool:
        """Whether it holds the contents of replay."""
        return self.config["replay"]["checkpoint"]

    def values(self, name: str) -> dict:
        """Return the plain values of a part, each of the kind that :mod:`apex.part_values` tells."""
        text = look.read(self.folder / f"{name}.json")
        try:
            values = json.loads(text or b"")["values"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Damaged(f"checkpoint {self.folder}: {name}.json cannot be read: {type(error).__name__}") from None
        wrong = part_values.fault(name.partition("-")[0], values, self.has_replay)
        if wrong is not None:
            raise Damaged(f"checkpoint {self.folder}: {name}.json has no usable '{wrong}'")
        return values

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the arrays of a part."""
        text = look.read(self.folder / f"{name}.npz")
        try:
            with np.load(io.BytesIO(text or b""), allow_pickle=False) as file:
                return {key: file[key] for key in file.files}
        except Exception as error:
            raise Damaged(f"checkpoint {self.folder}: {name}.npz cannot be read: {type(error).__name__}") from None

    def state(self, name: str) -> dict:
        """Return the state that a part holds, arrays included."""
        return join(self.values(name), self.arrays(name) if f"{name}.npz" in self.manifest["files"] else {})

    def ring(self, index: int) -> tuple[dict, dict[str, np.ndarray]]:
        """Return values and arrays of a replay rank, which fit each other."""
        name = f"replay-{index}"
        values, arrays = self.values(name), self.arrays(name)
        wrong = part_values.fault_of_arrays(values, arrays)
        if wrong is not None:
            raise Damaged(f"checkpoint {self.folder}: {name}.npz has no usable '{wrong}'")
        return values, arrays

    @contextlib.contextmanager
    def reading(self, part: str) -> Iterator[None]:
        """Refuse, as :class:`Damaged`, a part whose contents cannot be put to use by what runs in this context."""
        try:
            yield
        except ConfigError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, AssertionError) as error:
            why = (str(error).splitlines() or [""])[0]
            raise Damaged(f"checkpoint {self.folder}: {part} does not fit this run: {type(error).__name__}: {why}") from error

    def check_parts(self) -> None:
        """Raise :class:`Damaged` for a part that every run reads and whose values are not of this program."""
        self.values("learner")
        for index in range(self.replay_ranks):
            self.ring(index) if self.has_replay else self.values(f"replay-{index}")

    def _check_config(self) -> None:
        """Raise :class:`Damaged` where the configuration lacks what is compared with that of the run."""
        needed = (*_SIZES, ("replay", "checkpoint"), ("replay", "index"), *((section, None) for section in _FIXED))
        for section, name in needed:
            if section not in self.config or (name is not None and name not in self.config[section]):
                raise Damaged(f"checkpoint {self.folder}: the configuration in manifest.json lacks '{name or section}'")

    def segments_of(self, index: int) -> dict[str, tuple[str, int, str]]:
        """Return the segments of a replay rank: number in decimal -> file name, size, SHA-256."""
        return self.values(f"replay-{index}").get("segments", {})

    def transitions(self, files: Iterable[str]) -> tuple[int, int]:
        """Return how many of the stored transitions lie in segments called ``files``, and how many there are."""
        inside = total = 0
        for index in range(self.replay_ranks):
            values, arrays = self.ring(index)
            numbers = [int(number) for number, (name, *_) in values["segments"].items() if name in files]
            inside += int(arrays["count"][np.isin(arrays["segment"], numbers)].sum())
            total += int(arrays["count"].sum())
        return inside, total

    def answers(self, role: str) -> dict[int, dict]:
        """Return the states that the ranks of a role that write no files acknowledged with, by role index."""
        return {int(index): state for index, state in self.values(LEARNER)["answers"].get(role, {}).items()}

    def counters(self, role: str, index: int, ranks: int) -> dict[str, float]:
        """Return the counters that rank ``index`` of now ``ranks`` ranks of a role goes on from; their sums stay."""
        if role == REPLAY:
            held = [self.values(f"{REPLAY}-{old}")["counters"] for old in range(self.replay_ranks)]
            return {name: float(shared_out([old[name] for old in held], ranks, index)) for name in REPORT_FIELDS[REPLAY]}
        mine = [state["counters"] for old, state in sorted(self.answers(role).items()) if old % ranks == index]
        if not mine:
            return Counters(role).state_dict()
        return {name: float(sum(counters[name] for counters in mine)) for name in REPORT_FIELDS[role]}

    def _is_exact(self, now: dict[str, dict], num_actors: int) -> bool:
        same = all(now[section][name] == self.config[section][name] for section, name in _SIZES)
        return same and now["run"]["transport"] == "local" and num_actors == self.manifest["num_actors"] and self.has_replay


def newest(checkpoints: Path, config: Config) -> tuple[Saved, dict[str, str]]:
    """Return the newest checkpoint that can be used, and what is wrong with each of its segments that are lost.

    A segment costs its own places. One with anything else damaged is named and passed over. Raises
    :class:`ConfigError` where none is left, and where one cannot be looked at.
    """
    for folder in checkpoint_files.whole(checkpoints):
        try:
            _, wrong = checkpoint_files.examine(folder)
            held = Saved(folder, config, 0)
            _refuse_all_but_segments(held, wrong)
            held.check_parts()
            return held, wrong
        except Damaged as damaged:
            warn(f"apex: {damaged}; it is passed over")
    raise ConfigError(f"there is no whole checkpoint in {checkpoints} to resume from; without --resume a new run begins")


def _refuse_all_but_segments(held: Saved, wrong: dict[str, str]) -> None:
    """Raise :class:`Damaged` for a file that holds anything but places of replay: the parts that list those come first."""
    listed = {name for name in wrong if name.endswith(".bin")}
    others = [name for name in wrong if name not in listed]
    if not others and wrong and held.has_replay:
        segments = {file[0] for index in range(held.replay_ranks) for file in held.segments_of(index).values()}
        others = [name for name in wrong if name not in segments]
    elif not others:
        others = list(wrong)
    for name in others:
        raise Damaged(f"checkpoint {held.folder}: {name} {wrong[name]}")


def check(saved: Saved, config: Config) -> None:
    """Raise :class:`ConfigError`, naming the field, where a run of ``config`` cannot go on from ``saved``."""
    now = to_tables(config)
    for section, names in _FIXED.items():
        for name in names or now[section]:
            held = saved.config[section].get(name, now[section][name])
            free = not saved.has_replay and (section, name) in _OF_REPLAY
            if now[section][name] != held and not free:
                raise ConfigError(
                    f"{section}.{name} = {now[section][name]!r} cannot go on from {saved.folder}, made with {held!r}; leave it out"
                )
    _check_capacity(saved, config)
    _check_limits(saved, config)


def _check_limits(saved: Saved, config: Config) -> None:
    """Refuse to go on where a limit of the run has been reached: it would end at once."""
    run, record = config.run, saved.values("learner")["record"]
    if saved.learner_steps >= run.max_learner_steps:
        raise ConfigError(
            f"run.max_learner_steps = {run.max_learner_steps} has been reached at {saved.folder}; "
            f"raise it, for example --set run.max_learner_steps={2 * saved.learner_steps}"
        )
    if run.max_wall_s and record["wall_s"] >= run.max_wall_s:
        raise ConfigError(
            f"run.max_wall_s = {run.max_wall_s:g} has been reached at {saved.folder}, after {record['wall_s']:.0f} s; "
            f"raise it, for example --set run.max_wall_s={math.ceil(2 * record['wall_s'])}"
        )
    if run.stop_at_target and record["eval_return"] >= run.target_return:
        raise ConfigError(
            f"run.target_return = {run.target_return:g} has been reached at {saved.folder}, with {record['eval_return']:g}; "
            "raise it, or do not stop there: --set run.stop_at_target=false"
        )


def _check_capacity(saved: Saved, config: Config) -> None:
    batches = sum(saved.values(f"replay-{index}")["places"] for index in range(saved.replay_ranks)) if saved.has_replay else 0
    least = batches * config.actor.intake_batch
    if config.replay.capacity < least:
        raise ConfigError(
            f"replay.capacity = {config.replay.capacity} is below the contents of {saved.folder}: "
            f"{batches} intake batches, for which the least is {least}"
        )


def shared_out(values: list[int], ranks: int, rank: int) -> int:
    """Return a rank's part of a sum of counts: of the same number of ranks its own, else an equal share."""
    if len(values) == ranks:
        return values[rank]
    total = sum(values)
    return total // ranks + (total % ranks if rank == 0 else 0)
