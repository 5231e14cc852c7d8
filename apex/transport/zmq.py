"""The roles over ZeroMQ: the same messages and the same limits in flight as over MPI.

The learner binds a ROUTER for all other ranks, each replay rank one for the actors; they connect a
DEALER each (see ``zmq_link``). A message on a socket is read as soon as its rank looks, with one
exception: intake, which a replay rank leaves where it is until it has a place for it. Intake batches
and reports are acknowledged once they are taken, samples and weights are only sent when asked for, so
that nothing piles up in front of a rank that is slow, asleep or stopped.

The end is exact because messages between two ranks keep their order. A rank whose sends are taken and
whose questions are answered tells the learner that it has ``FINISHED``, after all else that it sent; once
all ranks have and all samples are in, the learner tells them that the run is ``DONE``, after all else
that it sent.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from apex.ports import IntakeEvent, PriorityEvent, SampleRequestEvent
from apex.schema import Limits, aligned_bytes
from apex.topology import ACTOR, EVALUATOR, LEARNER, LEARNER_RANK, REPLAY, Topology
from apex.transport.credits import IntakeCredits
from apex.transport.zmq_learner import ZmqLearnerPort
from apex.transport.zmq_link import Message
from apex.transport.zmq_port import (
    HELLO,
    INTAKE,
    INTAKE_TAKEN,
    NO_SAMPLE,
    NO_WEIGHTS,
    PRIORITY,
    SAMPLE,
    SAMPLE_REQUEST,
    WEIGHT_REQUEST,
    WEIGHTS,
    WELCOME,
    ZmqMemberPort,
    ZmqPort,
)
from apex.transport.zmq_world import World


def make_port(world: World, topology: Topology, limits: Limits, command: list[str] | None = None) -> ZmqPort:
    """Return this rank's port. Collective over ``world``, which must have ``topology.size`` ranks.

    With ``command``, of which only that it is there matters, the loss of an acting rank is survived: ``launch.spawn``
    starts a process in its place.
    """
    kinds = {LEARNER: ZmqLearnerPort, REPLAY: ZmqReplayPort, EVALUATOR: ZmqActorPort, ACTOR: ZmqActorPort}
    port = kinds[topology.role(world.rank)[0]](world, topology, limits)
    if command is not None:
        port.tolerate(world)
    return port


def meet(joining: World, topology: Topology) -> World:
    """Return what :func:`join` needs of a process that takes the place of an acting rank that was lost."""
    return joining


def join(met: World, topology: Topology, limits: Limits) -> ZmqPort:
    """Return the port of that process."""
    return ZmqActorPort(met, topology, limits)


class ZmqActorPort(ZmqMemberPort):
    """Actor and evaluator (see ``apex.ports.ActorPort``)."""

    def __init__(self, world: World, topology: Topology, limits: Limits):
        super().__init__(world, topology, limits)
        self._into: np.ndarray | None = None  # where the weights asked for are to go
        self._arrived = False
        self._replays = [self._links[rank] for rank in self._called()[1:]]
        self._credits = IntakeCredits(topology.replay_ranks, self.index, limits.intake_in_flight)
        self._in_flight: list[deque[int]] = [deque() for _ in self._replays]  # tokens, oldest first
        self._completed: list[int] = []

    def progress(self) -> None:
        """Also hear which batches have been taken."""
        for replay, link in enumerate(self._replays):
            while (message := link.receive()) is not None:
                self._intake_taken(replay, message)
        super().progress()

    def request_weights(self, min_learner_steps: int, into: np.ndarray) -> None:
        """Ask, and note where they are to go."""
        if self._into is None and not self.stopping:
            self._into = into
            self._learner.send(WEIGHT_REQUEST, min_learner_steps)

    def poll_weights(self) -> bool:
        """Whether the publish has arrived."""
        if not self._arrived:
            return False
        self._arrived, self._into = False, None
        return True

    def intake_memory(self, rows: int, nbytes: int) -> np.ndarray:
        """Return plain memory: large messages leave from wherever they are."""
        return aligned_bytes(rows, nbytes)

    def can_send_intake(self) -> bool:
        """Whether fewer than ``actor.in_flight`` batches are on the wire to some replay rank."""
        return self._credits.free()

    def send_intake(self, token: int, message: np.ndarray) -> None:
        """Send to the next replay rank that has a free credit."""
        replay = self._credits.take()
        self._in_flight[replay].append(token)
        self._replays[replay].send(INTAKE, token, message)

    def completed_intake(self) -> list[int]:
        """Return the tokens of received batches."""
        done, self._completed = self._completed, []
        return done

    def _called(self) -> list[int]:
        return [LEARNER_RANK, *(self.topology.replay_ranks_range if self.role == ACTOR else [])]

    def _intake_taken(self, replay: int, message: Message) -> None:
        in_flight = self._in_flight[replay]
        if message.kind != INTAKE_TAKEN or message.has_payload or not in_flight or message.arg != in_flight[0]:
            self._replays[replay].refuse()
            return
        self._credits.give_back(replay)
        self._completed.append(in_flight.popleft())

    def _hear(self, message: Message) -> None:
        asked = self._into is not None and not self._arrived
        if message.kind == WEIGHTS and message.has_payload and asked:
            nbytes = self._learner.take_into(self._into)
            if nbytes == len(self._into):
                self._arrived = True
            elif nbytes is not None:
                self.refuse(f"weights of {nbytes} bytes where {len(self._into)} are expected")
        elif message.kind == NO_WEIGHTS and not message.has_payload and asked and self.stopping:
            self._into = None  # the run is ending
        else:
            super()._hear(message)

    def _open(self) -> list[str]:
        weights = [f"weights from {self.topology.name(LEARNER_RANK)}"] if self._into is not None and not self._arrived else []
        in_flight = sum(map(len, self._in_flight))
        intake = [f"the replay ranks to take {in_flight} intake batches"] if in_flight else []
        return super()._open() + weights + intake


class ZmqReplayPort(ZmqMemberPort):
    """Replay rank (see ``apex.ports.ReplayPort``)."""

    def __init__(self, world: World, topology: Topology, limits: Limits):
        super().__init__(world, topology, limits)
        self._free_samples = [aligned_bytes(limits.sample_nbytes) for _ in range(limits.prefetch)]
        self._leaving: list[tuple[object, np.ndarray]] = []  # (what tells when it has left, sample buffer)
        self._learners_turn = False
        self._events: deque = deque()  # from the learner, no more than it may have in flight
        self._asked = 0  # sample requests that have not been answered

    def poll(self, landing: np.ndarray | None):
        """Return a message of the learner or intake received straight into ``landing``, by turns where there are both."""
        self._learners_turn = not self._learners_turn
        if self._events and self._learners_turn:
            return self._events.popleft()
        event = self._poll_intake(landing)
        return self._events.popleft() if event is None and self._events else event

    def _poll_intake(self, landing: np.ndarray | None) -> IntakeEvent | None:
        message = None if landing is None else self._hub.receive()
        if message is None:
            return None
        if message.kind == HELLO and not message.has_payload and self._hub.may_lose:  # of a process that has taken a lost one's place
            return self._hub.send(message.rank, WELCOME)
        if message.kind != INTAKE or not message.has_payload:
            return self._hub.refuse()
        nbytes = self._hub.take_into(landing)
        if nbytes is None:
            return None
        self._hub.send(message.rank, INTAKE_TAKEN, message.arg)
        return IntakeEvent(nbytes, self.topology.role(message.rank)[1])

    def sample_buffer(self) -> np.ndarray | None:
        """Take a buffer whose last batch has left; ``send_sample`` is to follow."""
        self._free_samples += [buffer for tracker, buffer in self._leaving if tracker.done]
        self._leaving = [entry for entry in self._leaving if not entry[0].done]
        return self._free_samples.pop() if self._free_samples else None

    def send_sample(self, buffer: np.ndarray) -> None:
        """Send the filled buffer."""
        self._asked -= 1
        tracker = self._learner.send(SAMPLE, 0, buffer, track=True)
        if tracker is None:
            self._free_samples.append(buffer)
        else:
            self._leaving.append((tracker, buffer))

    def refuse_sample(self) -> None:
        """Send an empty answer."""
        self._asked -= 1
        self._learner.send(NO_SAMPLE)

    @property
    def quiet(self) -> bool:
        """Whether no message of the learner waits."""
        return not self._events

    def _callers(self) -> tuple[list[int], int | None]:
        return list(self.topology.actor_ranks), self.limits.intake_nbytes

    def _hear(self, message: Message) -> None:
        if message.kind == SAMPLE_REQUEST and not message.has_payload and self._asked < self.limits.prefetch:
            self._asked += 1
            self._events.append(SampleRequestEvent())
        elif message.kind == PRIORITY and message.has_payload:
            priorities = self._learner.take(self.limits.priority_nbytes)
            if priorities is not None:
                self._events.append(PriorityEvent(priorities))
        else:
            super()._hear(message)

    def _open(self) -> list[str]:
        return super()._open() + ["its own messages to be handled"] * bool(self._events)
