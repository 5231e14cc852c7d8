"""The learner over MPI: sample batches in the order asked, priorities, publishes, reports, the word to stop."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from apex.metrics import REPORT_FIELDS
from apex.ports import LOST, NOT_REPLACED, REPLACED, WORDS, Answer, Change, Report
from apex.schema import ALIGNMENT, Limits, aligned_bytes, weight_header
from apex.topology import LEARNER_RANK, Topology
from apex.transport.checked import Arrived
from apex.transport.learner_side import LearnerSide
from apex.transport.mpi_port import (
    ANNOUNCEMENT,
    ANSWER,
    DONE,
    FINISHED,
    KILL,
    NOTHING,
    PRIORITY,
    REFUSAL,
    REPLACE,
    REPORT,
    SAMPLE,
    SAMPLE_REQUEST,
    STOP,
    STOP_REQUEST,
    WEIGHT_REQUEST,
    WEIGHTS,
    MpiPort,
    entries,
)
from apex.transport.mpi_replace import Newcomer, Replacements
from apex.transport.mpi_ways import Meeting
from apex.transport.publishes import Publish, answer
from apex.transport.shared import REFUSED, borrow

_MESSAGES_PER_PROGRESS = 64  # a flood of small messages must not keep the learner from training
_SPARE_PUBLISHES = 4  # beside one for each acting rank: the newest, the one being written, and the evaluator's last two


@dataclass(eq=False)
class _Sample:
    """A batch asked for: received into ``buffer`` by ``request``, once it is here, or borrowed from a replay rank of this host."""

    replay: int
    rank: int
    lent: bool
    buffer: np.ndarray | None = None
    request: MPI.Request | None = None


class MpiLearnerPort(LearnerSide, MpiPort):
    """Learner (see ``apex.ports.LearnerPort``)."""

    def __init__(self, meeting: Meeting, topology: Topology, limits: Limits, met, ranks_here: int):
        super().__init__(meeting, topology, limits, met, ranks_here)
        messages = 0 if self.peers.keys() >= set(topology.replay_ranks_range) else limits.prefetch + 1
        self._free_samples = [aligned_bytes(limits.sample_nbytes) for _ in range(messages)]
        self._requests: deque[_Sample] = deque()
        self._given_out: _Sample | None = None
        self._lendable: list[np.ndarray] | None = None
        self._free_priorities: list[np.ndarray] = []
        self._publishes: list[Publish] = []
        self._newest: Publish | None = None
        self._evaluator_publishes: deque[Publish] = deque()
        self._weight_requests: dict[int, int] = {}
        self._unfinished = set(range(1, topology.size))
        self._last_words: dict[int, np.ndarray] = {}  # by rank: announcements that go after all else
        self._replacements: Replacements | None = None
        self._starting = -1  # the rank of the process that is being started
        self._processes: list[tuple[str, int, int]] = []  # of each rank: host, process, and when that began

    def progress(self) -> None:
        """Receive what the other ranks send, answer weight requests, and while ending drop samples."""
        for _ in range(_MESSAGES_PER_PROGRESS):
            if not self._hear():
                break
        self._answer_weight_requests()
        if self._replacements is not None:
            self._replace()
        if self.stopping:
            self._return_sample()
            while self._requests and self._arrived(self._requests[0]):
                self._given_out = self._requests.popleft()
                self._return_sample()
        super().progress()
        self._send_last_words()
        self.finished = self._told_finished and not self._sends

    def request_sample(self, replay: int) -> None:
        """Ask, with a buffer for the answer at hand."""
        rank = self.topology.replay_ranks_range[replay]
        lent = rank in self.peers
        self._requests.append(_Sample(replay, rank, lent, None if lent else self._free_samples.pop()))
        self._send(NOTHING, rank, SAMPLE_REQUEST, "sample request")

    def poll_sample(self) -> tuple[int, np.ndarray] | None:
        """Return the oldest request's batch if it has arrived, and give back the one returned before."""
        self._return_sample()
        if not self._requests or not self._arrived(self._requests[0]):
            return None
        self._given_out = self._requests.popleft()
        return self._given_out.replay, self._given_out.buffer

    def _arrived(self, sample: _Sample) -> bool:
        """Whether the answer to a request is here: a message, or a batch lent by a replay rank of this host, or a refusal."""
        if not sample.lent:
            return sample.request is not None and bool(self.ways.tried(sample.request.Test))
        if not self.peers[sample.rank].has_sent():
            return False
        message = borrow(self.peers[sample.rank], lambda nbytes: nbytes == self.limits.sample_nbytes, self.refusals)
        if message is not REFUSED:
            sample.buffer = message
        return message is not REFUSED

    def _return_sample(self) -> None:
        """Free the memory of the batch that was given out last."""
        sample, self._given_out = self._given_out, None
        if sample is None:
            return
        if sample.lent:
            self.peers[sample.rank].give_back()
        else:
            self._free_samples.append(sample.buffer)

    def send_priorities(self, replay: int, message: np.ndarray) -> None:
        """Send a copy; the copies live in buffers that are reused once received."""
        copy = self._free_priorities.pop() if self._free_priorities else aligned_bytes(self.limits.priority_nbytes)
        copy[:] = message
        rank = self.topology.replay_ranks_range[replay]
        self._send(copy, rank, PRIORITY, "priority message", lambda: self._free_priorities.append(copy))

    def publish(self, message: np.ndarray) -> None:
        """Copy into a buffer nobody reads any more; a sleeping receiver holds one, never more."""
        idle = (p for p in self._publishes if not p.readers and p not in self._evaluator_publishes)
        publish = next(idle, None)
        if publish is None:
            publish = Publish(self._publish_memory(len(message)))
            self._publishes.append(publish)
        publish.message[:] = message
        self._newest = publish

    def _publish_memory(self, nbytes: int) -> np.ndarray:
        """Return memory for one more publish: such as ranks of this host read in place, while there is some."""
        if self._lendable is None:
            # One for each acting rank, wherever it is: each may hold another. Memory is taken when one is first written.
            readers, here = self.topology.num_actors + 1, self.peers.keys() - set(self.topology.replay_ranks_range)
            # Whoever takes a lost one's place may be on this host, though nobody else is.
            here = here or (self._replacements is not None and self._desk is not None)
            count, stride = readers + _SPARE_PUBLISHES if here else 0, -(-nbytes // ALIGNMENT) * ALIGNMENT
            self._lendable = list(self._desk.make_outbox(count * stride).reshape(count, stride)[:, :nbytes]) if count else []
        return self._lendable.pop() if self._lendable else aligned_bytes(nbytes)

    def announce(self, rank: int, words: np.ndarray) -> None:
        """Send a copy; while the run ends once the rank has taken all else, which this could overtake."""
        message = words.astype(np.int64).view(np.uint8)
        if self.stopping:
            self._last_words[rank] = message
        else:
            self._send(message, rank, ANNOUNCEMENT, "announcement")

    def _send_last_words(self) -> None:
        taking = {dest for _, _, dest, _ in self._sends}
        for rank in self._last_words.keys() - taking:
            self._send(self._last_words.pop(rank), rank, ANNOUNCEMENT, "announcement")

    def sent_to_evaluator(self, param_version: int) -> np.ndarray | None:
        """Return one of the last two publishes the evaluator was given."""
        messages = (p.message for p in self._evaluator_publishes)
        return next((m for m in messages if weight_header(m)[0] == param_version), None)

    def tolerate(self, replacements: Replacements, processes: list) -> None:
        """Survive the loss of acting ranks, and replace them."""
        self._replacements, self._processes = replacements, processes

    def replace(self, rank: int, about: dict) -> None:
        """Have a process started, as soon as none is being started, that is told ``about``."""
        port = {"rank": rank, "size": self.topology.size, "replay_ranks": self.topology.replay_ranks}
        self._replacements.ask(about | port | {"entries": entries(self.limits), "ranks_here": self.ranks_here})

    def awaited(self) -> set[int]:
        """Return the ranks that the end of the run still waits for: to be through, or to hear that all is done."""
        return self._unfinished | ({dest for _, _, dest, _ in self._sends} if self._told_finished else set())

    def _is_away(self, rank: int) -> bool:
        return self.ways.is_gone(rank)

    def _have_killed(self, killer: int, process: np.ndarray) -> None:
        words = np.zeros(WORDS, np.int64)
        words[: len(process)] = process
        self._send(words.view(np.uint8), killer, KILL, "word to end a process")

    def stop(self) -> None:
        """Tell every other rank."""
        if self.stopping:
            return
        self.stopping = True
        for rank in range(self.topology.size):
            if rank != LEARNER_RANK:
                self._send(NOTHING, rank, STOP, "stop")

    def _take(self, arrived: Arrived) -> None:
        source, tag = arrived.source, arrived.tag
        if self.ways.is_gone(source):  # a late report would be ahead of the counts with which a new process begins
            self._bin.swallow(arrived)
        elif tag == SAMPLE:
            self._take_sample(arrived)
        elif source == LEARNER_RANK or arrived.nbytes != self._length(tag, source):
            self._drop(arrived)
        elif tag == WEIGHT_REQUEST:
            self._take_request(source, int(arrived.take().view(np.int64)[0]))
        elif tag == REPORT:
            self._reports.append(Report(*self.topology.role(source), arrived.take().view(np.float64)))
        elif tag == ANSWER:
            self._answers.append(Answer(*self.topology.role(source), arrived.take().view(np.int64)))
        else:
            arrived.take()
            if tag == FINISHED:
                self._unfinished.discard(source)
            else:
                self.stop_requested = True

    def _take_request(self, source: int, wanted: int) -> None:
        if wanted < 0:
            self.refuse(f"a request of {self.topology.name(source)} for weights of {wanted} learner steps")
        else:
            self._weight_requests[source] = wanted

    def _length(self, tag: int, source: int) -> int | None:
        """Return the bytes of a small message that this rank may send, None where it may not."""
        if tag == WEIGHT_REQUEST and source < self.topology.evaluator_rank:
            return None
        report = 8 * len(REPORT_FIELDS[self.topology.role(source)[0]])
        lengths = {WEIGHT_REQUEST: 8, REPORT: report, ANSWER: 8 * WORDS, STOP_REQUEST: 0}
        if tag == FINISHED:
            return 0 if self.stopping else None
        return lengths.get(tag)

    def _take_sample(self, arrived: Arrived) -> None:
        """Receive a batch, or a refusal while the run ends, for the oldest request to its sender that has no answer."""
        asked = (s for s in self._requests if s.rank == arrived.source and not s.lent and s.request is None)
        sample = next(asked, None)
        if sample is None or not (arrived.nbytes == self.limits.sample_nbytes or (arrived.nbytes == len(REFUSAL) and self.stopping)):
            self._drop(arrived)
        else:
            sample.request = arrived.into(sample.buffer)

    def _answer_weight_requests(self) -> None:
        """Answer whoever asked for what is now published; while ending, answer all with nothing."""
        if not self._weight_requests:
            return
        steps = -1 if self._newest is None else weight_header(self._newest.message)[1]
        answer(self._weight_requests, steps, self._send_newest, self._refuse_weights if self.stopping else None)

    def _refuse_weights(self, rank: int) -> None:
        self._refuse(rank, WEIGHTS, "refusal of weights")

    def _send_newest(self, rank: int) -> None:
        publish = self._newest
        publish.readers += 1
        self._send_or_lend(publish.message, rank, WEIGHTS, "publish", publish.release)
        if rank == self.topology.evaluator_rank:
            self._evaluator_publishes.append(publish)
            if len(self._evaluator_publishes) > 2:
                self._evaluator_publishes.popleft()

    def _replace(self) -> None:
        """Begin what is to be started next, and greet who has joined."""
        if self.stopping:
            self._replacements.hurry()
        outcome = self._replacements.ended()
        if isinstance(outcome, Newcomer):
            self._greet(outcome)
        elif outcome is not None:
            what = LOST if self._replacements.has_started else NOT_REPLACED
            self._changes.append(Change(self._starting, what, outcome))
        if self.stopping or self._replacements.broken is not None:
            for about in self._replacements.waiting():
                self._changes.append(Change(about["rank"], NOT_REPLACED, self._replacements.broken or "the run ends"))
        about = self._replacements.next()
        if about is not None:
            self._starting = about["rank"]
            for rank in self.topology.replay_ranks_range:
                self._send(NOTHING, rank, REPLACE, "word that a process is started")
            self._replacements.begin(about)

    def _greet(self, newcomer: Newcomer) -> None:
        rank = newcomer.rank
        self.ways.join(rank, newcomer.comms)
        self._processes[rank] = newcomer.process
        if newcomer.peer is not None:
            self.peers[rank] = newcomer.peer
        self._unfinished.add(rank)
        self._changes.append(Change(rank, REPLACED, ""))
        if self.stopping:
            self._send(NOTHING, rank, STOP, "stop")

    def _lose(self, rank: int) -> None:
        super()._lose(rank)
        self._weight_requests.pop(rank, None)
        self._unfinished.discard(rank)
        if not self._told_finished:  # then all were through, and leave
            self._changes.append(Change(rank, LOST, "its process has ended"))

    def _is_open(self) -> bool:
        """Also whether a rank is not through, or a process still to join."""
        joins = self._replacements is not None and self._replacements.busy
        return bool(self._unfinished or self._last_words or joins or super()._is_open())

    def _tell_finished(self) -> None:
        """Tell all ranks that all is done, and leave when they have heard it."""
        for rank in range(1, self.topology.size):
            self._send(NOTHING, rank, DONE, "word that all is done")

    def _is_receiving(self) -> bool:
        return any(sample.request is not None for sample in self._requests)

    def _open_receives(self) -> list[str]:
        return [f"a sample batch from {self.topology.name(sample.rank)}" for sample in self._requests]
