"""The ports of ``apex.ports`` over a wire that carries pickled Python objects. Only for comparison.

A wire offers ``send(dest, kind, content, done)``, which pickles at once and calls ``done()`` when the
receiver has taken the object; ``receive(intake)``, which returns ``(source, kind, content)`` of an
intake batch or of anything else, or None; ``open_sends()``, the sends not yet taken, in words;
``progress()``; and ``close()``.

The end: every rank whose sends have been taken tells the learner, and the learner, once all have told,
lets everybody leave.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import numpy as np

from apex.ports import Answer, IntakeEvent, PriorityEvent, Report, SampleRequestEvent, Waking
from apex.refusals import Refusals, Refusing
from apex.schema import Limits, aligned_bytes, weight_header
from apex.topology import ACTOR, EVALUATOR, LEARNER, LEARNER_RANK, REPLAY, Topology
from apex.transport.credits import IntakeCredits
from apex.transport.learner_side import LearnerSide
from apex.transport.pickled_form import Form


class Kind(IntEnum):
    """What a message is."""

    INTAKE, REQUEST, SAMPLE, PRIORITIES, WEIGHT_REQUEST, WEIGHTS, REPORT, STOP, STOP_REQUEST, FINISHED, LEAVE = range(1, 12)
    ANNOUNCEMENT, ANSWER = 12, 13


def make_port(wire, rank: int, topology: Topology, limits: Limits, form: Form) -> PickledPort:
    """Return the port of a rank over ``wire``."""
    kinds = {LEARNER: PickledLearnerPort, REPLAY: PickledReplayPort, EVALUATOR: PickledActorPort, ACTOR: PickledActorPort}
    return kinds[topology.role(rank)[0]](wire, rank, topology, limits, form)


class PickledPort(Refusing):
    """What every role may ask (see ``apex.ports.Port``)."""

    def __init__(self, wire, rank: int, topology: Topology, limits: Limits, form: Form):
        self.ranks_here = topology.size  # these transports are for one host
        self.wire, self.rank, self.topology, self.limits, self.form = wire, rank, topology, limits, form
        self.role, self.index = topology.role(rank)
        self.refusals = Refusals(topology.name(rank))
        self.stopping = self.finished = False
        self._finishing = self._told_finished = self._asked_to_stop = False
        self._report_free = True
        self._announcement: np.ndarray | None = None

    def waking(self) -> Waking:
        """Nothing wakes this rank but its own clock."""
        return Waking(moving=lambda: bool(self.wire.open_sends()))

    def progress(self) -> None:
        """Take what has arrived, but for intake; tell of this rank's end."""
        self.wire.progress()
        while (arrived := self.wire.receive(intake=False)) is not None:
            self._take(*arrived)
        if self._finishing and not self._told_finished and not self.wire.open_sends() and not self._open_receives():
            self._told_finished = True
            self._tell_finished()

    def send_report(self, vector: np.ndarray) -> bool:
        """Send the counters unless the last report is still on its way."""
        if not self._report_free:
            return False
        self._report_free = False
        self.wire.send(LEARNER_RANK, Kind.REPORT, vector.copy(), self._free_report)
        return True

    def poll_announcement(self) -> np.ndarray | None:
        """Return what the learner has announced."""
        announcement, self._announcement = self._announcement, None
        return announcement

    def answer(self, words: np.ndarray) -> None:
        """Send a copy to the learner."""
        self.wire.send(LEARNER_RANK, Kind.ANSWER, words.copy())

    def request_stop(self) -> None:
        """Ask the learner once, and not while the run ends already: it may be gone."""
        if not self._asked_to_stop and not self.stopping:
            self._asked_to_stop = True
            self.wire.send(LEARNER_RANK, Kind.STOP_REQUEST, None)

    def finish(self) -> None:
        """Tell the learner as soon as everything of this rank has been taken."""
        self._finishing = True

    def waits_for(self) -> str:
        """Name what is not complete."""
        return "; ".join((self.wire.open_sends() + self._open_receives())[:4]) or "the other ranks"

    def close(self) -> None:
        """Free what the wire holds."""
        self.wire.close()

    def _take(self, source: int, kind: int, content) -> None:
        """Take one message; a role's own kinds come first."""
        if kind == Kind.STOP:
            self.stopping = True
        elif kind == Kind.ANNOUNCEMENT:
            self._announcement = content
        elif kind == Kind.LEAVE:
            self.finished = True

    def _tell_finished(self) -> None:
        self.wire.send(LEARNER_RANK, Kind.FINISHED, None)

    def _open_receives(self) -> list[str]:
        """Name what this rank has asked for and not yet been given."""
        return []

    def _free_report(self) -> None:
        self._report_free = True


class PickledActorPort(PickledPort):
    """Actor and evaluator (see ``apex.ports.ActorPort``)."""

    def __init__(self, *args):
        super().__init__(*args)
        self._credits = IntakeCredits(self.topology.replay_ranks, self.index, self.limits.intake_in_flight)
        self._completed: list[int] = []
        self._into: np.ndarray | None = None
        self._weights_arrived = False

    def request_weights(self, min_learner_steps: int, into: np.ndarray) -> None:
        """Ask for the newest publish of at least that many learner steps."""
        if self._into is None and not self.stopping:
            self._into = into
            self.wire.send(LEARNER_RANK, Kind.WEIGHT_REQUEST, min_learner_steps)

    def poll_weights(self) -> bool:
        """Whether the publish has arrived since the last call."""
        arrived, self._weights_arrived = self._weights_arrived, False
        return arrived

    def intake_memory(self, rows: int, nbytes: int) -> np.ndarray:
        """Return plain memory."""
        return aligned_bytes(rows, nbytes)

    def can_send_intake(self) -> bool:
        """Whether a credit is free."""
        return self._credits.free()

    def send_intake(self, token: int, message: np.ndarray) -> None:
        """Pickle the batch and send it to the next replay rank that has a free credit."""
        replay = self._credits.take()
        dest = self.topology.replay_ranks_range[replay]
        self.wire.send(dest, Kind.INTAKE, self.form.intake_out(message), lambda: self._intake_done(token, replay))

    def completed_intake(self) -> list[int]:
        """Return the tokens of received batches."""
        done, self._completed = self._completed, []
        return done

    def _intake_done(self, token: int, replay: int) -> None:
        self._credits.give_back(replay)
        self._completed.append(token)

    def _take(self, source: int, kind: int, content) -> None:
        if kind != Kind.WEIGHTS:
            super()._take(source, kind, content)
            return
        if content is not None:
            self._into[:] = content
            self._weights_arrived = True
        self._into = None

    def _open_receives(self) -> list[str]:
        return [] if self._into is None else ["weights from the learner"]


class PickledReplayPort(PickledPort):
    """Replay rank (see ``apex.ports.ReplayPort``)."""

    def __init__(self, *args):
        super().__init__(*args)
        self._free_samples = [aligned_bytes(self.limits.sample_nbytes) for _ in range(self.limits.prefetch)]
        self._priorities = aligned_bytes(self.limits.priority_nbytes)
        self._events: deque = deque()
        self._intake_first = False

    def poll(self, landing: np.ndarray | None):
        """Return the learner's messages and intake in turn."""
        self._intake_first = not self._intake_first
        event = self._poll_intake(landing) if self._intake_first else self._poll_learner()
        if event is not None:
            return event
        return self._poll_learner() if self._intake_first else self._poll_intake(landing)

    def sample_buffer(self) -> np.ndarray | None:
        """Return a buffer that is not being pickled or sent."""
        return self._free_samples.pop() if self._free_samples else None

    def send_sample(self, buffer: np.ndarray) -> None:
        """Pickle the batch row by row and send it."""
        content = self.form.sample_out(buffer)
        self.wire.send(LEARNER_RANK, Kind.SAMPLE, content, lambda: self._free_samples.append(buffer))

    def refuse_sample(self) -> None:
        """Answer with nothing."""
        self.wire.send(LEARNER_RANK, Kind.SAMPLE, None)

    @property
    def quiet(self) -> bool:
        """Whether no message of the learner waits."""
        return not self._events

    def _poll_learner(self):
        if not self._events:
            return None
        kind, content = self._events.popleft()
        if kind == Kind.REQUEST:
            return SampleRequestEvent()
        self.form.priorities_in(content, self._priorities)
        return PriorityEvent(self._priorities)

    def _poll_intake(self, landing: np.ndarray | None) -> IntakeEvent | None:
        """Take a batch, unpickled, and put it into ``landing``."""
        arrived = None if landing is None else self.wire.receive(intake=True)
        if arrived is None:
            return None
        source, _, content = arrived
        return IntakeEvent(self.form.intake_in(content, landing), self.topology.role(source)[1])

    def _take(self, source: int, kind: int, content) -> None:
        if kind in (Kind.REQUEST, Kind.PRIORITIES):
            self._events.append((kind, content))
        else:
            super()._take(source, kind, content)

    def _open_receives(self) -> list[str]:
        return ["its own turn to take the learner's messages"] if self._events else []


class PickledLearnerPort(LearnerSide, PickledPort):
    """Learner (see ``apex.ports.LearnerPort``)."""

    def __init__(self, *args):
        super().__init__(*args)
        self._requests: deque[int] = deque()
        self._arrived = [deque() for _ in range(self.topology.replay_ranks)]
        self._sample = aligned_bytes(self.limits.sample_nbytes)
        self._newest: np.ndarray | None = None
        self._evaluator_publishes: deque[np.ndarray] = deque(maxlen=2)
        self._weight_requests: dict[int, int] = {}
        self._unfinished = set(range(1, self.topology.size))
        self._leaving = False

    def progress(self) -> None:
        """Also answer weight requests, drop samples while ending, and let everybody leave."""
        super().progress()
        self._answer_weight_requests()
        while self.stopping and self._requests and self._arrived[self._requests[0]]:
            self._arrived[self._requests.popleft()].popleft()
        if self._told_finished and not self._unfinished:
            self._leave()

    def request_sample(self, replay: int) -> None:
        """Ask a replay rank for one more batch."""
        self._requests.append(replay)
        self.wire.send(self.topology.replay_ranks_range[replay], Kind.REQUEST, None)

    def poll_sample(self) -> tuple[int, np.ndarray] | None:
        """Return the oldest request's batch, stacked, if it has arrived."""
        if not self._requests or not self._arrived[self._requests[0]]:
            return None
        replay = self._requests.popleft()
        self.form.sample_in(self._arrived[replay].popleft(), self._sample)
        return replay, self._sample

    def send_priorities(self, replay: int, message: np.ndarray) -> None:
        """Send keys and priorities."""
        self.wire.send(self.topology.replay_ranks_range[replay], Kind.PRIORITIES, self.form.priorities_out(message))

    def publish(self, message: np.ndarray) -> None:
        """Keep a copy as the newest."""
        self._newest = message.copy()

    def announce(self, rank: int, words: np.ndarray) -> None:
        """Send a copy."""
        self.wire.send(rank, Kind.ANNOUNCEMENT, words.copy())

    def awaited(self) -> set[int]:
        """Return the ranks that are not through."""
        return set(self._unfinished)

    def sent_to_evaluator(self, param_version: int) -> np.ndarray | None:
        """Return one of the last two publishes the evaluator was given."""
        return next((m for m in self._evaluator_publishes if weight_header(m)[0] == param_version), None)

    def stop(self) -> None:
        """Tell every other rank."""
        if not self.stopping:
            self.stopping = True
            self._send_all(Kind.STOP)

    def _take(self, source: int, kind: int, content) -> None:
        if kind == Kind.SAMPLE:
            self._arrived[self.topology.role(source)[1]].append(content)
        elif kind == Kind.REPORT:
            self._reports.append(Report(*self.topology.role(source), content))
        elif kind == Kind.ANSWER:
            self._answers.append(Answer(*self.topology.role(source), content))
        elif kind == Kind.WEIGHT_REQUEST:
            self._weight_requests[source] = content
        elif kind == Kind.STOP_REQUEST:
            self.stop_requested = True
        elif kind == Kind.FINISHED:
            self._unfinished.discard(source)

    def _answer_weight_requests(self) -> None:
        """Answer whoever asked for what is now published; while ending, answer all with nothing."""
        steps = -1 if self._newest is None else weight_header(self._newest)[1]
        for rank, wanted in list(self._weight_requests.items()):
            if not self.stopping and steps < wanted:
                continue
            del self._weight_requests[rank]
            if not self.stopping and rank == self.topology.evaluator_rank:
                self._evaluator_publishes.append(self._newest)
            self.wire.send(rank, Kind.WEIGHTS, None if self.stopping else self._newest)

    def _send_all(self, kind: Kind) -> None:
        for rank in range(self.topology.size):
            if rank != LEARNER_RANK:
                self.wire.send(rank, kind, None)

    def _tell_finished(self) -> None:
        """The learner knows of itself."""

    def _leave(self) -> None:
        if not self._leaving:
            self._leaving = True
            self._send_all(Kind.LEAVE)
        self.finished = not self.wire.open_sends()

    def _open_receives(self) -> list[str]:
        return [f"a sample batch from replay {replay}" for replay in self._requests]
