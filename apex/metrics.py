"""Metrics: one table of them, the counters that roles report, and the rows of the log.

A role reports its counters as one float64 vector of fixed layout. Counters are cumulative and gauges
are the newest value, so the next report makes up for a lost or late one. The :class:`Hub` holds the
newest report of every rank and turns differences into rates.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from apex import refusals

_LARGEST_COUNT = 2.0**53  # beyond, a float64 no longer counts one by one


class How(Enum):
    """How a row computes its value from fields of reports, each summed over all ranks."""

    TIME = "seconds since the run started"
    COUNT = "the newest value, a whole number"
    GAUGE = "the newest value, a real number; NaN until it is measured"
    RATE = "the gain since the previous row, per second"
    SHARE = "the gain since the previous row, in percent of the time of all ranks"
    QUOTIENT = "the newest values of two fields, divided; 0 where the second is 0"
    MEAN = "the gains of two fields since the previous row, divided"


class Metric(NamedTuple):
    """One line of the table of metrics."""

    tag: str
    """TensorBoard tag."""
    how: How
    sources: tuple[str, ...] = ()
    """``"role.field"`` of the reports that its value is computed from."""


def _metric(tag: str, how: How, *sources: str) -> Metric:
    return Metric(tag, how, sources)


METRICS: dict[str, Metric] = {
    "wall_s": _metric("run/wall_s", How.TIME),
    "learner_steps": _metric("learner/learner_steps", How.COUNT, "learner.learner_steps"),
    "agent_steps": _metric("actor/agent_steps", How.COUNT, "actor.agent_steps"),
    "env_frames": _metric("actor/env_frames", How.COUNT, "actor.env_frames"),
    "episodes": _metric("actor/episodes", How.COUNT, "actor.episodes"),
    "transitions": _metric("actor/transitions", How.COUNT, "actor.transitions"),
    "agent_steps_per_s": _metric("actor/agent_steps_per_s", How.RATE, "actor.agent_steps"),
    "transitions_per_s": _metric("actor/transitions_per_s", How.RATE, "actor.transitions"),
    "learner_steps_per_s": _metric("learner/learner_steps_per_s", How.RATE, "learner.learner_steps"),
    "replay_size": _metric("replay/size", How.COUNT, "replay.size"),
    "replay_fill": _metric("replay/fill", How.QUOTIENT, "replay.size", "replay.capacity"),
    "samples_per_insert": _metric(
        "replay/samples_per_insert", How.QUOTIENT, "replay.sampled", "replay.inserted"
    ),
    "stale_updates": _metric("replay/stale_updates", How.COUNT, "replay.stale_updates"),
    "staleness": _metric("learner/staleness", How.GAUGE, "learner.staleness"),
    "param_version": _metric("learner/param_version", How.COUNT, "learner.param_version"),
    "learner_wait_pct": _metric("learner/wait_pct", How.SHARE, "learner.wait_s"),
    "actor_wait_pct": _metric("actor/wait_pct", How.SHARE, "actor.wait_s"),
    "loss": _metric("learner/loss", How.GAUGE, "learner.loss"),
    "td_error": _metric("learner/td_error", How.GAUGE, "learner.td_error"),
    "q_value": _metric("learner/q_value", How.GAUGE, "learner.q_value"),
    "grad_norm": _metric("learner/grad_norm", How.GAUGE, "learner.grad_norm"),
    "train_return": _metric("actor/train_return", How.MEAN, "actor.return_sum", "actor.episodes"),
    "eval_return": _metric("evaluator/eval_return", How.GAUGE, "evaluator.eval_return"),
    "eval_episodes": _metric("evaluator/eval_episodes", How.COUNT, "evaluator.eval_episodes"),
    "evaluations": _metric("evaluator/evaluations", How.COUNT, "evaluator.evaluations"),
    "eval_version": _metric("evaluator/eval_version", How.COUNT, "evaluator.eval_version"),
    "skipped_steps": _metric("learner/skipped_steps", How.COUNT, "learner.skipped_steps"),
    "env_restarts": _metric("run/env_restarts", How.COUNT, "actor.env_restarts", "evaluator.env_restarts"),
    "actors_lost": _metric("actor/actors_lost", How.COUNT, "learner.actors_lost"),
    "actors_replaced": _metric("actor/actors_replaced", How.COUNT, "learner.actors_replaced"),
}
"""Key of a row of the log -> its metric. A new metric needs an entry here, and the role that counts it."""

# Role -> first field of its report, which shows which of two reports is newer. All ranks also report wait_s.
_AGE = {"actor": "agent_steps", "replay": "inserted", "learner": "learner_steps", "evaluator": "evaluations"}

for _kind in refusals.KINDS:
    _name = f"refused_{_kind}"
    METRICS[_name] = _metric(f"run/{_name}", How.COUNT, *(f"{role}.{_name}" for role in _AGE))

ROW_FIELDS = tuple(METRICS)
"""Keys of a row of the log, in order."""


def _fields(role: str) -> tuple[str, ...]:
    sources = [source.split(".") for metric in METRICS.values() for source in metric.sources]
    return tuple(dict.fromkeys([_AGE[role], "wait_s", *(name for owner, name in sources if owner == role)]))


REPORT_FIELDS: dict[str, tuple[str, ...]] = {role: _fields(role) for role in _AGE}
"""Role -> names in its report, in order. The first of each is cumulative and never decreases."""

MAX_REPORT = max(len(names) for names in REPORT_FIELDS.values())
"""Length of the longest report, in float64 values: the size of a buffer that fits any role's."""

# NaN, not 0, until they are measured: a loss of 0 would be news.
_GAUGES = {metric.sources[0].split(".")[1] for metric in METRICS.values() if metric.how is How.GAUGE}


class Counters:
    """The counters and gauges of one rank. ``role`` is a key of :data:`REPORT_FIELDS`; else KeyError."""

    def __init__(self, role: str):
        self.role = role
        self._values = {name: math.nan if name in _GAUGES else 0.0 for name in REPORT_FIELDS[role]}

    def __getitem__(self, name: str) -> float:
        """Return one value. Raises KeyError for a name this role does not report."""
        return self._values[name]

    def add(self, name: str, amount: float = 1.0) -> None:
        """Add to a cumulative counter. Raises KeyError for a name this role does not report."""
        self._values[name] += float(amount)

    def set(self, name: str, value: float) -> None:
        """Replace a value: a gauge, or a count kept elsewhere. Raises KeyError for an unknown name."""
        if name not in self._values:
            raise KeyError(name)
        self._values[name] = float(value)

    def vector(self) -> np.ndarray:
        """Return a fresh float64[len(REPORT_FIELDS[role])]: the report."""
        return np.fromiter(self._values.values(), np.float64, len(self._values))

    def state_dict(self) -> dict[str, float]:
        """Return name -> value."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore ``state_dict``; raises KeyError for a missing name, TypeError or ValueError for a value."""
        refused = {
            name: 0.0 for name in self._values if name.startswith("refused_")
        }  # not in older checkpoints
        values = {name: float((refused | state)[name]) for name in self._values}
        _check_values(self.role, np.array(list(values.values())))
        self._values = values

    @classmethod
    def from_vector(cls, role: str, vector: ArrayLike) -> Counters:
        """Return the counters a report holds; anything after the role's own fields is padding.

        Raises KeyError for an unknown role and ValueError for a vector too short for it.
        """
        counters = cls(role)
        counters._values = dict(zip(REPORT_FIELDS[role], _report(role, vector).tolist()))
        return counters


class Hub:
    """The newest report of every rank, and the rows of the log made from them.

    Time runs from construction.
    """

    def __init__(self, num_actors: int, num_replay: int, clock: Callable[[], float] = time.monotonic):
        counts = {"actor": num_actors, "replay": num_replay, "learner": 1, "evaluator": 1}
        self._reports = {role: np.tile(Counters(role).vector(), (n, 1)) for role, n in counts.items()}
        self._clock = clock
        self._started = clock()
        self._bases = deque([(self._started, self._copy())], maxlen=2)  # of the last two rows

    def update(self, role: str, index: int, vector: ArrayLike) -> None:
        """Take the report of rank ``index`` of a role: float64, padded at most to MAX_REPORT.

        A report older than the one held (by its first field) is ignored. Raises KeyError for an unknown
        role, IndexError for an unknown rank, ValueError for a wrong length or an impossible value.
        """
        report, held = _report(role, vector), self._reports[role]
        _check_values(role, report)
        if not 0 <= index < len(held):
            raise IndexError(f"{role} {index} reported, but there are {len(held)}")
        if not report[0] < held[index, 0]:
            held[index] = report

    def reports(self, role: str) -> np.ndarray:
        """Return the newest report of every rank of a role, float64[ranks, fields]."""
        return self._reports[role].copy()

    def start_from(self, reports: dict[str, list[np.ndarray]], started: float) -> None:
        """Take the reports that a run resumes from, role -> vectors by index, and its start on the clock.

        Rates count from now.
        """
        for role, vectors in reports.items():
            for index, vector in enumerate(vectors):
                self.update(role, index, vector)
        self._bases = deque([(self._clock(), self._copy())], maxlen=2)
        self._started = started

    def row(self, last: bool = False) -> dict:
        """Return the next row: :data:`ROW_FIELDS` -> int, float, or None where not known.

        train_return is the mean full score of whole training games: neither clipped nor by lives.
        Rates, waits (percent, 0 to 100) and train_return cover the time since the previous row; in the
        ``last`` row since the one before, as it may come any moment after the previous.
        """
        now, (then, base) = self._clock(), self._bases[0 if last else -1]
        row = {key: self._value(metric, base, now, now - then) for key, metric in METRICS.items()}
        self._bases.append((now, self._copy()))
        return row

    def _copy(self) -> dict[str, np.ndarray]:
        return {role: reports.copy() for role, reports in self._reports.items()}

    def _value(
        self, metric: Metric, base: dict[str, np.ndarray], now: float, elapsed_s: float
    ) -> float | None:
        """Return the value of a metric for a row, over an interval that began with the reports ``base``."""
        sums = [_sum(self._reports, source) for source in metric.sources]
        match metric.how:
            case How.TIME:
                return _real(now - self._started)
            case How.COUNT:
                return _whole(sum(sums))
            case How.GAUGE:
                return _real(sum(sums))
            case How.QUOTIENT:
                return _ratio(sums[0], sums[1], otherwise=0.0)
        gains = [total - _sum(base, source) for total, source in zip(sums, metric.sources)]
        match metric.how:
            case How.RATE:
                return _ratio(gains[0], elapsed_s)
            case How.SHARE:
                return _percent(gains[0], elapsed_s * len(base[metric.sources[0].partition(".")[0]]))
            case _:
                return _ratio(gains[0], gains[1])


def _report(role: str, vector: ArrayLike) -> np.ndarray:
    """Return float64[len(REPORT_FIELDS[role])] from a report that may be padded."""
    report, least = np.asarray(vector, np.float64), len(REPORT_FIELDS[role])
    if report.ndim != 1 or not least <= len(report) <= MAX_REPORT:
        raise ValueError(f"a report of {role} has {least} to {MAX_REPORT} values, got shape {report.shape}")
    return report[:least]


def _check_values(role: str, report: np.ndarray) -> None:
    for name, value in zip(REPORT_FIELDS[role], report.tolist()):
        real = name in _GAUGES or name == "return_sum"  # a loss is what it is
        if not (real or 0.0 <= value <= _LARGEST_COUNT) or (name == "eval_return" and math.isinf(value)):
            raise ValueError(f"a report of {role} in which {name} is {value:g}")


def _sum(reports: dict[str, np.ndarray], source: str) -> float:
    role, _, name = source.partition(".")
    return float(reports[role][:, REPORT_FIELDS[role].index(name)].sum())


def _real(value: float) -> float | None:
    """Return a plain float; None for NaN and infinities, which JSON cannot hold."""
    return float(value) if math.isfinite(value) else None


def _whole(value: float) -> int | None:
    return round(value) if math.isfinite(value) else None


def _ratio(part: float, whole: float, otherwise: float | None = None) -> float | None:
    return _real(part / whole) if whole > 0 else otherwise


def _percent(part: float, whole: float) -> float | None:
    share = _ratio(part, whole)
    # Reports and rows are not in step, so a late report may bring more waiting than fits in this interval.
    return None if share is None else min(100.0 * share, 100.0)
