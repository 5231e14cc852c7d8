"""What a rank that writes no file tells of itself for a checkpoint: random state, counters, and a few numbers of its own.

It travels in the answer to the announcement, and the learner writes it down. Counters are cumulative over the
whole run: where the number of ranks has changed, their sums stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apex import seeds
from apex.checkpoint_files import Announcement, Reply
from apex.metrics import MAX_REPORT, REPORT_FIELDS, Counters
from apex.saved import Saved, shared_out
from apex.topology import REPLAY

_NEW_RUNG = -1  # in place of a checkpoint's number


class Rung(NamedTuple):
    """What an actor is told when the ladder is shared out anew: it is now number ``position`` of ``count`` actors."""

    position: int
    count: int  # type: ignore[assignment]  # a field in place of tuple's method

    def words(self) -> np.ndarray:
        """Return it as the words of an announcement."""
        return Announcement(_NEW_RUNG, *self).words()

    def answer(self) -> np.ndarray:
        """Return the answer to that."""
        return Reply(_NEW_RUNG, 0, np.zeros(0, np.int64)).words()

    @classmethod
    def of(cls, words: np.ndarray) -> Rung | None:
        """Return the rung that an announcement tells of, or None where it tells of something else."""
        return cls(*words[1:3].tolist()) if words[0] == _NEW_RUNG and 0 <= words[1] < words[2] else None


_RNG = slice(0, seeds.WORDS)
_COUNTERS = slice(_RNG.stop, _RNG.stop + MAX_REPORT)
_OWN = _COUNTERS.stop


def reply(announced: Announcement, counters: Counters, rng: np.random.Generator | None = None, own: Sequence[int] = ()) -> np.ndarray:
    """Return the answer of a rank: int64[apex.ports.WORDS]."""
    return Reply(announced.number, 0, pack(counters.vector(), rng, own)).words()


def pack(vector: np.ndarray, rng: np.random.Generator | None = None, own: Sequence[int] = ()) -> np.ndarray:
    """Return counters (a report), random state and own numbers (int) as words."""
    words = np.zeros(_OWN + len(own), np.int64)
    words[_RNG] = 0 if rng is None else seeds.state_words(rng)
    words[_COUNTERS][: len(vector)] = vector.view(np.int64)
    words[_OWN:] = own
    return words


def restore_rng(saved: Saved, role: str, index: int, rng: np.random.Generator) -> None:
    """Give a rank's generator the state it had; one that did not exist, or did not answer, keeps that of its seed."""
    words = saved.answers(role).get(index)
    if words is not None and words[_RNG].any():
        seeds.set_state_words(rng, words[_RNG])


def own(saved: Saved, role: str, index: int) -> list[int]:
    """Return a rank's own numbers, [] where it has none."""
    words = saved.answers(role).get(index)
    return [] if words is None else words[_OWN:].tolist()


def counters(saved: Saved, role: str, index: int, ranks: int) -> np.ndarray:
    """Return the report (float64) that rank ``index`` of now ``ranks`` ranks of a role goes on from."""
    if role == REPLAY:
        held = [saved.values(f"{REPLAY}-{old}")["counters"] for old in range(saved.replay_ranks)]
        return np.array([shared_out(list(values), ranks, index) for values in zip(*held)], np.float64)
    count = len(REPORT_FIELDS[role])
    vectors = {old: words[_COUNTERS][:count].view(np.float64) for old, words in saved.answers(role).items()}
    return sum((vectors[old] for old in sorted(vectors) if old % ranks == index), np.zeros(count))
