"""The roles over MPI: matched probes and synchronous non-blocking sends on a private communicator.

Every message is sent with Issend, which completes when the receiver has taken it. That makes an
unfinished send a credit in use (nothing queues up unseen), keeps each buffer alive until its
completion is seen, and makes the end exact: a rank enters a non-blocking barrier once all its sends
are complete, and keeps receiving until the barrier is (Hoefler et al. 2010, the NBX algorithm).
"""

from __future__ import annotations

from collections import deque

import numpy as np
from mpi4py import MPI

from apex.metrics import MAX_REPORT
from apex.ports import IntakeEvent, PriorityEvent, Report, SampleRequestEvent
from apex.schema import Limits, aligned_bytes, weight_header
from apex.topology import ACTOR, EVALUATOR, LEARNER, LEARNER_RANK, REPLAY, Topology
from apex.transport.credits import IntakeCredits

INTAKE, SAMPLE_REQUEST, SAMPLE, PRIORITY, WEIGHT_REQUEST, WEIGHTS, REPORT, STOP, STOP_REQUEST = range(1, 10)
_NOTHING = np.zeros(0, np.uint8)
_MESSAGES_PER_PROGRESS = 64  # a flood of small messages must not keep the learner from training


def make_port(comm: MPI.Comm, topology: Topology, limits: Limits) -> MpiPort:
    """Return this rank's port. Collective over ``comm``, which must have ``topology.size`` ranks."""
    kinds = {LEARNER: MpiLearnerPort, REPLAY: MpiReplayPort, EVALUATOR: MpiActorPort, ACTOR: MpiActorPort}
    role, _ = topology.role(comm.rank)
    return kinds[role](comm.Dup(), topology, limits)


class MpiPort:
    """What every role may ask (see ``apex.ports.Port``)."""

    def __init__(self, comm: MPI.Comm, topology: Topology, limits: Limits):
        self.comm, self.topology, self.limits = comm, topology, limits
        self.role, self.index = topology.role(comm.rank)
        self._sends: list[tuple[MPI.Request, str, object, object]] = []
        self._stop_receive: MPI.Request | None = None
        self._finishing, self._barrier, self.finished = False, None, False
        self._report, self._report_free = np.zeros(MAX_REPORT), True
        self._asked_to_stop = False
        self.stopping = False
        if comm.rank != LEARNER_RANK:
            self._stop_receive = comm.Irecv([_NOTHING, MPI.BYTE], LEARNER_RANK, STOP)

    def progress(self) -> None:
        """Complete sends, notice the end, and step towards the final barrier."""
        self._complete_sends()
        if self._stop_receive is not None and self._stop_receive.Test():
            self._stop_receive, self.stopping = None, True
        if self._sends or self._open_receives():
            return
        if self._barrier is not None:
            self.finished = self.finished or self._barrier.Test()
        elif self._finishing:
            self._barrier = self.comm.Ibarrier()

    def send_report(self, vector: np.ndarray) -> bool:
        """Send the counters unless the last report is still on its way."""
        if not self._report_free:
            return False
        self._report[: len(vector)] = vector
        self._report_free = False
        self._send(self._report[: len(vector)].view(np.uint8), LEARNER_RANK, REPORT, "report", self._free_report)
        return True

    def request_stop(self) -> None:
        """Ask the learner once."""
        if not self._asked_to_stop:
            self._asked_to_stop = True
            self._send(_NOTHING, LEARNER_RANK, STOP_REQUEST, "stop request")

    def finish(self) -> None:
        """Enter the barrier as soon as everything of this rank has been received."""
        self._finishing = True

    def waits_for(self) -> str:
        """Name the messages of this rank that are not complete."""
        open_sends = [f"{self.topology.name(dest)} to take a {what}" for _, what, dest, _ in self._sends]
        parts = open_sends + self._open_receives()
        return "; ".join(parts[:4]) or ("the other ranks to finish" if self._barrier is not None else "messages")

    def _send(self, message: np.ndarray, dest: int, tag: int, what: str, done=None) -> None:
        """Send uint8 ``message``; it is kept alive, and ``done()`` called, when the receiver has it."""
        request = self.comm.Issend([message, MPI.BYTE], dest, tag)
        self._sends.append((request, what, dest, done))

    def _complete_sends(self) -> None:
        if not self._sends:
            return
        still_open = []
        for entry in self._sends:
            if not entry[0].Test():
                still_open.append(entry)
            elif entry[3] is not None:
                entry[3]()
        self._sends = still_open

    def _open_receives(self) -> list[str]:
        """Name what this rank has asked for and not yet been given; it cannot leave before."""
        return []

    def _free_report(self) -> None:
        self._report_free = True

    def _receive(self, message: MPI.Message, status: MPI.Status, into: np.ndarray) -> np.ndarray:
        """Receive a matched small message into the front of ``into``; return that part."""
        part = into[: status.Get_count(MPI.BYTE)]
        message.Recv([part, MPI.BYTE])
        return part


class MpiActorPort(MpiPort):
    """Actor and evaluator (see ``apex.ports.ActorPort``)."""

    def __init__(self, comm: MPI.Comm, topology: Topology, limits: Limits):
        super().__init__(comm, topology, limits)
        self._weights: MPI.Request | None = None
        self._credits = IntakeCredits(topology.replay_ranks, self.index, limits.intake_in_flight)
        self._completed: list[int] = []

    def request_weights(self, min_learner_steps: int, into: np.ndarray) -> None:
        """Post the receive, then ask."""
        if self._weights is not None or self.stopping:
            return
        self._weights = self.comm.Irecv([into, MPI.BYTE], LEARNER_RANK, WEIGHTS)
        wanted = np.array([min_learner_steps], np.int64)
        self._send(wanted.view(np.uint8), LEARNER_RANK, WEIGHT_REQUEST, "request for weights")

    def poll_weights(self) -> bool:
        """Whether the publish has arrived; an empty answer means that the run is ending."""
        status = MPI.Status()
        if self._weights is None or not self._weights.Test(status):
            return False
        self._weights = None
        return status.Get_count(MPI.BYTE) > 0

    def can_send_intake(self) -> bool:
        """Whether fewer than ``actor.in_flight`` batches are on the wire to some replay rank."""
        return self._credits.free()

    def send_intake(self, token: int, message: np.ndarray) -> None:
        """Send to the next replay rank that has a free credit."""
        replay = self._credits.take()
        dest = self.topology.replay_ranks_range[replay]
        self._send(message, dest, INTAKE, "intake batch", lambda: self._intake_done(token, replay))

    def completed_intake(self) -> list[int]:
        """Return the tokens of received batches."""
        done, self._completed = self._completed, []
        return done

    def progress(self) -> None:
        """Also take the answer to an open weight request while the run ends."""
        if self.stopping:
            self.poll_weights()
        super().progress()

    def _intake_done(self, token: int, replay: int) -> None:
        self._credits.give_back(replay)
        self._completed.append(token)

    def _open_receives(self) -> list[str]:
        return [] if self._weights is None else [f"weights from {self.topology.name(LEARNER_RANK)}"]


class MpiReplayPort(MpiPort):
    """Replay rank (see ``apex.ports.ReplayPort``)."""

    def __init__(self, comm: MPI.Comm, topology: Topology, limits: Limits):
        super().__init__(comm, topology, limits)
        self._free_samples = [aligned_bytes(limits.sample_nbytes) for _ in range(limits.prefetch)]
        self._priorities = aligned_bytes(limits.priority_nbytes)
        self._arriving_priorities: tuple[MPI.Request, int] | None = None
        self._arriving: tuple[MPI.Request, int, int] | None = None

    def poll(self, landing: np.ndarray | None):
        """Return the learner's messages first, then intake received straight into ``landing``."""
        event = self._poll_learner()
        return self._poll_intake(landing) if event is None else event

    def sample_buffer(self) -> np.ndarray | None:
        """Take a buffer whose last batch the learner has received; ``send_sample`` is to follow."""
        return self._free_samples.pop() if self._free_samples else None

    def send_sample(self, buffer: np.ndarray) -> None:
        """Send the filled buffer."""
        self._send(buffer, LEARNER_RANK, SAMPLE, "sample batch", lambda: self._free_samples.append(buffer))

    def refuse_sample(self) -> None:
        """Send an empty answer."""
        self._send(_NOTHING, LEARNER_RANK, SAMPLE, "refusal of a sample")

    def _poll_learner(self):
        if self._arriving_priorities is None:
            status = MPI.Status()
            message = self.comm.Improbe(LEARNER_RANK, MPI.ANY_TAG, status)
            if message is None:
                return None
            if status.tag == SAMPLE_REQUEST:
                self._receive(message, status, _NOTHING)
                return SampleRequestEvent()
            # Large enough to need the learner's help on its way: a blocking receive would wait for a training step.
            self._arriving_priorities = message.Irecv([self._priorities, MPI.BYTE]), status.Get_count(MPI.BYTE)
        request, nbytes = self._arriving_priorities
        if not request.Test():
            return None
        self._arriving_priorities = None
        return PriorityEvent(self._priorities[:nbytes])

    def _poll_intake(self, landing: np.ndarray | None) -> IntakeEvent | None:
        if self._arriving is None and landing is not None:
            status = MPI.Status()
            message = self.comm.Improbe(MPI.ANY_SOURCE, INTAKE, status)
            if message is not None:
                nbytes = status.Get_count(MPI.BYTE)
                self._arriving = message.Irecv([landing[:nbytes], MPI.BYTE]), nbytes, status.source
        if self._arriving is None or not self._arriving[0].Test():
            return None
        _, nbytes, source = self._arriving
        self._arriving = None
        return IntakeEvent(nbytes, self.topology.role(source)[1])

    def _open_receives(self) -> list[str]:
        """Name what has been taken but not yet handed out: its sender may already be done with it."""
        arriving = [] if self._arriving is None else [f"an intake batch from {self.topology.name(self._arriving[2])}"]
        return arriving if self._arriving_priorities is None else [f"priorities from {self.topology.name(LEARNER_RANK)}", *arriving]


class _Publish:
    """A weight message and the number of sends that still read it."""

    def __init__(self, nbytes: int):
        self.message, self.readers = aligned_bytes(nbytes), 0

    def release(self) -> None:
        self.readers -= 1


class MpiLearnerPort(MpiPort):
    """Learner (see ``apex.ports.LearnerPort``)."""

    def __init__(self, comm: MPI.Comm, topology: Topology, limits: Limits):
        super().__init__(comm, topology, limits)
        self._free_samples = [aligned_bytes(limits.sample_nbytes) for _ in range(limits.prefetch + 1)]
        self._requests: deque[tuple[int, MPI.Request, np.ndarray]] = deque()
        self._given_out: np.ndarray | None = None
        self._free_priorities: list[np.ndarray] = []
        self._publishes: list[_Publish] = []
        self._newest: _Publish | None = None
        self._evaluator_publishes: deque[_Publish] = deque()
        self._weight_requests: dict[int, int] = {}
        self._reports: list[Report] = []
        self._small = np.zeros(8 * MAX_REPORT, np.uint8)
        self.stop_requested = False

    def progress(self) -> None:
        """Receive what the other ranks send, answer weight requests, and while ending drop samples."""
        self._receive_all()
        self._answer_weight_requests()
        while self.stopping and self._requests and self._requests[0][1].Test():
            self._requests.popleft()
        super().progress()

    def request_sample(self, replay: int) -> None:
        """Post the receive, then ask."""
        buffer = self._free_samples.pop()
        rank = self.topology.replay_ranks_range[replay]
        self._requests.append((replay, self.comm.Irecv([buffer, MPI.BYTE], rank, SAMPLE), buffer))
        self._send(_NOTHING, rank, SAMPLE_REQUEST, "sample request")

    def poll_sample(self) -> tuple[int, np.ndarray] | None:
        """Return the oldest request's batch if it has arrived; reuse the buffer returned before it."""
        if not self._requests or not self._requests[0][1].Test():
            return None
        replay, _, buffer = self._requests.popleft()
        if self._given_out is not None:
            self._free_samples.append(self._given_out)
        self._given_out = buffer
        return replay, buffer

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
            publish = _Publish(len(message))
            self._publishes.append(publish)
        publish.message[:] = message
        self._newest = publish

    def poll_reports(self) -> list[Report]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def sent_to_evaluator(self, param_version: int) -> np.ndarray | None:
        """Return one of the last two publishes the evaluator was given."""
        messages = (p.message for p in self._evaluator_publishes)
        return next((m for m in messages if weight_header(m)[0] == param_version), None)

    def send_report(self, vector: np.ndarray) -> bool:
        """The learner's own report needs no message."""
        self._reports.append(Report(self.role, self.index, vector.copy()))
        return True

    def request_stop(self) -> None:
        """A signal arrived at the learner itself."""
        self.stop_requested = True

    def stop(self) -> None:
        """Tell every other rank."""
        if self.stopping:
            return
        self.stopping = True
        for rank in range(self.topology.size):
            if rank != LEARNER_RANK:
                self._send(_NOTHING, rank, STOP, "stop")

    def _receive_all(self) -> None:
        status = MPI.Status()
        for _ in range(_MESSAGES_PER_PROGRESS):
            message = self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is None:
                return
            self._dispatch(status.tag, status.source, self._receive(message, status, self._small))

    def _dispatch(self, tag: int, source: int, payload: np.ndarray) -> None:
        if tag == WEIGHT_REQUEST:
            self._weight_requests[source] = int(payload.view(np.int64)[0])
        elif tag == REPORT:
            self._reports.append(Report(*self.topology.role(source), payload.view(np.float64).copy()))
        elif tag == STOP_REQUEST:
            self.stop_requested = True

    def _answer_weight_requests(self) -> None:
        """Answer whoever asked for what is now published; while ending, answer all with nothing."""
        if not self._weight_requests:
            return
        steps = -1 if self._newest is None else weight_header(self._newest.message)[1]
        for rank, wanted in list(self._weight_requests.items()):
            if self.stopping:
                self._send(_NOTHING, rank, WEIGHTS, "refusal of weights")
            elif steps >= wanted:
                self._send_publish(rank, self._newest)
            else:
                continue
            del self._weight_requests[rank]

    def _send_publish(self, rank: int, publish: _Publish) -> None:
        publish.readers += 1
        self._send(publish.message, rank, WEIGHTS, "publish", publish.release)
        if rank == self.topology.evaluator_rank:
            self._evaluator_publishes.append(publish)
            if len(self._evaluator_publishes) > 2:
                self._evaluator_publishes.popleft()

    def _open_receives(self) -> list[str]:
        ranks = (self.topology.replay_ranks_range[replay] for replay, _, _ in self._requests)
        return [f"a sample batch from {self.topology.name(rank)}" for rank in ranks]
