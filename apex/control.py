"""What the learner tells a rank beside data, and what the rank replies.

These are checkpoint requests, epsilon assignments and the end of intake. Each travels as int64[WORDS]. Only
``pack`` and ``unpack`` know how the state in a reply lies in its words.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apex.metrics import MAX_REPORT, REPORT_FIELDS
from apex.ports import WORDS
from apex.topology import ACTOR, EVALUATOR

_NO_MORE_INTAKE, _ASSIGNMENT = -2, -1  # in place of a checkpoint's number


class CheckpointRequest(NamedTuple):
    """A rank is to write its part of checkpoint ``number`` of this run's process, at ``learner_steps``.

    ``base`` is the number of the newest complete one, on which it builds; 0 is the one resumed from.
    """

    number: int
    learner_steps: int
    base: int

    def words(self) -> np.ndarray:
        """Return the request as it travels, int64[WORDS]."""
        return _words(self)

    @classmethod
    def of(cls, words: np.ndarray) -> CheckpointRequest:
        """Return the request in ``words``; raises ValueError where they hold none."""
        request = cls(*words[:3].tolist())
        if not 0 <= request.base < request.number or request.learner_steps < 0 or words[3:].any():
            number, steps, base = request
            raise ValueError(f"a request of checkpoint {number} at step {steps} on {base}")
        return request

    def partial(self, checkpoints: Path) -> Path:
        """Return the folder that it is written into."""
        return checkpoints / f".{self.name}-{self.number}.partial"

    @property
    def name(self) -> str:
        """Return the name of the folder once it is complete."""
        return f"step-{self.learner_steps:09d}"


class CheckpointAck(NamedTuple):
    """A rank's part is written. ``error`` is 0, or the error number of what went wrong.

    ``state`` is what a rank that writes no file goes on from (see :func:`pack`).
    """

    number: int
    error: int
    state: dict

    def words(self, role: str) -> np.ndarray:
        """Return the acknowledgement of a ``role`` as it travels, int64[WORDS]."""
        return _words([self.number, self.error, *pack(role, self.state).tolist()])

    @classmethod
    def of(cls, role: str, words: np.ndarray) -> CheckpointAck:
        """Return the acknowledgement in ``words``."""
        return cls(int(words[0]), int(words[1]), unpack(role, words[2:]))


class EpsilonAssignment(NamedTuple):
    """An actor explores from now on as number ``position`` of ``total`` actors."""

    position: int
    total: int

    def words(self) -> np.ndarray:
        """Return the assignment as it travels, int64[WORDS]."""
        return _words([_ASSIGNMENT, *self])

    @classmethod
    def of(cls, words: np.ndarray) -> EpsilonAssignment | None:
        """Return the assignment in ``words``, or None where they hold something else."""
        return cls(*words[1:3].tolist()) if words[0] == _ASSIGNMENT and 0 <= words[1] < words[2] else None

    @staticmethod
    def ack() -> np.ndarray:
        """Return the reply of an actor that has taken it, int64[WORDS]."""
        return _words([_ASSIGNMENT])


def no_more_intake() -> np.ndarray:
    """Return what the learner tells a replay rank once all actors have finished, int64[WORDS]."""
    return _words([_NO_MORE_INTAKE])


def is_no_more_intake(words: np.ndarray) -> bool:
    """Whether ``words`` are those of :func:`no_more_intake`."""
    return bool(words[0] == _NO_MORE_INTAKE and not words[1:].any())


# What the state of each role's acknowledgement holds, in the order of its words.
_STATE = {ACTOR: ("counters", "rng"), EVALUATOR: ("counters", "next_steps", "best_return")}
_RNG = ("state", "inc")
_LOW = (1 << 64) - 1


def pack(role: str, state: dict) -> np.ndarray:
    """Return a state of a ``role`` as int64[n].

    An actor's state holds ``counters`` (name -> float) and ``rng`` (see :mod:`apex.seeds`). The evaluator's
    holds ``counters``, ``next_steps`` (int) and ``best_return`` (float). That of other roles is empty.
    """
    words: list[int] = []
    for name in _STATE.get(role, ()):
        held = state[name]
        if name == "counters":
            counters = [held[field] for field in REPORT_FIELDS[role]]
            words += _bits(counters + [0.0] * (MAX_REPORT - len(counters)))
        elif name == "rng":
            unsigned = [word for part in _RNG for word in divmod(held[part], 1 << 64)]
            unsigned += [held["has_uint32"], held["uinteger"]]
            words += np.array(unsigned, np.uint64).view(np.int64).tolist()
        else:
            words += _bits([held]) if isinstance(held, float) else [held]
    return np.array(words, np.int64)


def unpack(role: str, words: np.ndarray) -> dict:
    """Return the state that :func:`pack` has packed; of other words, any state."""
    state: dict = {}
    layout = _STATE.get(role, ())
    if "counters" in layout:
        state["counters"] = dict(zip(REPORT_FIELDS[role], words[:MAX_REPORT].view(np.float64).tolist()))
    rest = words[MAX_REPORT:]
    if "rng" in layout:
        high, low, inc_high, inc_low, has_uint32, uinteger = (word & _LOW for word in rest[:6].tolist())
        state["rng"] = {"state": high << 64 | low, "inc": inc_high << 64 | inc_low}
        state["rng"] |= {"has_uint32": has_uint32, "uinteger": uinteger}
    if "next_steps" in layout:
        state |= {"next_steps": int(rest[0]), "best_return": float(rest[1:2].view(np.float64)[0])}
    return state


def _bits(numbers: Sequence[float]) -> list[int]:
    return np.array(numbers, np.float64).view(np.int64).tolist()


def _words(values: Sequence[int]) -> np.ndarray:
    words = np.zeros(WORDS, np.int64)
    words[: len(values)] = values
    return words
