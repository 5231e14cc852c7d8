"""The replay rank's event loop: port event -> replay call."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import numpy as np

from apex import seeds
from apex.checkpoint import Part, Reader
from apex.config import Config
from apex.control import CheckpointAck, CheckpointRequest
from apex.ports import IntakeEvent, PriorityEvent, ReplayPort, SampleRequestEvent
from apex.role import Role
from apex.say import say
from apex.schema import EnvSpec, intake_layout, priority_layout, sample_layout
from apex.state import split
from apex.topology import REPLAY
from replay_rank.index import index_class
from replay_rank.persistence import Restore, Segments, live_places
from replay_rank.rate_limit import RateLimiter
from replay_rank.replay import Replay, ring_places

Event = IntakeEvent | SampleRequestEvent | PriorityEvent
# Gathering a sample batch takes as long as dozens of inserts. With one event per answer, a learner that
# always waits would slow the actors.
_EVENTS_PER_ANSWER = 16


class ReplayService(Role):
    """Receives intake into the ring, answers sample requests, applies priorities.

    It writes its part of each checkpoint below ``checkpoints``, and resumes from ``reader`` if given.
    """

    port: ReplayPort

    def __init__(
        self, config: Config, spec: EnvSpec, port: ReplayPort, index: int,
        checkpoints: Path = Path(), reader: Reader | None = None,
    ):  # fmt: skip
        super().__init__(REPLAY, port, config.run.log_period_s)
        self.name, self.checkpoints = f"{REPLAY}-{index}", checkpoints
        self._keeps_ring = config.replay.checkpoint
        self._blocking = config.run.transport == "local"  # there, all roles take turns in one thread
        self.replay = Replay(config, spec, seeds.generator(config.run.seed, "replay", index))
        say(f"apex: {REPLAY} {index}: priority index {self.replay.index.describe()}")
        self.limiter = RateLimiter(config)
        self.batch_size = config.learner.batch_size
        self._sample_layout = sample_layout(spec, self.batch_size)
        self._priority_layout = priority_layout(self.batch_size)
        self._open_requests = 0
        self.segments = Segments(checkpoints, self.name, self.replay.store.buffer, config.replay.ranks)
        self._request: CheckpointRequest | None = None  # not yet acknowledged
        if reader is not None:
            self._resume(config, reader, index)
        self.counters.set("capacity", config.replay.capacity // config.replay.ranks)

    def work(self) -> bool:
        """Handle some events and answer one request; return whether anything happened."""
        self._acknowledge()
        handled = 0
        while handled < _EVENTS_PER_ANSWER and self._handle(self.port.poll(self._landing())):
            handled += 1
        return self._answer() or handled > 0

    def wind_down(self) -> bool:
        """Receive the messages still in flight; reject all open requests."""
        if self._request is not None:
            self._request = None
            self.segments.abandon()
        handled = self._handle(self.port.poll(self.replay.landing()))
        while self._open_requests:
            self._open_requests -= 1
            self.port.refuse_sample()
        return handled

    def may_finish(self) -> bool:
        """Whether all messages in flight at the end of the run have been counted."""
        return self.no_more_intake and self.port.quiet

    def on_checkpoint(self, request: CheckpointRequest) -> None:
        """Start a thread that writes ring, masses and counts."""
        self.update_counters()
        state = self.state_dict()
        if self._keeps_ring:
            self._request = request
            self.segments.begin(request, live_places(self.replay.count, self.replay.landing_place), state)
            if self._blocking:
                self.segments.wait()
                self._acknowledge()
        else:
            error = self._write_values(request, state)
            self.port.acknowledge(CheckpointAck(request.number, error, {}))

    def state_dict(self) -> dict:
        """Return the whole state of the rank, except the ring."""
        state = {"replay": self.replay.state_dict(), "limiter": self.limiter.state_dict()}
        return {**state, "counters": self.counters.state_dict(), "open_requests": self._open_requests}

    def waiting_for(self) -> str | None:
        """Say what the rank waits for."""
        if self._open_requests:
            return f"intake: {self.replay.size} transitions stored, samples wait for the rate limiter"
        return "intake batches and sample requests"

    def update_counters(self) -> None:
        """Bring the gauges of the report up to date."""
        r = self.replay
        self.counters.set("inserted", r.inserted)
        self.counters.set("sampled", r.sampled)
        self.counters.set("size", r.size)
        self.counters.set("stale_updates", r.stale_updates)

    def _landing(self) -> np.ndarray | None:
        if not self.limiter.may_insert() or self.segments.holds(self.replay.landing_place):
            return None
        return self.replay.landing()

    def _resume(self, config: Config, reader: Reader, index: int) -> None:
        Restore(reader, index, config.replay.ranks)(self.replay, self.limiter, self.segments)
        with reader.reading(f"{self.name}.json"):
            self.counters = reader.counters(REPLAY, index, config.replay.ranks)
            if reader.exact:
                self._open_requests = reader.values(self.name)["open_requests"]

    def _acknowledge(self) -> None:
        request = self._request
        error = None if request is None else self.segments.poll()
        if request is not None and error is not None:
            self.port.acknowledge(CheckpointAck(request.number, error, {}))
            self._request = None

    def _write_values(self, request: CheckpointRequest, state: dict) -> int:
        """Write the plain values without the ring; return 0 or the error number."""
        values, _ = split(state)
        try:
            Part(request.partial(self.checkpoints), self.name).finish(values)
            return 0
        except OSError as error:
            return error.errno or errno.EIO

    def _handle(self, event: Event | None) -> bool:
        try:
            self._apply(event)
        except ValueError as refusal:  # nothing has changed
            self.port.refuse("intake" if isinstance(event, IntakeEvent) else "priority", str(refusal))
        return event is not None

    def _apply(self, event: Event | None) -> None:
        match event:
            case IntakeEvent(nbytes):
                self.limiter.count(inserted=self.replay.insert(nbytes))
            case PriorityEvent(message):
                views = self._priority_layout.views(message)
                self.replay.update_priorities(views["key"], views["priority"])
            case SampleRequestEvent():
                self._open_requests += 1

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
    """Return the bytes of one replay rank's ring, index and send buffers when full."""
    layout = intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step)
    index = index_class(config.replay.index).bytes_per_slot * ring_places(config) * config.actor.intake_batch
    buffers = (config.learner.prefetch + 1) * sample_layout(spec, config.learner.batch_size).nbytes
    return ring_places(config) * layout.nbytes + math.ceil(index) + buffers
