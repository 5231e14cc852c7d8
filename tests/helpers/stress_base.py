"""What all roles of a storm share (see ``stress_roles``).

Random payloads and pauses, reports, requests, and the end.
"""

import gc
import random
import time
from collections import deque

import numpy as np
from ledger import ACK, CONTROL_REQUEST, REPORT, Ledger, Scenario, seal, seal_control

from apex.control import CheckpointAck, CheckpointRequest
from apex.loop import Wait
from apex.metrics import REPORT_FIELDS
from apex.topology import LEARNER_RANK, Topology


def mpi_port(comm, topology: Topology, limits, share: bool = True, command: list[str] | None = None):
    """Return the port of this rank over MPI. Collective."""
    from apex.transport.mpi import make_wire
    from launch.run.world import make_port

    return make_port(make_wire(comm, topology, limits, share, command), topology, limits)


def zmq_port(world, topology: Topology, limits, command: list[str] | None = None):
    """Return the port of this rank over ZeroMQ. Collective."""
    from apex.transport.zmq import make_wire
    from launch.run.world import make_port

    return make_port(make_wire(world, topology, limits, command), topology, limits)


def publish(port, message: np.ndarray) -> None:
    """Have a learner's port publish a weight message."""
    port.publish_buffer(len(message))[:] = message
    port.publish()


def send_priorities(port, replay: int, message: np.ndarray) -> None:
    """Have a learner's port send a priority message."""
    port.priority_buffer()[:] = message
    port.send_priorities(replay)


def used_publishes(port) -> int:
    """Return how many buffers of publishes a learner's port has ever used."""
    return sum(bool(row[:16].any()) for row in port._weights._rows)


def until(holds, step, port, name: str, longest_s: float) -> None:
    """Call ``step`` until ``holds()``; whoever waits too long says for what, and ends the job."""
    # As if cores were shared, which they mostly are.
    wait, deadline = Wait(2, 1, *port.waking()), time.monotonic() + longest_s
    while not holds():
        if step():
            wait.reset()
        else:
            wait.idle()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} waits for {port.waits_for()}")


class Stormer:
    """What all roles share: random payloads and pauses, reports, and the end."""

    def __init__(self, topology: Topology, rank: int, port, scenario: Scenario, seed: int):
        self.topology, self.rank, self.port, self.scenario = topology, rank, port, scenario
        self.role, self.index = topology.role(rank)
        self.rng = random.Random(f"{seed} {rank}")
        self.ledger = Ledger(rank)
        largest = max(scenario.intake_nbytes, scenario.weight_nbytes, scenario.limits.sample_nbytes)
        self._noise = np.frombuffer(self.rng.randbytes(2 * largest), np.uint8)
        self._reports, self._last_report_sent = 0, False
        self._owed: deque[CheckpointRequest] = deque()  # requests not yet acknowledged
        self.set_up()

    def set_up(self) -> None:
        """Make what a role needs."""

    @property
    def finished(self) -> bool:
        """Whether the port says that all is done."""
        return self.port.finished

    def step(self) -> bool:
        """Do one thing; return whether there was anything to do."""
        self.port.progress()
        self._take_request()
        if self.rng.random() < 0.02:
            gc.collect()
        if self.rng.random() < 0.1:
            time.sleep(self.rng.random() * self.scenario.delay_s)
        if not self.port.stopping:
            self._send_report(0.2)
            self._acknowledge()
            return self.work()
        self._end()
        if self.rng.random() < 0.5:
            self.port.request_stop()  # as where a signal comes late
        return self.wind_down()

    def work(self) -> bool:
        """Do one thing of the role's own."""
        raise NotImplementedError

    def wind_down(self) -> bool:
        """Do what the contract still allows after the end."""
        return False

    def close(self) -> Ledger:
        """Return the ledger once all is finished."""
        return self.ledger

    def fill(self, buffer: np.ndarray) -> tuple[int, int]:
        """Fill ``buffer`` with noise; return its seal."""
        start = self.rng.randrange(len(self._noise) - len(buffer) + 1)
        buffer[:] = self._noise[start : start + len(buffer)]
        return seal(buffer)

    def sent(self, kind: str, to: int, sealed: tuple[int, int] = (0, 0)) -> None:
        """Note a message to rank ``to``."""
        self.ledger.sent[kind, self.rank, to].append(sealed)

    def got(self, kind: str, origin: int, sealed: tuple[int, int] = (0, 0)) -> None:
        """Note a message from rank ``origin``."""
        self.ledger.received[kind, origin, self.rank].append(sealed)

    def _take_request(self) -> None:
        request = self.port.poll_request()
        if request is not None:
            self.got(CONTROL_REQUEST, LEARNER_RANK, seal_control(request))
            self._owed.append(request)
            self.ledger.expect(len(self._owed) == 1, "another request came before the last was acknowledged")

    def _acknowledge(self) -> None:
        if self._owed and self.rng.random() < 0.5:
            self._owed.popleft()
            ack = CheckpointAck(
                self.rng.getrandbits(63),
                self.rng.randrange(100),
                {"noise": [self.rng.random(), float("inf")]},
            )
            self.sent(ACK, LEARNER_RANK, seal_control(ack))
            self.port.acknowledge(ack)

    def report_vector(self) -> np.ndarray:
        """Return a report that differs from every other."""
        vector = np.array([self.rng.random() for _ in REPORT_FIELDS[self.role]])
        vector[0] = self._reports
        return vector

    def _send_report(self, chance: float) -> bool:
        vector = self.report_vector()
        if self.rng.random() >= chance or not self.port.send_report(vector):
            return False
        self._reports += 1
        self.sent(REPORT, LEARNER_RANK, seal(vector.view(np.uint8)))
        return True

    def _end(self) -> None:
        """Finish, as soon as the port has taken the last report."""
        if not self._last_report_sent and self._send_report(1.0):
            self._last_report_sent = True
            self.port.finish()
