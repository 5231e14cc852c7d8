"""The replay rank's event loop: port event -> replay call."""

from __future__ import annotations

import math

import numpy as np

from apex import seeds
from apex.config import Config
from apex.ports import IntakeEvent, PriorityEvent, ReplayPort, SampleRequestEvent
from apex.role import Role
from apex.schema import EnvSpec, intake_layout, priority_layout, sample_layout
from apex.topology import REPLAY
from replay_rank.index import index_class
from replay_rank.rate_limit import RateLimiter
from replay_rank.replay import Replay, ring_places

# A sample batch takes as long to gather as dozens of intake batches take to insert: with one for one, a learner that
# is always waiting would hold the actors up.
_EVENTS_PER_ANSWER = 16


class ReplayService(Role):
    """Receives intake into the ring, answers sample requests, applies priorities."""

    port: ReplayPort

    def __init__(self, config: Config, spec: EnvSpec, port: ReplayPort, index: int):
        super().__init__(REPLAY, port, config.run.log_period_s)
        self.replay = Replay(config, spec, seeds.generator(config.run.seed, "replay", index))
        print(f"apex: {REPLAY} {index}: priority index {self.replay.index.describe()}", flush=True)
        self.limiter = RateLimiter(config)
        self.batch_size = config.learner.batch_size
        self._sample_layout = sample_layout(spec, self.batch_size)
        self._priority_layout = priority_layout(self.batch_size)
        self._open_requests = 0
        self.counters.set("capacity", config.replay.capacity // config.replay.ranks)

    def work(self) -> bool:
        """Handle some events and answer one request; return whether anything happened."""
        handled = 0
        while handled < _EVENTS_PER_ANSWER and self._handle(self.port.poll(self._landing())):
            handled += 1
        return self._answer() or handled > 0

    def wind_down(self) -> bool:
        """Receive what is still on its way and answer no more requests."""
        handled = self._handle(self.port.poll(self.replay.landing()))
        while self._open_requests:
            self._open_requests -= 1
            self.port.refuse_sample()
        return handled

    def waiting_for(self) -> str:
        """Say what the rank waits for."""
        if self._open_requests:
            return f"intake: {self.replay.size} transitions stored, samples wait for the rate limiter"
        return "intake batches and sample requests"

    def update_counters(self) -> None:
        """Bring the gauges of the report up to date."""
        r = self.replay
        values = {"inserted": r.inserted, "sampled": r.sampled, "size": r.size, "stale_updates": r.stale_updates}
        for name, value in values.items():
            self.counters.set(name, value)

    def _landing(self) -> np.ndarray | None:
        return self.replay.landing() if self.limiter.may_insert() else None

    def _handle(self, event) -> bool:
        match event:
            case IntakeEvent(nbytes):
                self.limiter.count(inserted=self.replay.insert(nbytes))
            case PriorityEvent(message):
                views = self._priority_layout.views(message)
                self.replay.update_priorities(views["key"], views["priority"])
            case SampleRequestEvent():
                self._open_requests += 1
        return event is not None

    def _answer(self) -> bool:
        if not self._open_requests or not self.limiter.may_sample(self.batch_size):
            return False
        buffer = self.port.sample_buffer()
        if buffer is None:
            return False
        self.replay.sample(self._sample_layout.views(buffer))
        self.limiter.count(sampled=self.batch_size)
        self.port.send_sample(buffer)
        self._open_requests -= 1
        return True


def memory_bytes(config: Config, spec: EnvSpec) -> int:
    """Return the bytes one replay rank's ring, index and send buffers will take when full."""
    layout = intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step)
    index = index_class(config.replay.index).bytes_per_slot * ring_places(config) * config.actor.intake_batch
    buffers = (config.learner.prefetch + 1) * sample_layout(spec, config.learner.batch_size).nbytes
    return ring_places(config) * layout.nbytes + math.ceil(index) + buffers
