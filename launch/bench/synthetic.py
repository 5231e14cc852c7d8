"""Synthetic roles of `apex compare`: the real replay rank, and peers that only send and receive.

The sum of all 64-bit words of a batch is the same for every batch, whatever its number, so a replay rank
that adds them up sees any damage.
"""

from __future__ import annotations

import resource
import struct
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from apex import config as configuration
from apex.config import Config
from apex.metrics import REPORT_FIELDS
from apex.ports import ActorPort, IntakeEvent, LearnerPort, Port, ReplayPort
from apex.role import Role
from apex.schema import (
    EnvSpec,
    Layout,
    aligned_bytes,
    intake_layout,
    intake_nbytes,
    priority_layout,
    sample_layout,
)
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY
from replay_rank.service import Event, ReplayService

METRICS = (
    "transitions_per_s", "mb_per_s", "batches_per_s", "sample_ms_p50", "sample_ms_p99",
    "learner_wait_pct", "cpu_s_per_million", "peak_mb", "lost",
)  # fmt: skip
"""What is measured of each transport."""
Moment = tuple[float, float, int]
SETTLED_S = 1.0  # from the first step on; what follows is given by itself
SPEC = EnvSpec((84, 84), "uint8", 4, 6)
WARM_UP_S = 0.5  # not measured, after the first batch
_AFTER_S = 0.25  # from the end of the window on a replay rank to the learner's word to stop
_REPORT_PERIOD_S = 0.05
_WORD_SUM = np.uint64(0x0123456789ABCDEF)
_CHECKED = 32  # one batch in so many is added up; the sequence number of each is looked at
_PAGE = 4096
_ACTOR_AND_NUMBER, _STAMP = (
    struct.Struct("=16xqq"),
    struct.Struct("=q"),
)  # the end of a header; the first parameter version
_CONFIG = {
    "actor": {"intake_batch": 50, "in_flight": 4},
    "algorithm": {"n_step": 3},
    "replay": {"capacity": 20_000, "min_size": 1_000},
    "learner": {"batch_size": 512, "prefetch": 2},
}


def config(actors: int, replay_ranks: int = 1, report_period_s: float = _REPORT_PERIOD_S) -> Config:
    """Return the configuration of a world of synthetic roles."""
    world = {
        "actor": {"count": actors},
        "replay": {"ranks": replay_ranks},
        "run": {"log_period_s": 8 * report_period_s},
    }
    return configuration.from_tables([("synthetic roles", _CONFIG), ("synthetic roles", world)])


def used_nbytes() -> int:
    """Return the bytes of one synthetic intake batch on the wire, in the layout of the ring."""
    plain = config(1)
    layout = intake_layout(SPEC, plain.actor.intake_batch, plain.algorithm.n_step)
    return intake_nbytes(layout, SPEC, _frames_used(plain))


def _frames_used(config: Config) -> int:
    return config.actor.intake_batch + config.algorithm.n_step + SPEC.stack - 1


class Usage:
    """Seconds, CPU seconds and steps from a role's first step to the end of the run."""

    def __init__(self) -> None:
        self._start: Moment | None = None
        self._settled: Moment | None = None
        self._end: Moment | None = None
        self._settles_at, self._steps = float("inf"), 0

    def begin(self) -> None:
        """Mark a step."""
        self._steps += 1
        if self._start is None:
            self._start = self._now()
            self._settles_at = self._start[0] + SETTLED_S
        elif time.perf_counter() >= self._settles_at:
            self._settled, self._settles_at = self._now(), float("inf")

    def end(self) -> None:
        """Mark the end of the run."""
        if self._end is None:
            self._end = self._now()

    def summary(self) -> dict:
        """Return ``seconds``, ``cpu_s`` (user and system) and ``peak_mb`` (resident, of the whole process).

        ``settled`` holds ``seconds``, ``cpu_s`` and ``steps`` without the first ``SETTLED_S``; None where the
        run was shorter.
        """
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        settled = None if self._settled is None else self._since(self._settled)
        whole = self._since(self._start or self._now())
        return {"seconds": whole["seconds"], "cpu_s": whole["cpu_s"], "peak_mb": peak_mb, "settled": settled}

    def _since(self, start: tuple) -> dict:
        differences = (round(after - before, 4) for before, after in zip(start, self._end or self._now()))
        return dict(zip(("seconds", "cpu_s", "steps"), differences))

    def _now(self) -> tuple[float, float, int]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), used.ru_utime + used.ru_stime, self._steps


class Measured(Role):
    """A role that knows what it used."""

    def __init__(self, role: str, port: Port, report_period_s: float = _REPORT_PERIOD_S):
        super().__init__(role, port, 8 * report_period_s)
        self.usage = Usage()

    def work(self) -> bool:
        """Note the first step."""
        self.usage.begin()
        return self.turn()

    def turn(self) -> bool:
        """Do one unit of work."""
        return False

    def wind_down(self) -> bool:
        """Note the end."""
        self.usage.end()
        return False

    def waiting_for(self) -> str | None:
        """A synthetic role may wait for long."""
        return None

    def results(self) -> dict:
        """Return what the role counted."""
        return {}


class Idle(Measured):
    """An actor or evaluator with nothing to do."""

    def __init__(self, port: Port, role: str = EVALUATOR, report_period_s: float = _REPORT_PERIOD_S):
        super().__init__(role, port, report_period_s)


class IdleLearner(Measured):
    """Hears reports, and ends the run after so many seconds."""

    port: LearnerPort

    def __init__(self, port: LearnerPort, seconds: float, report_period_s: float):
        super().__init__(LEARNER, port, report_period_s)
        self._stop_at = time.perf_counter() + seconds

    def turn(self) -> bool:
        """Look at the clock."""
        self.port.poll_reports()
        if time.perf_counter() < self._stop_at:
            return False
        self.port.stop()
        return True

    def wind_down(self) -> bool:
        """Hear the last reports."""
        super().wind_down()
        return bool(self.port.poll_reports())


# --- batches ----------------------------------------------------------------------------------------


class Batches:
    """Intake batches made once; each sending only gives one a new number."""

    def __init__(
        self, config: Config, actor: int, count: int, memory: Callable[[int, int], np.ndarray] = aligned_bytes
    ):
        layout = intake_layout(SPEC, config.actor.intake_batch, config.algorithm.n_step)
        self.nbytes = intake_nbytes(layout, SPEC, _frames_used(config))
        self._buffers = memory(count, layout.nbytes)
        self._views = layout.views(self._buffers)
        self._words = self._buffers[:, : self.nbytes].view(np.uint64)
        self._fill(config, np.random.default_rng(actor), actor)
        columns = self._views["header"], self._views["param_version"], self._buffers[:, : self.nbytes]
        self._rows = [(header.data, stamps.data, message) for header, stamps, message in zip(*columns)]

    def stamped(self, row: int, number: int) -> np.ndarray:
        """Return batch ``row`` as the ``number``-th of its actor."""
        numbers, stamps, message = self._rows[row]
        stamps[1] += 2 * (numbers[3] - number)  # the number stands in two places
        numbers[3] = stamps[0] = number
        return message

    def _fill(self, config: Config, rng: np.random.Generator, actor: int) -> None:
        v, b, n = self._views, config.actor.intake_batch, config.algorithm.n_step
        used = _frames_used(config)
        rows = np.arange(b)[:, None] + np.arange(SPEC.stack)[None, :]
        v["header"][:] = b, used, actor, 0
        v["obs_frames"][:], v["next_obs_frames"][:] = rows, rows + n
        v["action"][:] = rng.integers(0, SPEC.num_actions, v["action"].shape)
        for name in ("reward", "priority"):
            v[name][:] = rng.random(v[name].shape)
        v["discount"][:] = config.algorithm.discount**n
        v["frames"][:, :used] = rng.integers(0, 256, v["frames"][:, :used].shape, np.uint8)
        v["param_version"][:, 1] = (_WORD_SUM - self._words.sum(axis=1)).view(np.int64)


class Account:
    """What a replay rank received of each actor: number of batches, sums of their numbers and squares."""

    def __init__(self, actors: int, layout: Layout):
        self.received = [[0, 0, 0] for _ in range(actors)]
        self.damaged = self.batches = self.nbytes = 0
        self._header, self._stamp = (layout.fields[name].offset for name in ("header", "param_version"))

    def take(self, landing: np.ndarray, nbytes: int) -> None:
        """Count the batch that has landed."""
        held = landing.data
        actor, number = _ACTOR_AND_NUMBER.unpack_from(held, self._header)
        (stamp,) = _STAMP.unpack_from(held, self._stamp)
        mine = self.received[actor]
        mine[0] += 1
        mine[1] += number
        mine[2] += number * number
        self.batches += 1
        self.nbytes += nbytes
        whole = self.batches % _CHECKED or landing[:nbytes].view(np.uint64).sum() == _WORD_SUM
        self.damaged += not (whole and number == stamp)


def lost_batches(sent: list[int], received: list[list[list[int]]]) -> int:
    """Return the batches lost or duplicated: ``sent`` by actor, ``received`` by replay rank and actor."""
    lost = 0
    for actor, count in enumerate(sent):
        got, numbers, squares = (sum(rank[actor][i] for rank in received) for i in range(3))
        expected = count * (count - 1) // 2, (count - 1) * count * (2 * count - 1) // 6
        lost += abs(count - got) or int((numbers, squares) != expected)
    return lost


# --- roles ------------------------------------------------------------------------------------------


class SyntheticActor(Measured):
    """Sends premade batches as fast as credits allow, or at ``rate`` transitions/s."""

    port: ActorPort

    def __init__(self, config: Config, port: ActorPort, index: int, rate: float):
        super().__init__(ACTOR, port)
        count = config.actor.in_flight * config.replay.ranks + 1
        self._batches, self._free = Batches(config, index, count, port.intake_memory), list(range(count))
        self._batch = config.actor.intake_batch
        self._period_s = self._batch / rate if rate else 0.0
        self._due = 0.0
        self.sent = 0

    def turn(self) -> bool:
        """Send one batch if a credit is free and its time has come."""
        self._free += self.port.completed_intake()
        if not self._free or not self.port.can_send_intake() or not self._is_due():
            return False
        row = self._free.pop()
        self.port.send_intake(row, self._batches.stamped(row, self.sent))
        self.sent += 1
        self.counters.add("transitions", self._batch)
        return True

    def results(self) -> dict:
        """Return how many batches were sent."""
        return {"sent": self.sent}

    def _is_due(self) -> bool:
        now = time.perf_counter()
        if now < self._due:
            return False
        if self._period_s:
            self._due = max(
                self._due + self._period_s, now - 1.0
            )  # what was missed for longer is not made up for
        return True


class MeasuredReplay(ReplayService):
    """The real replay rank, which also keeps account and measures its rates over a window of ``seconds``."""

    def __init__(
        self, config: Config, port: ReplayPort, index: int, actors: int, sampling: bool, seconds: float
    ):
        super().__init__(config, SPEC, port, index)
        self.usage, self.account = Usage(), Account(actors, self.replay.store.layout)
        self._sampling, self._seconds = sampling, seconds
        self._marks: list[tuple] = []
        self._next_mark: float | None = None
        self.replay.store.buffer[:, ::_PAGE] = 0  # touched before, not while measured

    def work(self) -> bool:
        """Work, and look at the clock."""
        self.usage.begin()
        worked = super().work()
        self._look()
        return worked

    def wind_down(self) -> bool:
        """Receive what is on its way."""
        self.usage.end()
        return super().wind_down()

    def may_finish(self) -> bool:
        """Its synthetic learner says no last word; what it counts is looked at when all has ended."""
        return True

    def waiting_for(self) -> str | None:
        """May wait for long."""
        return None

    def results(self) -> dict:
        """Return counts, and the rates of the window (None where the run ended before it did)."""
        found = {
            "received": self.account.received,
            "damaged": self.account.damaged,
            "inserted": self.replay.inserted,
        }
        if len(self._marks) < 2:
            return found | {"window_s": None}
        (start, *before), (end, *after) = self._marks
        rates = [(b - a) / (end - start) for a, b in zip(before, after)]
        return (
            found
            | {"window_s": end - start}
            | dict(zip(("transitions_per_s", "bytes_per_s", "samples_per_s"), rates))
        )

    def _handle(self, event: Event | None) -> bool:
        if isinstance(event, IntakeEvent):
            self.account.take(self.replay.landing(), event.nbytes)
        return super()._handle(event)

    def _look(self) -> None:
        """Mark the counts at the window's start and end."""
        now = time.perf_counter()
        if self._next_mark is None:
            if self.replay.sampled if self._sampling else self.replay.inserted:
                self._next_mark = now + WARM_UP_S
        elif now >= self._next_mark and len(self._marks) < 2:
            self._marks.append((now, self.replay.inserted, self.account.nbytes, self.replay.sampled))
            self._next_mark = now + self._seconds


class SyntheticLearner(Measured):
    """Keeps ``learner.prefetch`` requests open, looks at each batch, returns priorities, and ends the run.

    ``batches_per_s`` above 0 is the pace at which it takes batches if they are there; the latency is then
    that of the pace, since it does not look before.
    """

    port: LearnerPort

    def __init__(
        self, config: Config, port: LearnerPort, sampling: bool, seconds: float, batches_per_s: float
    ):
        super().__init__(LEARNER, port)
        self._config, self._sampling, self._seconds = config, sampling, seconds
        self._period_s = 1.0 / batches_per_s if batches_per_s else 0.0
        self._samples = sample_layout(SPEC, config.learner.batch_size)
        self._layout = priority_layout(config.learner.batch_size)
        self._noise = np.random.default_rng(0).random(config.learner.batch_size)
        self._asked: deque[float] = deque()
        self._latencies: list[float] = []
        self._turn = self.batches = self.damaged = self.touched = 0
        self._waited = self._ready_since = self._due = 0.0
        self._seen = np.zeros(config.replay.ranks, bool)
        self._measure_from = self._stop_at = np.inf
        self._measured_s = 0.0

    def turn(self) -> bool:
        """Take one batch if it has arrived and its time has come."""
        self._hear()
        now = time.perf_counter()
        if now >= self._stop_at:
            self._measured_s = now - self._measure_from
            self.port.stop()
            return True
        if not self._sampling:
            return False
        self._fill_pipeline()
        arrived = self.port.poll_sample() if now >= self._ready_since else None
        if arrived is None:
            return False
        self._take(*arrived)
        return True

    def wind_down(self) -> bool:
        """Hear the last reports."""
        super().wind_down()
        return bool(self.port.poll_reports())

    def results(self) -> dict:
        """Return batches taken, and latencies and wait after the warm-up."""
        ms = np.percentile(self._latencies, [50, 99]) * 1e3 if self._latencies else (None, None)
        wait = 100.0 * self._waited / self._measured_s if self._sampling and self._measured_s else None
        return {
            "batches": self.batches,
            "damaged": self.damaged,
            "sample_ms_p50": ms[0],
            "sample_ms_p99": ms[1],
            "wait_pct": wait,
        }

    def _fill_pipeline(self) -> None:
        while len(self._asked) < self._config.learner.prefetch:
            self.port.request_sample(self._turn % self._config.replay.ranks)
            self._asked.append(time.perf_counter())
            self._turn += 1

    def _take(self, replay: int, message: np.ndarray) -> None:
        now, asked = time.perf_counter(), self._asked.popleft()
        if now >= self._measure_from:
            self._latencies.append(now - asked)
            self._waited += now - max(self._ready_since, self._measure_from)
        self._fill_pipeline()
        self._look_at(message)
        priorities = self._layout.views(self.port.priority_buffer())
        priorities["key"][:], priorities["priority"][:] = self._samples.views(message)["key"], self._noise
        self.port.send_priorities(replay)
        self.batches += 1
        self._due = max(
            self._due + self._period_s, now - 1.0
        )  # what was missed for longer is not made up for
        self._ready_since = max(time.perf_counter(), self._due)

    def _look_at(self, message: np.ndarray) -> None:
        """Read a byte of every page. With n_step = stack - 1, observations overlap in their last frame."""
        self.touched += int(message[::_PAGE].sum())
        views = self._samples.views(message)
        self.damaged += int((views["obs"][:, -1, 0, :8] != views["next_obs"][:, 0, 0, :8]).any(axis=1).sum())

    def _hear(self) -> None:
        """Once all replay ranks are at work, set the time to stop."""
        field = REPORT_FIELDS[REPLAY].index("sampled" if self._sampling else "inserted")
        for role, index, vector in self.port.poll_reports():
            if role == REPLAY and vector[field] > 0:
                self._seen[index] = True
        if self._stop_at == np.inf and self._seen.all():
            self._measure_from = time.perf_counter() + WARM_UP_S
            self._stop_at = self._measure_from + self._seconds + _AFTER_S
