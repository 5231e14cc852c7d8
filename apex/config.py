"""The configuration of a run: frozen dataclasses, one per section, validated once.

A run is configured by the defaults below, then a TOML preset from ``configs/``, then ``--set
section.field=value`` overrides, in that order. Every field carries its unit and one line of doc in
its metadata; ``apex train --help`` prints them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from apex import look, variables
from apex.errors import ConfigError as ConfigError  # what reading a configuration raises
from apex.say import warn

PRESET_DIR = Path(__file__).resolve().parent.parent / "configs"


T = TypeVar("T", int, float, bool, str)


def option(
    default: T,
    doc: str,
    unit: str = "",
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> T:
    """Declare a field with its default, one line of doc, unit and accepted values or range."""
    meta = {"doc": doc, "unit": unit, "choices": choices, "low": low, "high": high}
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True)
class RunConfig:
    """What ends the run, how it is seeded, where it is written."""

    seed: int = option(0, "seed of everything random in the run", low=0)
    transport: str = option("mpi", "how roles exchange messages", choices=("mpi", "zmq", "local"))
    directory: str = option("runs", "folder that run folders are made in")
    max_learner_steps: int = option(
        1_000_000, "end after this many optimiser updates", "learner steps", low=1
    )
    max_wall_s: float = option(0.0, "end after this long; 0: no limit", "s", low=0.0)
    target_return: float = option(
        0.0, "end once a greedy evaluation reaches this mean return (if stop_at_target)", "return"
    )
    stop_at_target: bool = option(False, "end the run at target_return")
    log_period_s: float = option(2.0, "time between two rows of the log", "s", low=0.01)
    watchdog_s: float = option(
        60.0, "report a role that has waited this long, for what, and where each rank is", "s", low=0.1
    )
    meet_s: float = option(
        300.0, "end the job if no further rank has come for this long while they meet", "s", low=1.0
    )
    shutdown_timeout_s: float = option(30.0, "longest wait for messages in flight at the end", "s", low=0.1)
    fault_tolerance: str = option(
        "nobody",
        "whose loss the run survives: actors and evaluator, or nobody's",
        choices=("nobody", "actors"),
    )
    heartbeat_timeout_s: float = option(
        30.0, "an acting process not heard of for this long is lost (run.fault_tolerance)", "s", low=5.0
    )
    max_replacements: int = option(
        10, "times a new process takes one lost actor's place before the run fails", low=0, high=1_000_000
    )
    keep_checkpoints: int = option(
        3, "whole checkpoints that are kept; older ones are removed", "checkpoints", low=1, high=1_000
    )
    checkpoint_s: float = option(300.0, "longest wait at the end for the last checkpoint", "s", low=0.1)


@dataclass(frozen=True)
class EnvConfig:
    """The environment: family, id and, for Atari, the preprocessing."""

    family: str = option("gymnasium", "environment family: a module of apex/envs")
    id: str = option("CartPole-v1", "Gymnasium id, or for family atari the game's ROM name (pong)")
    frame_skip: int = option(4, "emulator frames per agent step (atari)", "env frames", low=1, high=1_000)
    frame_size: int = option(84, "height and width of a frame (atari)", "pixels", low=16, high=1_024)
    stack: int = option(4, "frames in an observation (atari)", "frames", low=1, high=64)
    sticky_actions: float = option(
        0.0, "probability that the last action is repeated (atari)", low=0.0, high=1.0
    )
    noop_max: int = option(
        30, "0 to this many no-op actions, drawn anew at each reset (atari)", "actions", low=0, high=10_000
    )
    clip_rewards: bool = option(
        True, "train on sign-clipped rewards (atari); scores in log and evaluation are full"
    )
    episodic_life: bool = option(
        False, "train with a lost life as an episode's end; the game goes on (atari; not in evaluation)"
    )
    max_restarts: int = option(
        3,
        "times a role may make its environments anew after one has failed",
        "restarts",
        low=0,
        high=1_000_000,
    )
    max_episode_frames: int = option(
        108_000, "cut longer episodes (atari; in evaluation any family)", "env frames", low=1, high=2**31 - 1
    )


@dataclass(frozen=True)
class AlgorithmConfig:
    """The network and the loss."""

    name: str = option("double_dqn", "algorithm: a module of apex/algorithms")
    network: str = option("mlp", "torso of the Q-network", choices=("mlp", "small_cnn", "nature_cnn"))
    hidden: int = option(128, "width of the fully connected layers", "units", low=1, high=65_536)
    dueling: bool = option(True, "separate value and advantage streams (Wang et al. 2016)")
    double: bool = option(True, "online network chooses, target network values (van Hasselt et al. 2016)")
    n_step: int = option(3, "rewards summed in one transition", "agent steps", low=1, high=64)
    discount: float = option(0.99, "gamma, per agent step", low=0.0, high=1.0)


@dataclass(frozen=True)
class ActorConfig:
    """Actors: how many, what they explore with and how they ship transitions."""

    count: int = option(1, "actors started when --ranks does not say", "ranks", low=1, high=100_000)
    envs: int = option(16, "environments stepped together by one actor", "environments", low=1, high=1024)
    intake_batch: int = option(50, "transitions in one intake batch", "transitions", low=1, high=4096)
    in_flight: int = option(
        4, "intake batches an actor may have on the wire to one replay rank", "batches", low=1, high=4_096
    )
    epsilon_base: float = option(
        0.4, "epsilon_i = base^(1 + alpha i/(N-1)) over all N environments", low=0.0, high=1.0
    )
    epsilon_alpha: float = option(7.0, "exponent alpha of the epsilon ladder", low=0.0)
    refresh_period: int = option(
        100, "agent steps of each environment between two requests for weights", "agent steps", low=1
    )
    nice: int = option(
        2,
        "niceness of actors and evaluator where ranks share cores, so that the learner goes first",
        low=0,
        high=19,
    )
    threads: int = option(1, "torch threads of an actor or evaluator", "threads", low=1, high=1_024)


@dataclass(frozen=True)
class ReplayConfig:
    """Replay ranks: size, prioritisation and the rate limiter."""

    ranks: int = option(1, "replay ranks", "ranks", low=1, high=10_000)
    capacity: int = option(100_000, "transitions held by all replay ranks together", "transitions", low=1)
    index: str = option(
        "wide",
        "priority index: wide, wide32, binary, torch, numpy; by rank in place of mass: rank, rank_torch",
    )
    index_device: str = option("cpu", "where torch and rank_torch live: cpu, cuda, cuda:1")
    alpha: float = option(
        0.6, "mass = (priority + eps)^alpha, by rank: rank^-alpha; 0: uniform sampling", low=0.0, high=2.0
    )
    eps: float = option(1e-6, "added to every priority before alpha", low=1e-12)
    min_size: int = option(
        1_000, "transitions (over all replay ranks) before the first sample", "transitions", low=1
    )
    samples_per_insert: float = option(
        0.0, "transitions sampled per transition inserted; 0: not limited", low=0.0
    )
    checkpoint: bool = option(
        True, "checkpoints hold the contents of replay; without, a resumed run starts with none"
    )
    error_buffer: float = option(
        0.1, "how far samples may run ahead of or behind inserts, as a share of min_size", low=0.0
    )


@dataclass(frozen=True)
class LearnerConfig:
    """The learner: optimiser, target network, prefetching, publishing, checkpoints."""

    batch_size: int = option(512, "transitions in one sample batch", "transitions", low=1, high=1_048_576)
    optimizer: str = option("adam", "optimiser", choices=("adam", "rmsprop"))
    learning_rate: float = option(1e-4, "step size", low=1e-12)
    optimizer_eps: float = option(
        1.5e-4, "epsilon: rmsprop adds it to the variance, adam to its root", low=1e-12
    )
    rmsprop_decay: float = option(0.95, "decay of centred RMSProp (rmsprop)", low=0.0, high=0.9999)
    max_grad_norm: float = option(10.0, "global gradient norm is clipped to this", low=1e-12)
    target_period: int = option(
        2_500, "learner steps between copies into the target network", "learner steps", low=1
    )
    beta: float = option(0.4, "exponent of the importance-sampling weights", low=0.0, high=1.0)
    is_normalizer: str = option(
        "global", "weights are divided by the largest in replay, or in the batch", choices=("global", "batch")
    )
    prefetch: int = option(2, "sample batches in flight to the learner", "batches", low=1, high=64)
    publish_period: int = option(
        50, "learner steps between two publishes of the weights", "learner steps", low=1
    )
    max_skipped_steps: int = option(
        10, "steps with a loss or gradient not finite, skipped before the run fails", "learner steps", low=0
    )
    checkpoint_period: int = option(10_000, "learner steps between two checkpoints", "learner steps", low=1)
    threads: int = option(1, "torch threads of the learner", "threads", low=1, high=1_024)
    device: str = option("cpu", "where the learner computes: cpu or cuda")


@dataclass(frozen=True)
class EvaluatorConfig:
    """Greedy evaluation on fixed seeds, at full scores."""

    episodes: int = option(
        20, "episodes in one evaluation, each on its own fixed seed", "episodes", low=1, high=1_024
    )
    period: int = option(
        1_000, "learner steps between the weights of two evaluations", "learner steps", low=1
    )
    epsilon: float = option(0.0, "share of random actions in evaluation", low=0.0, high=1.0)
    seed: int = option(
        1_000_003, "seed of the first evaluation episode; the same in every run", low=0, high=2_147_000_000
    )


@dataclass(frozen=True)
class Config:
    """All sections. Build it with :func:`load`, which validates."""

    run: RunConfig = RunConfig()
    env: EnvConfig = EnvConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    actor: ActorConfig = ActorConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()


def nearest(
    name: object, choices: Iterable[object], renamed: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return ``"did you mean 'x'? (choices: ...)"``, the tail of every refusal by name.

    A name close to an old one (``renamed``: old -> new) leads to the new one; without a close name only the
    choices are listed.
    """
    names = sorted(map(str, choices))
    close = difflib.get_close_matches(str(name), [*names, *renamed], n=1, cutoff=0.4)
    listed = f"choices: {', '.join(names)}"
    return f"did you mean '{renamed.get(close[0], close[0])}'? ({listed})" if close else listed


def fields(section: type) -> dict[str, dataclasses.Field]:
    """Return the fields of a section class by name."""
    return {f.name: f for f in dataclasses.fields(section)}


def sections() -> dict[str, type]:
    """Return section name -> section class, in order."""
    hints = typing.get_type_hints(Config)
    return {f.name: hints[f.name] for f in dataclasses.fields(Config)}


def field_type(section: type, name: str) -> type:
    """Return the plain type (int, float, str, bool) of a field."""
    return typing.get_type_hints(section)[name]


def presets() -> list[str]:
    """Return the names of all presets in ``configs/``."""
    return sorted(p.stem for p in PRESET_DIR.glob("*.toml"))


def load(preset: str, overrides: Iterable[str] = ()) -> Config:
    """Return the validated configuration of a preset (a name or a ``.toml`` path) plus overrides.

    Overrides are ``"section.field=value"``. Raises :class:`ConfigError` with one line that names
    what is wrong and the nearest valid choice.
    """
    tables = [(f"preset '{preset}'", _read_preset(preset))]
    tables += [("--set", _parse_override(text)) for text in overrides]
    return from_tables(tables)


def from_tables(tables: Iterable[tuple[str, Mapping[str, Any]]]) -> Config:
    """Return the configuration of ``(source, {section: {field: value}})`` pairs; later pairs win."""
    merged: dict[str, dict] = {name: {} for name in sections()}
    spelled: dict[tuple[str, str, str], str] = {}
    for source, table in tables:
        for section, values in table.items():
            if section not in merged:
                raise ConfigError(f"{source}: unknown section '{section}'; {nearest(section, merged)}")
            if not isinstance(values, dict):
                raise ConfigError(f"{source}: '{section}' must be a section with fields, got {values!r}")
            for given, value in values.items():
                name = _present_name(source, section, given)
                other = spelled.setdefault((source, section, name), given)
                if other != given:
                    both = f"'{section}.{other}' and '{section}.{given}'"
                    raise ConfigError(f"{source}: {both} are one field; give the new name, {name}, alone")
                merged[section][name] = _checked(source, section, name, value)
    config = Config(**{name: cls(**merged[name]) for name, cls in sections().items()})
    _validate_together(config)
    return config


RENAMED = {
    ("run", "tolerate"): "fault_tolerance", ("run", "silence_s"): "heartbeat_timeout_s",
    ("run", "drain_s"): "shutdown_timeout_s",
    ("replay", "error_band"): "error_buffer",
}  # fmt: skip
"""(section, old name of a field) -> its name. Old names work for one release; one line warns of each."""
_warned_of: set[str] = set()


def _present_name(source: str, section: str, given: str) -> str:
    """Return the present name of a field; warn once of each old name, in the launcher only."""
    name = RENAMED.get((section, given), given)
    if name != given and given not in _warned_of and variables.RUN_FOLDER not in os.environ:
        _warned_of.add(given)
        renamed = f"'{section}.{given}' is now '{section}.{name}'"
        warn(f"apex: {source}: {renamed}; the next release drops the old name")
    return name


def to_tables(config: Config) -> dict[str, dict]:
    """Return the configuration as nested plain dictionaries; ``from_tables`` reverses it."""
    return dataclasses.asdict(config)


def to_toml(config: Config) -> str:
    """Return the resolved configuration as TOML that :func:`load` reads back to an equal one."""
    lines = []
    for section, values in to_tables(config).items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {toml_value(value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def override(config: Config, **dotted: object) -> Config:
    """Return a copy with fields replaced and checked, e.g. ``override(c, run__seed=3)``."""
    table: dict[str, dict[str, object]] = {}
    for key, value in dotted.items():
        section, name = key.split("__", 1)
        table.setdefault(section, {})[name] = value
    return from_tables([("configuration", to_tables(config)), ("override", table)])


def toml_value(value: object) -> str:
    """Return a field's value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # TOML's escapes are JSON's, and this one
    return repr(value)


def _read_preset(preset: str) -> dict:
    is_path = preset.endswith(".toml") or os.sep in preset
    path = Path(preset) if is_path else PRESET_DIR / f"{preset}.toml"
    text = look.read(path)
    if text is None:
        what = (
            f"there is no file '{preset[-80:]}' to take a preset from"
            if is_path
            else f"unknown preset '{preset[:80]}'"
        )
        raise ConfigError(f"{what}; {nearest(preset, presets())}")
    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's errors are ValueErrors
        raise ConfigError(f"preset '{preset}' is not valid TOML: {str(error).splitlines()[0]}") from None


def _parse_override(text: str) -> dict:
    key, equals, raw = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(
            f"--set {text}: write --set section.field=value, for example --set replay.capacity=50000"
        )
    return {section: {name: _Raw(raw.strip())}}


class _Raw(str):
    """A value typed on the command line: still text, to be read as its field's type."""


def _checked(source: str, section: str, name: str, value: object) -> object:
    """Return ``value`` as the field's type, or refuse it by name."""
    cls = sections()[section]
    if name not in fields(cls):
        renamed = {old: new for (place, old), new in RENAMED.items() if place == section}
        raise ConfigError(
            f"{source}: unknown field '{section}.{name}'; {nearest(name, fields(cls), renamed)}"
        )
    kind, where = field_type(cls, name), f"{source}: {section}.{name}"
    converted = _convert(where, value, kind)
    meta = fields(cls)[name].metadata
    if meta["choices"] and converted not in meta["choices"]:
        raise ConfigError(f"{where} = {converted!r} is not a choice; {nearest(converted, meta['choices'])}")
    if isinstance(converted, str) and not _is_plain(converted):
        raise ConfigError(f"{where} = {converted!r} holds characters that no name or path can have")
    if kind in (int, float):
        _check_range(where, converted, meta["low"], meta["high"], meta["unit"])
    return converted


def _shown(value: object) -> str:
    """Return a refused value as it was given, but not a page of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _is_plain(text: str) -> bool:
    """Whether ``text`` can be written as UTF-8 and passed to the system."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


def _convert(where: str, value: object, kind: type) -> Any:
    if isinstance(value, _Raw):
        value = _from_text(where, str(value), kind)
    if kind is float and type(value) is int and abs(value) < 2**1000:  # beyond, float() overflows
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} = {_shown(value)} must be {_KIND_WORDS[kind]}")
    return value


_KIND_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _from_text(where: str, text: str, kind: type) -> str | bool | float:
    if kind is str:
        return text
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        if kind is int:
            return int(text.replace("_", ""))
        if kind is float:
            return float(text)
    except ValueError:
        pass
    raise ConfigError(f"{where} = {_shown(text)} must be {_KIND_WORDS[kind]}")


def _check_range(where: str, value: float, low: float | None, high: float | None, unit: str) -> None:
    if value != value or value in (float("inf"), float("-inf")):
        raise ConfigError(f"{where} = {value} must be finite")
    if low is not None and value < low:
        raise ConfigError(f"{where} = {value} is too small; the least is {low} {unit}".rstrip())
    high = 2**62 if high is None and type(value) is int else high
    if high is not None and value > high:
        raise ConfigError(f"{where} = {value} is too large; the most is {high} {unit}".rstrip())


def _validate_together(config: Config) -> None:
    """Refuse settings that are each valid but cannot work together."""
    if config.run.fault_tolerance == "actors" and config.run.transport == "local":
        raise ConfigError(
            "run.fault_tolerance = 'actors' needs a process for each role, and run.transport = 'local' has "
            "one for all: use mpi or zmq"
        )
    unit = config.actor.intake_batch * config.replay.ranks
    capacity = config.replay.capacity
    if capacity % unit:
        up = -(-capacity // unit) * unit
        raise ConfigError(
            f"replay.capacity = {capacity} must be a multiple of actor.intake_batch x replay.ranks = {unit}; "
            f"the nearest is {up}"
        )
    if config.replay.min_size > capacity:
        raise ConfigError(
            f"replay.min_size = {config.replay.min_size} exceeds replay.capacity = {capacity}: "
            "no batch could ever be sampled"
        )
