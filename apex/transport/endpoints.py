"""The ports of ``apex.ports``, written once, over any wire."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from apex.ports import IntakeEvent, PriorityEvent, SampleRequestEvent
from apex.schema import Limits, align
from apex.topology import ACTOR, LEARNER_RANK, Topology
from apex.transport.endpoint import Endpoint
from apex.transport.weights import Relay, request_message
from apex.transport.wire import Kind, Received, Sent, Wire

_INTAKE, _FROM_LEARNER = frozenset([Kind.INTAKE]), frozenset([Kind.SAMPLE_REQUEST, Kind.PRIORITY])
_ALL = _INTAKE | _FROM_LEARNER
_OF_WEIGHTS = frozenset([Kind.WEIGHT_REQUEST, Kind.WEIGHTS])
_NOTHING = np.zeros(0, np.uint8)
_REJECTS_EVERY_S = 0.005


class ActorEndpoint(Endpoint):
    """Actor and evaluator (see ``apex.ports.ActorPort``)."""

    def __init__(self, wire: Wire, topology: Topology, limits: Limits):
        self._serves, self._weights_from = _relay_of(wire, topology)
        super().__init__(wire, topology, limits)
        self._relay = Relay(wire, self._serves) if self._serves else None
        self._is_waiting = self._has_weights = False
        self._into: np.ndarray | None = None  # where the weights asked for are to go
        self._arriving: Received | None = None
        self._rejects_at = 0.0
        self._credits = IntakeCredits(topology.replay_ranks, self.index, limits.intake_in_flight)
        self._completed: list[int] = []

    def request_weights(self, min_learner_steps: int, into: np.ndarray) -> None:
        """Request a publish of at least so many learner steps, to be received into ``into`` (uint8)."""
        if self._is_waiting:
            self._into = (
                into if self._into is None else self._into
            )  # of a request that a resumed run has open
        elif not self.stopping:
            self._is_waiting, self._into = True, into
            if self._relay is not None:
                self._relay.request(min_learner_steps, into)
            else:
                self.wire.send(self._weights_from, Kind.WEIGHT_REQUEST, request_message(min_learner_steps))

    def poll_weights(self) -> bool:
        """Whether the publish asked for has arrived since the last call."""
        arrived = self._has_weights
        if arrived:
            self._is_waiting, self._into, self._has_weights = False, None, False
        return arrived

    def intake_memory(self, rows: int, nbytes: int) -> np.ndarray:
        """Return uint8[rows, nbytes] that replay ranks of this host read in place."""
        return self.wire.allocate(rows, nbytes)

    def can_send_intake(self) -> bool:
        """Whether fewer than ``actor.in_flight`` batches are on the wire to some replay rank."""
        return self._credits.free()

    def send_intake(self, token: int, message: np.ndarray) -> None:
        """Send to the next replay rank that has a free credit."""
        dest = self.topology.replay_ranks_range[self._credits.take()]
        self.wire.send(dest, Kind.INTAKE, message, token + 1)

    def completed_intake(self) -> list[int]:
        """Return the tokens of received batches."""
        done, self._completed = self._completed, []
        return done

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a run in one process resumes."""
        credits = {"in_flight": list(self._credits.in_flight), "turn": self._credits.turn}
        return {
            "waiting": self._is_waiting,
            "has_weights": self._has_weights,
            "completed": list(self._completed),
        } | credits

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``; the next :meth:`request_weights` gives an open request its buffer."""
        self._is_waiting, self._has_weights = state["waiting"], state["has_weights"]
        self._completed = list(state["completed"])
        self._credits.in_flight, self._credits.turn = list(state["in_flight"]), state["turn"]

    def _peers_of(self, kind: Kind) -> list[int]:
        if kind == Kind.WEIGHTS:
            return [LEARNER_RANK if self._serves else self._weights_from]
        return self._serves if kind == Kind.WEIGHT_REQUEST else super()._peers_of(kind)

    def _take_message(self) -> bool:
        if self._is_waiting and self._into is None:  # resumed: the role has still to say where they are to go
            return False
        if not self._is_waiting and self._relay is None:  # any message that arrives now is rejected
            now = time.monotonic()
            if now < self._rejects_at:
                return False
            self._rejects_at = now + _REJECTS_EVERY_S
        message = self.wire.receive(_OF_WEIGHTS)
        if message is None:
            return False
        if self._relay is None:
            self._take_weights(message)
        elif not self._relay.take(message):
            self._reject(message)
        return True

    def _exchange(self) -> None:
        if self._relay is not None:
            self._has_arrived(self._relay.progress(self.stopping))
        elif self._arriving is not None and self._arriving.arrived():
            self._arriving = None
            self._has_arrived(True)

    def _take_weights(self, message: Received) -> None:
        """Receive the requested weights. An empty answer means that the run ends."""
        if not self._is_waiting or self._has_weights or self._arriving is not None or self._into is None:
            self._reject(message)
        elif not message.nbytes:
            message.view()
            message.release()
            self._has_arrived(False)
        elif message.nbytes != len(self._into):
            self._reject(message, f"{len(self._into)} are expected")
        else:
            message.into(self._into)
            self._arriving = message

    def _has_arrived(self, weights: bool | None) -> None:
        """Note the answer: True for weights, False for none, None while it has not arrived."""
        self._has_weights = self._has_weights or bool(weights)
        if weights is False:
            self._is_waiting, self._into = False, None

    def _on_sent(self, sent: Sent) -> None:
        if sent.kind == Kind.INTAKE:
            self._credits.give_back(sent.dest - self.topology.replay_ranks_range.start)
            self._completed.append(sent.token - 1)
        elif sent.kind == Kind.WEIGHTS:
            assert self._relay is not None, "only a relay sends weights"
            self._relay.sent(sent.token)
        else:
            super()._on_sent(sent)

    def _open_receives(self) -> list[str]:
        own = (
            [f"weights from {self.topology.name(self._weights_from)}"]
            if self._is_waiting and not self._has_weights
            else []
        )
        relayed = ["weights for this host"] if self._relay is not None and self._relay.is_asking else []
        return super()._open_receives() + own + relayed


def _relay_of(wire: Wire, topology: Topology) -> tuple[list[int], int]:
    """Return the ranks that get weights from this one, and the rank that this one asks for its own.

    On a host without the learner, the first actor asks for all. Where a rank may be lost, none depends on
    another. The evaluator always asks the learner, which counts its requests.
    """
    here = [rank for rank in topology.actor_ranks if rank in wire.neighbours or rank == wire.rank]
    if (
        topology.role(wire.rank)[0] != ACTOR
        or LEARNER_RANK in wire.neighbours
        or len(here) == 1
        or wire.survives
    ):
        return [], LEARNER_RANK
    return (here[1:], LEARNER_RANK) if here[0] == wire.rank else ([], here[0])


class ReplayEndpoint(Endpoint):
    """Replay rank (see ``apex.ports.ReplayPort``)."""

    def __init__(self, wire: Wire, topology: Topology, limits: Limits):
        super().__init__(wire, topology, limits)
        self._actor_of = {rank: actor for actor, rank in enumerate(topology.actor_ranks)}
        # The learner may read one batch in place while all that it has asked for are on their way.
        rows = self.wire.allocate(limits.prefetch + 1, align(limits.sample_nbytes))
        self._samples: list[np.ndarray] = list(rows[:, : limits.sample_nbytes])
        self._free = list(range(len(self._samples)))
        self._filling = -1
        self._asked = 0  # sample requests that have not been answered
        self._intake: Received | None = None  # on its way into its place
        self._priorities: Received | None = None  # on its way, or handed out
        self._is_handed_out = False

    def poll(self, landing: np.ndarray | None) -> IntakeEvent | PriorityEvent | SampleRequestEvent | None:
        """Return the next message of the learner or of an actor; intake goes straight into ``landing``."""
        if self._priorities is not None and self._is_handed_out:
            self._priorities.release()
            self._priorities, self._is_handed_out = None, False
        if self._intake is not None or self._priorities is not None:
            event = self._arrived()
            if event is not None:
                return event
        takes_intake = landing is not None and self._intake is None
        if self._priorities is None:
            message = self.wire.receive(_ALL if takes_intake else _FROM_LEARNER)
        else:
            message = self.wire.receive(_INTAKE) if takes_intake else None
        if message is None:
            return None
        if message.kind == Kind.INTAKE and landing is not None:
            return self._take_intake(message, landing)
        return self._take_learners(message)

    def sample_buffer(self) -> np.ndarray | None:
        """Return a free buffer, to be filled and sent by ``send_sample``; None where there is none."""
        if not self._free:
            return None
        self._filling = self._free.pop()
        return self._samples[self._filling]

    def send_sample(self, buffer: np.ndarray) -> None:
        """Send the filled buffer."""
        self._asked -= 1
        self.wire.send(LEARNER_RANK, Kind.SAMPLE, buffer, self._filling + 1)

    def refuse_sample(self) -> None:
        """Send an empty answer."""
        self._asked -= 1
        self.wire.send(LEARNER_RANK, Kind.SAMPLE, _NOTHING)

    @property
    def quiet(self) -> bool:
        """Whether every message that was received has been returned by :meth:`poll`."""
        return self._intake is None and (self._priorities is None or self._is_handed_out)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a run in one process resumes."""
        return {"asked": self._asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``."""
        self._asked = state["asked"]

    def _arrived(self) -> IntakeEvent | PriorityEvent | None:
        """Return the event of a message that has arrived completely since."""
        if self._intake is not None and (arrived := self._intake.arrived()) is not False:
            intake, self._intake = self._intake, None
            if arrived:
                return IntakeEvent(intake.nbytes, self._actor_of[intake.source])
        if self._priorities is not None and self._priorities.arrived():
            return self._hand_out(self._priorities)
        return None

    def _take_intake(self, message: Received, landing: np.ndarray) -> IntakeEvent | None:
        if message.nbytes > len(landing):
            self._reject(message, f"{len(landing)} are the most")
            return None
        message.into(landing)
        if message.arrived():
            return IntakeEvent(message.nbytes, self._actor_of[message.source])
        self._intake = message
        return None

    def _take_learners(self, message: Received) -> PriorityEvent | SampleRequestEvent | None:
        if message.kind == Kind.SAMPLE_REQUEST and self._asked >= self.limits.prefetch:
            self._reject(message)
            return None
        if message.kind == Kind.SAMPLE_REQUEST:
            message.view()
            message.release()
            self._asked += 1
            return SampleRequestEvent()
        message.view()
        self._priorities = message
        return self._hand_out(message) if message.arrived() else None

    def _hand_out(self, message: Received) -> PriorityEvent:
        self._is_handed_out = True
        return PriorityEvent(message.view())

    def _on_sent(self, sent: Sent) -> None:
        if sent.kind == Kind.SAMPLE:
            self._free.append(sent.token - 1)
        else:
            super()._on_sent(sent)

    def _open_receives(self) -> list[str]:
        """Name messages that were received and not yet returned: their senders may have finished."""
        return super()._open_receives() + ["its own messages to be handled"] * (not self.quiet)


class IntakeCredits:
    """At most ``limit`` batches in flight from one actor to each replay rank, which take turns.

    Each round begins a golden section of a round later than the last. The environments of an actor fill
    batches in turn, too. With equal rounds, and a common divisor of both numbers, an environment would send
    to the same ranks for ever. Multiples of an irrational number are equidistributed (Weyl 1916), whatever
    part of them is left out, so each environment sends to all ranks alike.

    A rank without a free credit is skipped. Credits pooled over all ranks could all end up at a rank that
    takes nothing because its rate limiter waits for samples, and starve the ranks whose batches the learner
    waits for. ``in_flight``, by replay index, and ``turn`` are the whole state.
    """

    def __init__(self, replay_ranks: int, first: int, limit: int):
        self.in_flight = [0] * replay_ranks
        self.turn, self._first, self._limit = 0, first, limit

    def free(self) -> bool:
        """Whether a batch may be sent now."""
        return min(self.in_flight) < self._limit

    def take(self) -> int:
        """Return the replay index to send to; raises RuntimeError where no credit is free."""
        n = len(self.in_flight)
        start = self._first + self.turn + _round_begins_at(self.turn // n, n)
        for replay in ((start + i) % n for i in range(n)):
            if self.in_flight[replay] < self._limit:
                self.in_flight[replay] += 1
                self.turn += 1
                return replay
        raise RuntimeError("an intake batch was sent without a free credit")

    def give_back(self, replay: int) -> None:
        """The replay rank has received a batch."""
        self.in_flight[replay] -= 1


_GOLDEN_SECTION = 0x9E3779B97F4A7C15  # of 2^64


def _round_begins_at(number: int, ranks: int) -> int:
    """Return the shift of a round, 0..ranks - 1."""
    return (number * _GOLDEN_SECTION % 2**64) * ranks >> 64
