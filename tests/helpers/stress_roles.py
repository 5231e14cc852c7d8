"""Roles that send every kind of message, both ways, at random, and keep account (see ``port_conformance``).

Every payload is random. Both ends write its length and checksum into a ledger (see ``ledger``), and every
buffer is overwritten as soon as the contract allows, so that a message lost, sent twice, changed on its way,
or given back too early leaves the ledgers unequal.
"""

from collections import deque

import numpy as np
from ledger import (
    ACK,
    ANY_REPLAY,
    CONTROL_REQUEST,
    INTAKE,
    NEVER,
    PRIORITY,
    REFUSAL,
    REPORT,
    REQUEST,
    SAMPLE,
    Ledger,
    Scenario,
    seal,
    seal_control,
)
from stress_base import Stormer, publish, send_priorities

from apex.control import CheckpointRequest
from apex.metrics import REPORT_FIELDS
from apex.ports import IntakeEvent, PriorityEvent, SampleRequestEvent
from apex.schema import aligned_bytes, weight_header
from apex.topology import ACTOR, EVALUATOR, LEARNER, LEARNER_RANK, REPLAY, Topology

_UNTOUCHED, _GIVEN_BACK = 0xA5, 0x5A


def stormer(topology: Topology, rank: int, port, scenario: Scenario, seed: int):
    """Return the role of ``rank`` in a storm."""
    kinds = {LEARNER: StormLearner, REPLAY: StormReplay, EVALUATOR: StormEvaluator, ACTOR: StormActor}
    return kinds[topology.role(rank)[0]](topology, rank, port, scenario, seed)


class StormEvaluator(Stormer):
    """Asks for weights over and over."""

    def set_up(self) -> None:
        """Make the buffer that weights arrive in, and one that they must not."""
        self.into = aligned_bytes(self.scenario.weight_nbytes)
        self.other = np.full(self.scenario.weight_nbytes, _UNTOUCHED, np.uint8)
        self.asked: int | None = None
        self.version = self.steps = 0

    def work(self) -> bool:
        """Ask, or take what was asked for."""
        if self.asked is None:
            never = self.scenario.ask_for_never and self.rng.random() < 0.5
            self.asked = NEVER if never else self.steps + self.rng.randrange(3)
            self.ledger.asked_for_weights += 1
            self.port.request_weights(self.asked, self.into)
            return True
        if self.rng.random() < 0.1:
            self.port.request_weights(0, self.other)  # one is open: ignored
        return self.port.poll_weights() and self._take_weights()

    def close(self) -> Ledger:
        """Also check the buffer that nothing was to arrive in."""
        self.ledger.expect(
            (self.other == _UNTOUCHED).all(), "a request for weights was not ignored while one was open"
        )
        return self.ledger

    def report_vector(self) -> np.ndarray:
        """Also tell which weights were last received."""
        vector = super().report_vector()
        if self.role == EVALUATOR:
            vector[REPORT_FIELDS[EVALUATOR].index("eval_version")] = self.version
        return vector

    def _take_weights(self) -> bool:
        self.version, self.steps = weight_header(self.into)
        self.ledger.weights.append((self.version, self.steps, self.asked, seal(self.into)))
        self.into[:], self.asked = _GIVEN_BACK, None
        return True


class StormActor(StormEvaluator):
    """Also sends intake batches of 1 byte up to the limit."""

    def set_up(self) -> None:
        """Make more intake buffers than there are credits."""
        super().set_up()
        self.credits = self.scenario.limits.intake_in_flight * self.topology.replay_ranks
        nbytes, rows = self.scenario.intake_nbytes, self.credits + 2
        # Every second one from the port's memory.
        self.batches = [
            batch
            for pair in zip(self.port.intake_memory(rows, nbytes), aligned_bytes(rows, nbytes))
            for batch in pair
        ]
        self.free = deque(range(len(self.batches)))
        self.in_flight: dict[int, tuple[int, int]] = {}
        self.count = 0

    def work(self) -> bool:
        """Take back what has been received, send what there are credits for, ask for the end when enough is
        sent.
        """
        self._take_back()
        owed = max(self.scenario.intake - self.count, self.scenario.weights - len(self.ledger.weights))
        if owed <= 0 and self.rng.random() < 0.1:
            self.port.request_stop()
        worked = super().work()
        return self._send_intake() or worked

    def close(self) -> Ledger:
        """Also check that every batch came back."""
        self._take_back()
        self.ledger.expect(not self.in_flight, f"batches {list(self.in_flight)} never came back")
        return super().close()

    def _take_back(self) -> None:
        for token in self.port.completed_intake():
            sealed = self.in_flight.pop(token, None)
            self.ledger.expect(sealed is not None, f"batch {token} came back twice")
            batch = self.batches[token]
            self.ledger.expect(
                sealed is None or seal(batch[: sealed[0]]) == sealed, f"batch {token} was changed"
            )
            batch[:] = _GIVEN_BACK
            self.free.append(token)

    def _send_intake(self) -> bool:
        if not self.free or not self.port.can_send_intake():
            return False
        token = self.free.popleft()
        message = self.batches[token][: self._length()]
        self.in_flight[token] = self.fill(message)
        self.sent(INTAKE, ANY_REPLAY, self.in_flight[token])
        self.port.send_intake(token, message)
        self.count += 1
        self.ledger.expect(
            len(self.in_flight) <= self.credits, f"more than {self.credits} batches on the wire"
        )
        return True

    def _length(self) -> int:
        """Return 1, the limit, then anything between, small lengths as often as large ones."""
        limit = self.scenario.intake_nbytes
        return (1, limit)[self.count] if self.count < 2 else int(limit ** self.rng.random())


class StormReplay(Stormer):
    """Takes intake now and then, answers sample requests late, and takes priorities."""

    def set_up(self) -> None:
        """Make the place intake lands in."""
        self.landing = np.full(self.scenario.intake_nbytes, _UNTOUCHED, np.uint8)
        self.priorities: tuple[np.ndarray, tuple[int, int]] | None = None
        self.open_requests = 0

    def work(self) -> bool:
        """Take one event, sometimes refusing intake, and perhaps answer a request."""
        answered = self._answer()  # before: a request that is followed by the word to stop is open then
        return self._take(self.landing if self.rng.random() < 0.7 else None) or answered

    def wind_down(self) -> bool:
        """Take what is left and refuse what is asked."""
        took = self._take(self.landing)
        while self.open_requests:
            self.open_requests -= 1
            self.sent(REFUSAL, LEARNER_RANK)
            self.port.refuse_sample()
        return took

    def _take(self, landing: np.ndarray | None) -> bool:
        self._check_priorities()
        event = self.port.poll(landing)
        match event:
            case IntakeEvent(nbytes, actor):
                self._take_intake(nbytes, self.topology.actor_ranks[actor])
            case PriorityEvent(message):
                self.priorities = message, seal(message)
                self.got(PRIORITY, LEARNER_RANK, self.priorities[1])
            case SampleRequestEvent():
                self.open_requests += 1
                self.got(REQUEST, LEARNER_RANK)
        return event is not None

    def _take_intake(self, nbytes: int, actor_rank: int) -> None:
        self.got(INTAKE, actor_rank, seal(self.landing[:nbytes]))
        self.ledger.expect(
            (self.landing[nbytes:] == _UNTOUCHED).all(), "intake was written beyond its length"
        )
        self.landing[:nbytes] = _UNTOUCHED

    def _check_priorities(self) -> None:
        """A priority message is valid until the next poll."""
        if self.priorities is not None:
            self.ledger.expect(
                seal(self.priorities[0]) == self.priorities[1], "priorities changed before the next poll"
            )
            self.priorities = None

    def _answer(self) -> bool:
        if not self.open_requests or self.rng.random() < 0.3:
            return False
        buffer = self.port.sample_buffer()
        if buffer is None:
            return False
        self.sent(SAMPLE, LEARNER_RANK, self.fill(buffer))
        self.port.send_sample(buffer)
        self.open_requests -= 1
        return True


class StormLearner(Stormer):
    """Draws, returns priorities, publishes, hears reports, and ends the run with everything on its way."""

    def set_up(self) -> None:
        """Make its message buffers."""
        self.priorities = aligned_bytes(self.scenario.limits.priority_nbytes)
        self.weights = aligned_bytes(self.scenario.weight_nbytes)
        self.requested: deque[int] = deque()
        self.sample: tuple[np.ndarray, tuple[int, int]] | None = None
        self.taken = self.version = self.steps = 0
        self.owing: set[int] = set()  # ranks that have not answered
        self._publish()

    def work(self) -> bool:
        """Do a little of everything."""
        self._hear()
        if self.rng.random() < 0.3:
            self._publish()
        if self.rng.random() < 0.5:
            self._request_samples()
        self._ask()
        took = self._take_sample()
        if self.port.stop_requested and self.taken >= self.scenario.samples and self.rng.random() < 0.2:
            self._stop()
        return took

    def wind_down(self) -> bool:
        """Hear the last reports."""
        return self._hear()

    def close(self) -> Ledger:
        """Also hear what came with the last step."""
        self._hear()
        return self.ledger

    def _ask(self) -> None:
        for rank in set(range(1, self.topology.size)) - self.owing:
            if self.rng.random() < 0.3:
                request = CheckpointRequest(1 + self.rng.getrandbits(62), self.rng.getrandbits(63), 0)
                self.sent(CONTROL_REQUEST, rank, seal_control(request))
                self.port.request(rank, request)
                self.owing.add(rank)

    def _stop(self) -> None:
        self._ask()
        self._request_samples()
        for replay in range(self.topology.replay_ranks):
            self._send_priorities(replay)
        self._publish()
        self.port.stop()

    def _request_samples(self) -> None:
        while len(self.requested) < self.scenario.limits.prefetch:
            replay = self.rng.randrange(self.topology.replay_ranks)
            self.requested.append(replay)
            self.sent(REQUEST, self.topology.replay_ranks_range[replay])
            self.port.request_sample(replay)

    def _take_sample(self) -> bool:
        if self.sample is not None:  # valid until the next call
            self.ledger.expect(
                seal(self.sample[0]) == self.sample[1], "a sample batch changed while the learner had it"
            )
        arrived, self.sample = self.port.poll_sample(), None
        if arrived is None:
            return False
        replay, message = arrived
        self.ledger.expect(replay == self.requested.popleft(), "samples came in another order than asked for")
        self.sample = message, seal(message)
        self.got(SAMPLE, self.topology.replay_ranks_range[replay], self.sample[1])
        self.taken += 1
        self._send_priorities(replay)
        return True

    def _send_priorities(self, replay: int) -> None:
        self.sent(PRIORITY, self.topology.replay_ranks_range[replay], self.fill(self.priorities))
        send_priorities(self.port, replay, self.priorities)
        self.priorities[:] = _GIVEN_BACK  # it was copied

    def _publish(self) -> None:
        self.version, self.steps = self.version + 1, self.steps + self.rng.randrange(3)
        self.fill(self.weights)
        self.weights[:16].view(np.int64)[:] = self.version, self.steps
        self.ledger.published[self.version] = seal(self.weights)
        publish(self.port, self.weights)
        self.weights[:] = _GIVEN_BACK  # it was copied

    def _hear(self) -> bool:
        reports = self.port.poll_reports()
        for role, index, vector in reports:
            self.got(REPORT, _rank(self.topology, role, index), seal(vector.view(np.uint8)))
        acks = self.port.poll_acks()
        for role, index, ack in acks:
            rank = _rank(self.topology, role, index)
            self.got(ACK, rank, seal_control(ack))
            self.owing.discard(rank)
        return bool(reports or acks)


def _rank(topology: Topology, role: str, index: int) -> int:
    return next(rank for rank in range(topology.size) if topology.role(rank) == (role, index))
