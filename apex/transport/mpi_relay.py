"""One copy of a publish for a whole host: its first actor asks the learner for all of them, and lends what it gets.

Actors on another host than the learner's ask that actor instead of the learner. It keeps one request open there, for the
fewest learner steps that any of them waits for, and answers each as soon as what it holds is new enough. So the learner
sends a publish to a host at most once, however many actors there are. The price: while that actor is asleep, no other on its
host gets weights.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from apex.schema import ALIGNMENT, weight_header
from apex.topology import LEARNER_RANK
from apex.transport.checked import Arrived
from apex.transport.mpi_port import REFUSAL, WEIGHT_REQUEST, WEIGHTS, MpiPort
from apex.transport.publishes import Publish, answer

_SPARE = 2  # buffers beside one for each that is served: the newest, and the one that is arriving


class Relay:
    """What the port of a host's first actor does for the others there (``served``: world ranks), and for itself."""

    def __init__(self, port: MpiPort, served: list[int]):
        self._port, self._served, self._me = port, served, port.rank
        self._waiting: dict[int, int] = {}  # rank -> learner steps wanted; this rank's own among them
        self._into: np.ndarray | None = None
        self._arrived: bool | None = None  # what became of this rank's own request
        self._free: list[Publish] = []
        self._nbytes = 0
        self._newest: Publish | None = None
        self._arriving: Publish | None = None  # asked for
        self._receive: MPI.Request | None = None  # once it is here

    def request(self, min_learner_steps: int, into: np.ndarray) -> None:
        """This rank itself wants weights."""
        if not self._nbytes:
            self._make_buffers(len(into))
        self._waiting[self._me], self._into = min_learner_steps, into

    def poll(self) -> bool | None:
        """Return whether they have arrived, False if they never will, None while that is open."""
        arrived, self._arrived = self._arrived, None
        return arrived

    def progress(self) -> None:
        """Answer who can be answered, and ask for who cannot."""
        self._take_publish()
        steps = -1 if self._newest is None else weight_header(self._newest.message)[1]
        answer(self._waiting, steps, self._give, self._refuse if self._port.stopping else None)
        if self._waiting and self._arriving is None and self._nbytes and not self._port.stopping:
            self._ask_learner(min(self._waiting.values()))

    def is_receiving(self) -> bool:
        """Whether a publish is arriving."""
        return self._receive is not None

    def open(self) -> list[str]:
        """Say what this still waits for."""
        return [] if self._arriving is None else [f"weights from {self._port.topology.name(LEARNER_RANK)}"]

    def _make_buffers(self, nbytes: int) -> None:
        stride, count = -(-nbytes // ALIGNMENT) * ALIGNMENT, len(self._served) + _SPARE
        memory = self._port._desk.make_outbox(count * stride).reshape(count, stride)
        self._nbytes, self._free = nbytes, [Publish(row[:nbytes]) for row in memory]

    def take(self, arrived: Arrived) -> bool:
        """Take a request of a rank that is served, or the learner's answer; return whether it was one."""
        if arrived.tag == WEIGHT_REQUEST and arrived.nbytes == 8 and arrived.source in self._served:
            wanted = int(arrived.take().view(np.int64)[0])
            if wanted < 0:
                self._port.refuse(f"a request for weights of {wanted} learner steps")
            else:
                self._waiting[arrived.source] = wanted
            return True
        if (arrived.source, arrived.tag) != (LEARNER_RANK, WEIGHTS) or self._arriving is None or self._receive is not None:
            return False
        if arrived.nbytes == self._nbytes:
            self._receive = arrived.into(self._arriving.message)
            return True
        if arrived.nbytes == len(REFUSAL) and self._port.stopping:
            arrived.take()
            self._arriving = None
            return True
        return False

    def _take_publish(self) -> None:
        if self._receive is not None and self._receive.Test():
            self._newest, self._arriving, self._receive = self._arriving, None, None

    def _ask_learner(self, wanted: int) -> None:
        self._arriving = next(p for p in self._free if not p.readers and p is not self._newest)
        request = np.array([wanted], np.int64).view(np.uint8)
        self._port._send(request, LEARNER_RANK, WEIGHT_REQUEST, "request for weights")

    def _give(self, rank: int) -> None:
        publish = self._newest
        if rank == self._me:
            self._into[:], self._arrived = publish.message, True
        else:
            publish.readers += 1
            self._port._send_or_lend(publish.message, rank, WEIGHTS, "publish", publish.release)

    def _refuse(self, rank: int) -> None:
        if rank == self._me:
            self._arrived = False
        else:
            self._port._refuse(rank, WEIGHTS, "refusal of weights")
