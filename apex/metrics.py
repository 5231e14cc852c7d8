"""Metrics: what each role counts, and the row of the log made from all of it.

A role reports its counters as one float64 vector of fixed layout. Counters are cumulative and
gauges are the newest value, so a report that is lost or late costs nothing: the next one says it
all. The :class:`Hub` holds the newest report of every rank and turns differences into rates.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

REPORT_FIELDS: dict[str, tuple[str, ...]] = {
    "actor": ("agent_steps", "env_frames", "episodes", "return_sum", "transitions", "wait_s", "env_restarts"),
    "replay": ("inserted", "sampled", "size", "capacity", "stale_updates", "wait_s"),
    "learner": (
        "learner_steps", "wait_s", "loss", "td_error", "q_value", "grad_norm", "staleness", "param_version", "skipped_steps",
        "actors_lost", "actors_replaced",
    ),
    "evaluator": ("evaluations", "eval_return", "eval_episodes", "eval_version", "wait_s", "env_restarts"),
}  # fmt: skip
"""Role -> names in its report, in order. The first of each is cumulative and never decreases."""

MAX_REPORT = max(len(names) for names in REPORT_FIELDS.values())
"""Length of the longest report, in float64 values: the size of a buffer that fits any role's."""

# A measurement that has not been made yet is NaN, not 0: a loss of 0 would be news.
_UNKNOWN_AT_FIRST = {"loss", "td_error", "q_value", "grad_norm", "staleness", "eval_return"}

_LARGEST_COUNT = 2.0**53  # beyond, a float64 no longer counts one by one

# Row key -> (role, ..., report field), summed over the ranks of these roles.
_WHOLE = {
    "learner_steps": ("learner", "learner_steps"),
    "agent_steps": ("actor", "agent_steps"),
    "env_frames": ("actor", "env_frames"),
    "episodes": ("actor", "episodes"),
    "transitions": ("actor", "transitions"),
    "replay_size": ("replay", "size"),
    "stale_updates": ("replay", "stale_updates"),
    "param_version": ("learner", "param_version"),
    "skipped_steps": ("learner", "skipped_steps"),
    "actors_lost": ("learner", "actors_lost"),
    "actors_replaced": ("learner", "actors_replaced"),
    "env_restarts": ("actor", "evaluator", "env_restarts"),
    "eval_episodes": ("evaluator", "eval_episodes"),
    "evaluations": ("evaluator", "evaluations"),
    "eval_version": ("evaluator", "eval_version"),
}
_REAL = {
    "staleness": ("learner", "staleness"),
    "loss": ("learner", "loss"),
    "td_error": ("learner", "td_error"),
    "q_value": ("learner", "q_value"),
    "grad_norm": ("learner", "grad_norm"),
    "eval_return": ("evaluator", "eval_return"),
}
_RATES = {
    "agent_steps_per_s": ("actor", "agent_steps"),
    "transitions_per_s": ("actor", "transitions"),
    "learner_steps_per_s": ("learner", "learner_steps"),
}

ROW_FIELDS = (
    "wall_s", "learner_steps", "agent_steps", "env_frames", "episodes", "transitions", "agent_steps_per_s",
    "transitions_per_s", "learner_steps_per_s", "replay_size", "replay_fill", "samples_per_insert", "stale_updates",
    "staleness", "param_version", "learner_wait_pct", "actor_wait_pct", "loss", "td_error", "q_value",
    "grad_norm", "train_return", "eval_return", "eval_episodes", "evaluations", "eval_version",
    "skipped_steps", "env_restarts", "actors_lost", "actors_replaced",
)  # fmt: skip
"""Keys of a row of the log, in order."""


class Counters:
    """The counters and gauges of one rank. ``role`` is a key of :data:`REPORT_FIELDS`; else KeyError."""

    def __init__(self, role: str):
        self.role = role
        self._values = {name: math.nan if name in _UNKNOWN_AT_FIRST else 0.0 for name in REPORT_FIELDS[role]}

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
        """Go on from ``state_dict``. Raises KeyError for a missing name, TypeError or ValueError for a value that cannot be."""
        values = {name: float(state[name]) for name in self._values}
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
        self._bases = deque([(self._started, self._copy())], maxlen=2)  # time and reports of the last two rows

    def update(self, role: str, index: int, vector: ArrayLike) -> None:
        """Take the report of rank ``index`` of a role: float64, padded at most to MAX_REPORT.

        A report older than the one held (by its first field) is ignored. Raises KeyError for an
        unknown role, IndexError for an unknown rank, ValueError for a wrong length or a value that its field cannot have.
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
        """Take the reports that a run goes on from, role -> vectors by index, and when it would have started.

        Rates are of what comes after.
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
        now, base = self._clock(), self._bases[0 if last else -1]
        values = {"wall_s": _real(now - self._started)}
        values |= {key: _whole(self._sum(*source)) for key, source in _WHOLE.items()}
        values |= {key: _real(self._sum(*source)) for key, source in _REAL.items()}
        values |= self._since(base[1], now - base[0]) | self._ratios()
        self._bases.append((now, self._copy()))
        return {key: values[key] for key in ROW_FIELDS}

    def _copy(self) -> dict[str, np.ndarray]:
        return {role: reports.copy() for role, reports in self._reports.items()}

    def _since(self, base: dict[str, np.ndarray], elapsed_s: float) -> dict:
        """Return what is measured over an interval that began with the reports ``base``."""

        def gain(role: str, name: str) -> np.ndarray:
            return _column(self._reports, role, name) - _column(base, role, name)

        values = {key: _ratio(gain(*source).sum(), elapsed_s) for key, source in _RATES.items()}
        for role in ("learner", "actor"):
            waited = gain(role, "wait_s")
            values[f"{role}_wait_pct"] = _percent(waited.sum(), elapsed_s * len(waited))
        values["train_return"] = _ratio(gain("actor", "return_sum").sum(), gain("actor", "episodes").sum())
        return values

    def _ratios(self) -> dict:
        fill = _ratio(self._sum("replay", "size"), self._sum("replay", "capacity"), otherwise=0.0)
        drawn = _ratio(self._sum("replay", "sampled"), self._sum("replay", "inserted"), otherwise=0.0)
        return {"replay_fill": fill, "samples_per_insert": drawn}

    def _sum(self, *source: str) -> float:
        *roles, name = source
        return float(sum(_column(self._reports, role, name).sum() for role in roles))


def _report(role: str, vector: ArrayLike) -> np.ndarray:
    """Return float64[len(REPORT_FIELDS[role])] from a report that may be padded."""
    report, least = np.asarray(vector, np.float64), len(REPORT_FIELDS[role])
    if report.ndim != 1 or not least <= len(report) <= MAX_REPORT:
        raise ValueError(f"a report of {role} has {least} to {MAX_REPORT} values, got shape {report.shape}")
    return report[:least]


def _check_values(role: str, report: np.ndarray) -> None:
    for name, value in zip(REPORT_FIELDS[role], report.tolist()):
        real = name in _UNKNOWN_AT_FIRST or name == "return_sum"  # a loss is what it is
        if not (real or 0.0 <= value <= _LARGEST_COUNT) or (name == "eval_return" and math.isinf(value)):
            raise ValueError(f"a report of {role} in which {name} is {value:g}")


def _column(reports: dict, role: str, name: str) -> np.ndarray:
    return reports[role][:, REPORT_FIELDS[role].index(name)]


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
