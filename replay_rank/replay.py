"""Prioritised replay: insert, sample, update priorities (Schaul et al. 2016).

The only place with alpha (mass = (priority + eps)^alpha) and with staleness (keys).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import native
from apex.config import Config
from apex.schema import EnvSpec, intake_layout
from apex.state import Checks, fill, is_count, require
from replay_rank.index import make_index
from replay_rank.store import FrameStore
from replay_rank.strata import STATE as STRATA_STATE
from replay_rank.strata import Strata

_LARGEST = float(np.finfo(np.float32).max)

COUNTS = ("inserted", "sampled", "stale_updates")
STATE: Checks = {
    **dict.fromkeys((*COUNTS, "landing", "newest_generation"), is_count), "strata": STRATA_STATE,
    "slots": lambda value: is_count(value) and value > 0,
}  # fmt: skip


def ring_places(config: Config) -> int:
    """Return the places of one replay rank's ring: its share of the capacity, plus the landing place."""
    return config.replay.capacity // config.replay.ranks // config.actor.intake_batch + 1


class Replay:
    """Transitions of one replay rank with keys, masses and frames.

    A key is ``generation * slots + slot``. A place in the ring gets a new generation when it is reserved for
    the next batch. So no key is reused, and a late priority never changes another transition.
    """

    def __init__(self, config: Config, spec: EnvSpec, rng: np.random.Generator):
        self.eps = config.replay.eps
        self.strata = Strata(int(rng.integers(2**64, dtype=np.uint64)))
        layout = intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step)
        places = ring_places(config)
        self.store = FrameStore(spec, layout, places)
        self.batch, self.slots = self.store.batch, places * self.store.batch
        options = {"alpha": config.replay.alpha, "device": config.replay.index_device}
        self.index = make_index(config.replay.index, self.slots, **options)
        # An index of rule "rank" applies alpha to the ranks; its leaves are priorities, kept above zero.
        self.exponent = 1.0 if self.index.rule == "rank" else config.replay.alpha
        self.generation = np.zeros(places, np.int64)
        self.count = np.zeros(places, np.int64)
        self.size = self.inserted = self.sampled = self.stale_updates = 0
        self._slots, self._masses = np.empty(0, np.int64), np.empty(0)  # reused by every draw
        self._no_mass = np.zeros(self.batch)
        self._landing = places - 1
        self._reserve_next()

    def landing(self) -> np.ndarray:
        """Return the buffer (uint8, one intake message) that receives the next batch."""
        return self.store.buffer[self._landing]

    def insert(self, nbytes: int) -> int:
        """Insert the batch of ``nbytes`` bytes in the landing place; return its number of transitions.

        Raises ValueError for a corrupt batch, or a priority that is NaN, infinite or negative; nothing
        changes then.
        """
        place = self._landing
        count = self.store.check_batch(place, nbytes)
        priority = self.store.views["priority"][place, :count]
        mass = self._mass(priority, lambda: f"intake batch of actor {self.store.actor(place)}")
        first = place * self.batch
        self.index.set_range(first, mass)
        self.count[place] = count
        self.size += count
        self.inserted += count
        self._reserve_next()
        return count

    def sample(self, out: dict[str, np.ndarray]) -> None:
        """Fill the views of a sample message: one draw from each of B equal strata of the total mass."""
        b = out["key"].shape[0]
        if len(self._slots) != b:
            self._slots, self._masses = np.empty(b, np.int64), np.empty(b)
        slots, _, _ = self.index.draw(self.strata, b, (self._slots, self._masses, out["probability"]))
        out["size"][0], out["total"][0], out["minimum"][0] = self.size, self.index.total, self.index.minimum
        out["key"][:] = self.generation[slots // self.batch] * self.slots + slots
        self.store.gather(slots, out)
        self.sampled += b

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> int:
        """Set new priorities by key; return how many were stale (dropped and counted).

        The last priority of a repeated key wins. Raises ValueError naming the row of a bad priority or of an
        unknown key; nothing changes then.
        """
        mass = self._mass(priorities, lambda: "priority update")
        generation, slots = np.divmod(keys, self.slots)
        place, row = np.divmod(slots, self.batch)
        live = generation == self.generation[place]
        unknown = (generation < 1) | (generation > self.generation[place])
        self._reject_unknown(keys, unknown | (live & (row >= self.count[place])))
        self.index.set(slots[live], mass[live])
        stale = int(len(keys) - live.sum())
        self.stale_updates += stale
        return stale

    @property
    def landing_place(self) -> int:
        """The place of the ring that receives the next batch."""
        return self._landing

    def state_dict(self) -> dict:
        """Return everything but the ring, which :mod:`replay_rank.persistence` reads and writes in place."""
        state = {"inserted": self.inserted, "sampled": self.sampled, "stale_updates": self.stale_updates}
        state |= {"landing": self._landing, "slots": self.slots}
        state |= {"newest_generation": int(self.generation.max())}
        arrays = {"generation": self.generation.copy(), "count": self.count.copy()}
        return state | arrays | {"index": self.index.state_dict(), "strata": self.strata.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict`` once the ring holds its batches; ValueError if another ring gave it."""
        require(state, STATE)
        fill(self.generation, state, "generation")
        fill(self.count, state, "count")
        self.index.load_state_dict(state["index"])
        self.strata.load_state_dict(state["strata"])
        self.inserted, self.sampled, self.stale_updates = (state[name] for name in COUNTS)
        self.size, self._landing = int(self.count.sum()), state["landing"]

    def check(self) -> None:
        """Raise AssertionError if the index, the counts and the masses disagree."""
        self.index.check()
        assert self.size == self.count.sum(), (self.size, self.count.sum())
        filled = np.arange(self.batch)[None, :] < self.count[:, None]
        mass = self.index.get(np.arange(self.slots)).reshape(filled.shape)
        assert ((mass > 0) == filled).all(), "a stored transition has no mass, or an empty slot has some"

    def _reserve_next(self) -> None:
        """Evict the oldest place: it loses its mass and gets a new generation before it receives a batch."""
        self._landing = (self._landing + 1) % len(self.count)
        place, count = self._landing, self.count[self._landing]
        if count:
            first = place * self.batch
            self.index.set_range(first, self._no_mass[:count])
        self.size -= int(count)
        self.count[place] = 0
        self.generation[place] += 1

    def _reject_unknown(self, keys: np.ndarray, unknown: np.ndarray) -> None:
        if unknown.any():
            row = int(np.argmax(unknown))
            raise ValueError(f"priority update: row {row} has key {keys[row]}, which was never given out")

    def _mass(self, priority: np.ndarray, what: Callable[[], str]) -> np.ndarray:
        """Return (priority + eps)^exponent, float64; ValueError names a row that is not finite or < 0."""
        if not native.within(priority, 0.0, _LARGEST):
            row = int(np.argmin((priority >= 0) & (priority <= _LARGEST)))
            bad = f"row {row} has priority {priority[row]}"
            raise ValueError(f"{what()}: {bad}; priorities are finite and >= 0")
        mass = priority.astype(np.float64)
        mass += self.eps
        return np.power(mass, self.exponent, out=mass)
