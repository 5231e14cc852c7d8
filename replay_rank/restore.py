"""What a replay rank keeps in a checkpoint beside its ring, and how it, or another number of ranks, goes on from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from apex import look
from apex.checkpoint_files import Damaged
from apex.saved import Saved, shared_out
from apex.schema import intake_nbytes
from replay_rank.rate_limit import RateLimiter
from replay_rank.replay import Replay
from replay_rank.segments import Located, Segments, read_rows


def live_places(count: np.ndarray, landing: int) -> np.ndarray:
    """Return the places that hold transitions, oldest first: the ring from the one after ``landing`` on."""
    order = (landing + 1 + np.arange(len(count))) % len(count)
    return order[count[order] > 0]


def snapshot(replay: Replay, limiter: RateLimiter) -> tuple[np.ndarray, dict, dict]:
    """Return the live places, oldest first, and copies of what else makes a replay rank: arrays and plain values."""
    live = live_places(replay.count, replay.landing_place)
    arrays = {"mass": replay.index.save(), "generation": replay.generation.copy(), "count": replay.count.copy()}
    values: dict[str, Any] = {"inserted": replay.inserted, "sampled": replay.sampled, "stale_updates": replay.stale_updates}
    values |= {"landing": replay.landing_place, "places": len(live), "strata": int(replay.strata.state[0])}
    values |= {"limiter": [int(limiter.inserted), int(limiter.sampled)], "rule": replay.index.rule}
    values |= {"slots": replay.slots, "generation": int(replay.generation.max())}
    return live, arrays, values


class Restore:
    """Brings a new replay rank (``index`` of ``ranks``) to what a checkpoint holds."""

    def __init__(self, saved: Saved, index: int, ranks: int):
        self.saved, self.index, self.ranks = saved, index, ranks
        self.lost_places = 0
        self.old = [saved.values(f"replay-{old}") for old in range(saved.replay_ranks)]

    def __call__(self, replay: Replay, limiter: RateLimiter, segments: Segments) -> None:
        """Restore counts, random state, ring, index and limiter. Raises :class:`Damaged`."""
        with self.saved.reading("what it holds of replay"):
            self._restore(replay, limiter, segments)

    def _restore(self, replay: Replay, limiter: RateLimiter, segments: Segments) -> None:
        replay.inserted = self._share([old["inserted"] for old in self.old])
        replay.sampled = self._share([old["sampled"] for old in self.old])
        replay.stale_updates = self._share([old["stale_updates"] for old in self.old])
        if self.index < len(self.old):
            replay.strata.state[0] = self.old[self.index]["strata"]
        if not self.saved.has_replay:
            self._begin_keys(replay)  # and the limiter warms up again
            return
        limiter.inserted, limiter.sampled = (self._share([old["limiter"][i] for old in self.old]) for i in (0, 1))
        if len(self.old) == self.ranks and self.old[self.index]["slots"] == replay.slots:
            self._restore_same(replay, segments, self._arrays(self.index))
        else:
            self._deal(replay, {old: self._arrays(old) for old in range(len(self.old))})
        if self.lost_places and replay.size < limiter.min_size:
            limiter.inserted, limiter.sampled = replay.size, 0  # as new: it warms up again
        _check_batches(replay, self.saved)

    def _arrays(self, old: int) -> dict[str, np.ndarray]:
        """Return the arrays of an old rank without the places of segments that are missing.

        A lost place is as if evicted: no transitions, no mass, and a generation whose keys were never given out, so
        that priorities still on their way are stale.
        """
        self.old[old], arrays = self.saved.ring(old)
        files = self.old[old]["segments"]
        gone = {number for number, file in files.items() if not look.is_there(self.saved.folder / file[0])}
        self.old[old]["segments"] = {number: file for number, file in files.items() if number not in gone}
        lost = np.isin(arrays["segment"], [int(number) for number in gone]) & (arrays["count"] > 0)
        arrays["mass"].reshape(len(lost), -1)[lost] = 0.0
        arrays["count"][lost], arrays["segment"][lost] = 0, -1
        arrays["generation"][lost] += 1
        self.old[old]["generation"] = max(self.old[old]["generation"], int(arrays["generation"].max()))
        self.lost_places += int(lost.sum())
        return arrays

    def _share(self, values: list[int]) -> int:
        return shared_out(values, self.ranks, self.index)

    def _restore_same(self, replay: Replay, segments: Segments, arrays: dict) -> None:
        """The ring as it was, place by place; the next checkpoint only links what is on disk already."""
        values = self.old[self.index]
        live = live_places(arrays["count"], values["landing"])
        self._read(self.index, arrays, live, replay, live)
        replay.generation[:], replay.count[:] = arrays["generation"], arrays["count"]
        replay.take_over(arrays["mass"], values["landing"])
        located = Located(len(replay.count))
        located.generation[live] = arrays["generation"][live]
        located.segment, located.row = arrays["segment"], arrays["row"]
        located.files = {int(segment): tuple(file) for segment, file in values["segments"].items()}
        located.folder = self.saved.folder
        segments.located = located

    def _deal(self, replay: Replay, arrays: dict[int, dict]) -> None:
        """Whole places, oldest first, dealt out over all ranks in turn, with keys above all that were given out."""
        olds, places = self._in_age_order(arrays)
        mine = slice(self.index, None, self.ranks)
        olds, places = olds[mine], places[mine]
        mass = np.zeros((len(replay.count), replay.batch))
        for old, held in arrays.items():
            to = np.flatnonzero(olds == old)
            self._read(old, held, places[to], replay, to)
            replay.count[to] = held["count"][places[to]]
            mass[to] = held["mass"].reshape(-1, replay.batch)[places[to]]
        self._begin_keys(replay)
        replay.take_over(mass.reshape(-1), len(places))

    def _in_age_order(self, arrays: dict[int, dict]) -> tuple[np.ndarray, np.ndarray]:
        """Return old rank and place of all that is live, oldest first: the newest of all ranks are of one age."""
        live = {old: live_places(held["count"], self.old[old]["landing"]) for old, held in arrays.items()}
        olds = np.concatenate([np.full(len(places), old) for old, places in live.items()])
        age = np.concatenate([np.arange(len(places), 0, -1) for places in live.values()])
        order = np.lexsort((olds, -age))
        return olds[order], np.concatenate(list(live.values()))[order]

    def _begin_keys(self, replay: Replay) -> None:
        """Start with generations whose keys are above all that were ever given out."""
        slots = max(old["slots"] for old in self.old)
        largest = (1 + max(old["generation"] for old in self.old)) * slots
        replay.generation += -(-largest // replay.slots)

    def _read(self, old: int, arrays: dict, places: np.ndarray, replay: Replay, to: np.ndarray) -> None:
        try:
            rows = arrays["segment"][places], arrays["row"][places]
            read_rows(self.saved.folder, self.old[old]["segments"], *rows, replay.store.buffer, to)
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise Damaged(f"checkpoint {self.saved.folder}: a segment of replay {old} cannot be read: {error}") from None


def _check_batches(replay: Replay, saved: Saved) -> None:
    """What is gathered from the ring points into it; so what came from a file is checked as what comes from an actor is."""
    store = replay.store
    for place in np.flatnonzero(replay.count).tolist():
        nbytes = intake_nbytes(store.layout, store.spec, int(store.views["header"][place, 1]))
        try:
            count = store.check_batch(place, nbytes)
        except ValueError as error:
            raise Damaged(f"checkpoint {saved.folder}: {error}") from None
        if count != replay.count[place]:
            raise Damaged(f"checkpoint {saved.folder}: place {place} of replay holds {count} transitions, not {replay.count[place]}")
