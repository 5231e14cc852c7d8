"""The learner's port over ZeroMQ."""

from __future__ import annotations

from collections import deque

import numpy as np

from apex.metrics import MAX_REPORT, REPORT_FIELDS
from apex.ports import LOST, REPLACED, WORDS, Answer, Change, Report
from apex.schema import Limits, aligned_bytes, weight_header
from apex.topology import Topology
from apex.transport.learner_side import LearnerSide
from apex.transport.zmq_link import Message
from apex.transport.zmq_port import (
    ANNOUNCEMENT,
    ANSWER,
    DONE,
    FINISHED,
    HELLO,
    KILL,
    MESSAGES_PER_PROGRESS,
    NO_SAMPLE,
    NO_WEIGHTS,
    PRIORITY,
    REPORT,
    REPORT_TAKEN,
    SAMPLE,
    SAMPLE_REQUEST,
    STOP,
    STOP_REQUEST,
    WEIGHT_REQUEST,
    WEIGHTS,
    WELCOME,
    ZmqPort,
)
from apex.transport.zmq_world import World


class _Publish:
    """A weight message and what tells who still reads it."""

    def __init__(self, nbytes: int):
        self.message, self._readers = aligned_bytes(nbytes), []

    def lend(self, tracker) -> None:
        if tracker is not None:
            self._readers.append(tracker)

    def is_free(self) -> bool:
        self._readers = [reader for reader in self._readers if not reader.done]
        return not self._readers


class _Request:
    """A sample request: open until its answer is here."""

    def __init__(self, replay: int):
        self.replay, self.message, self.answered = replay, None, False


class ZmqLearnerPort(LearnerSide, ZmqPort):
    """Learner (see ``apex.ports.LearnerPort``)."""

    def __init__(self, world: World, topology: Topology, limits: Limits):
        super().__init__(world, topology, limits)
        self._requests: deque[_Request] = deque()
        self._publishes: list[_Publish] = []
        self._newest: _Publish | None = None
        self._evaluator_publishes: deque[_Publish] = deque(maxlen=2)
        self._weight_requests: dict[int, int] = {}
        self._report_buffer = np.zeros(8 * MAX_REPORT, np.uint8)
        self._unfinished = set(range(1, topology.size))
        self._world: World | None = None  # where new processes are heard, if losses are survived
        self._joining: set[int] = set()  # ranks whose new process has still to greet

    @property
    def refused(self) -> int:
        """Also what has been refused where new processes are heard."""
        return super().refused + (0 if self._world is None else self._world.refused)

    def progress(self) -> None:
        """Receive what the other ranks send, answer weight requests, and while ending drop samples."""
        self._look_for_cuts()
        for _ in range(MESSAGES_PER_PROGRESS):
            message = self._hub.receive()
            if message is None:
                break
            self._hear(message)
        self._answer_weight_requests()
        if self._world is not None:
            self._hear_joiners(self._world)
        while self.stopping and self._requests and self._requests[0].answered:
            self._requests.popleft()
        if self._finishing and not self.finished and not self._open():
            self.finished = True
            self._tell_all(DONE)

    def request_sample(self, replay: int) -> None:
        """Ask, and remember the order."""
        self._requests.append(_Request(replay))
        self._hub.send(self.topology.replay_ranks_range[replay], SAMPLE_REQUEST)

    def poll_sample(self) -> tuple[int, np.ndarray] | None:
        """Return the oldest request's batch, where it arrived, if it has."""
        if not self._requests or self._requests[0].message is None:
            return None
        request = self._requests.popleft()
        return request.replay, request.message

    def send_priorities(self, replay: int, message: np.ndarray) -> None:
        """Send a copy."""
        self._hub.send(self.topology.replay_ranks_range[replay], PRIORITY, 0, message.copy())

    def publish(self, message: np.ndarray) -> None:
        """Copy into a buffer nobody reads any more; a sleeping receiver holds one, never more."""
        idle = (p for p in self._publishes if p not in self._evaluator_publishes and p.is_free())
        publish = next(idle, None)
        if publish is None:
            publish = _Publish(len(message))
            self._publishes.append(publish)
        publish.message[:] = message
        self._newest = publish

    def announce(self, rank: int, words: np.ndarray) -> None:
        """Send a copy."""
        self._hub.send(rank, ANNOUNCEMENT, 0, words.astype(np.int64).view(np.uint8))

    def sent_to_evaluator(self, param_version: int) -> np.ndarray | None:
        """Return one of the last two publishes the evaluator was given."""
        messages = (p.message for p in self._evaluator_publishes)
        return next((m for m in messages if weight_header(m)[0] == param_version), None)

    def tolerate(self, world: World) -> None:
        """Survive the loss of acting ranks, and meet the processes that take their places."""
        super().tolerate(world)
        self._world = world

    def replace(self, rank: int, about: dict) -> None:
        """Tell the process that has come already."""
        self._world.answer(rank, about | {"rank": rank, "endpoints": self._endpoints, "ranks_here": self.ranks_here})

    def awaited(self) -> set[int]:
        """Return the ranks that the end of the run still waits for."""
        return set(self._unfinished)

    def _is_away(self, rank: int) -> bool:
        return rank in self._joining

    def _have_killed(self, killer: int, process: np.ndarray) -> None:
        self._hub.send(killer, KILL, 0, process.view(np.uint8))

    def _hear_joiners(self, world: World) -> None:
        while (joiner := world.joiner()) is not None:
            rank, process = joiner
            if not self.topology.is_acting(rank):
                self.refuse(f"a process in the place of {self.topology.name(rank)}, which cannot be lost")
                continue
            self._processes[rank] = process
            self._joining.add(rank)
            self._weight_requests.pop(rank, None)
            self._changes.append(Change(rank, LOST, "its process has ended"))
            if self.stopping:
                self._unfinished.discard(rank)
                world.answer(rank, None)

    def stop(self) -> None:
        """Tell every other rank."""
        if not self.stopping:
            self.stopping = True
            self._tell_all(STOP)

    def _tell_all(self, kind: int) -> None:
        for rank in range(1, self.topology.size):
            self._hub.send(rank, kind)

    def _callers(self) -> tuple[list[int], int | None]:
        return list(range(1, self.topology.size)), self.limits.sample_nbytes

    def _called(self) -> list[int]:
        return []

    def _hear(self, message: Message) -> None:
        if message.has_payload:
            take = {SAMPLE: self._take_sample, REPORT: self._take_report, ANSWER: self._take_answer}
            take.get(message.kind, lambda _: self._hub.refuse())(message.rank)
        elif message.kind == HELLO and message.rank in self._joining:
            self._greet(message.rank)
        elif message.kind == NO_SAMPLE and self.stopping:
            self._answered(message.rank, None)
        elif message.kind == WEIGHT_REQUEST and message.rank >= self.topology.evaluator_rank and message.arg >= 0:
            self._weight_requests[message.rank] = message.arg
        elif message.kind == STOP_REQUEST:
            self.stop_requested = True
        elif message.kind == FINISHED and self.stopping:
            self._unfinished.discard(message.rank)
        else:
            self._hub.refuse()

    def _greet(self, rank: int) -> None:
        self._joining.discard(rank)
        self._hub.send(rank, WELCOME)
        self._changes.append(Change(rank, REPLACED, ""))
        if self.stopping:
            self._hub.send(rank, STOP)

    def _take_sample(self, rank: int) -> None:
        sample = self._hub.take(self.limits.sample_nbytes)
        if sample is not None:
            self._answered(rank, sample)

    def _answered(self, rank: int, sample: np.ndarray | None) -> None:
        """Give the answer to the oldest request that this rank has not answered."""
        asked = (r for r in self._requests if not r.answered and self.topology.replay_ranks_range[r.replay] == rank)
        request = next(asked, None)
        if request is None:
            self._hub.refuse()
        else:
            request.answered, request.message = True, sample

    def _take_report(self, rank: int) -> None:
        nbytes = self._hub.take_into(self._report_buffer)
        role, index = self.topology.role(rank)
        if nbytes is None:
            return
        if nbytes != 8 * len(REPORT_FIELDS[role]):
            self._hub.refuse()
            return
        self._reports.append(Report(role, index, self._report_buffer[:nbytes].view(np.float64).copy()))
        self._hub.send(rank, REPORT_TAKEN)

    def _take_answer(self, rank: int) -> None:
        words = self._hub.take(8 * WORDS)
        if words is not None:
            self._answers.append(Answer(*self.topology.role(rank), words.view(np.int64).copy()))

    def _answer_weight_requests(self) -> None:
        """Answer whoever asked for what is now published; while ending, answer all with nothing."""
        if not self._weight_requests:
            return
        steps = -1 if self._newest is None else weight_header(self._newest.message)[1]
        for rank, wanted in list(self._weight_requests.items()):
            if self.stopping:
                self._hub.send(rank, NO_WEIGHTS)
            elif steps >= wanted:
                self._newest.lend(self._hub.send(rank, WEIGHTS, 0, self._newest.message, track=True))
                if rank == self.topology.evaluator_rank:
                    self._evaluator_publishes.append(self._newest)
            else:
                continue
            del self._weight_requests[rank]

    def _open(self) -> list[str]:
        names = self.topology.name
        samples = [f"a sample batch from {names(self.topology.replay_ranks_range[r.replay])}" for r in self._requests if not r.answered]
        return samples + [f"{names(rank)} to finish" for rank in sorted(self._unfinished)]
