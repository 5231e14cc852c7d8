"""A replay that is checkpointed in segments, beside a plain copy."""

import shutil
from pathlib import Path

import numpy as np
from numbered_replay import SPEC, Numbered
from small_checkpoints import verify

from apex import checkpoint
from apex.checkpoint import Reader
from apex.config import from_tables, to_tables
from apex.control import CheckpointRequest
from replay_rank.persistence import Restore, Segments, live_places
from replay_rank.rate_limit import RateLimiter
from replay_rank.replay import Replay

BATCH = 3


def config_of(capacity, ranks=1, index="wide"):
    replay = {"capacity": capacity, "ranks": ranks, "index": index, "min_size": 1}
    return from_tables(
        [("test", {"replay": replay, "actor": {"intake_batch": BATCH}, "algorithm": {"n_step": 1}})]
    )


def everything(replay):
    """Return a plain copy of a replay.

    Keys, masses, order, random state and every byte of its live places that is used.
    """
    live = live_places(replay.count, replay.landing_place)
    numbers = [
        replay.size,
        replay.inserted,
        replay.sampled,
        replay.stale_updates,
        replay.landing_place,
        int(replay.strata.state[0]),
    ]
    sums = [replay.index.total, replay.index.minimum]
    arrays = (replay.generation, replay.count, replay.index.save(), replay.store.buffer[live], np.array(sums))
    return numbers, [array.tobytes() for array in arrays]


class Keeper:
    """One replay, its checkpoints, and a plain copy of it for each."""

    def __init__(self, folder, capacity, index="wide", seed=0):
        self.folder, self.config = Path(folder), config_of(capacity, index=index)
        self.replay = Numbered(capacity, batch=BATCH, index=index, seed=seed)
        self.limiter = RateLimiter(self.config)
        self.segments = Segments(self.folder, "replay-0", self.replay.store.buffer)
        self.steps = self.base = 0
        self.copies = {}

    def begin(self):
        self.steps += 1
        self.request = CheckpointRequest(self.steps, self.steps, self.base)
        self.request.partial(self.folder).mkdir()
        state = {
            "replay": self.replay.state_dict(),
            "limiter": self.limiter.state_dict(),
            "counters": {},
            "open_requests": 0,
        }
        self.copies[self.steps] = everything(self.replay)
        self.segments.begin(self.request, live_places(self.replay.count, self.replay.landing_place), state)

    def conclude(self, whole=True):
        self.segments.wait()
        assert self.segments.poll() == 0
        partial = self.request.partial(self.folder)
        if whole:
            about = {
                "learner_steps": self.steps,
                "config": to_tables(self.config),
                "replay_ranks": 1,
                "num_actors": 1,
            }
            checkpoint.commit(partial, self.folder / self.request.name, about, ["replay-0"])
            self.base = self.steps
        else:
            shutil.rmtree(partial)
            del self.copies[self.steps]

    def save(self):
        self.begin()
        self.conclude()
        return self.folder / self.request.name

    def insert_if_it_may(self, priorities):
        if not self.segments.holds(self.replay.landing_place):
            self.replay.put(priorities)

    def reload(self, steps, config=None, index=0):
        config = config or self.config
        fresh = Replay(config, SPEC, np.random.default_rng(99))
        limiter, segments = RateLimiter(config), Segments(self.folder, f"replay-{index}", fresh.store.buffer)
        saved = Reader(self.folder / f"step-{steps:09d}", config, 1)
        verify(saved.folder)
        Restore(saved, index, config.replay.ranks)(fresh, limiter, segments)
        fresh.check()
        return fresh, segments
