"""What the ports over MPI share: synchronous non-blocking sends on private communicators, lent payloads, the end.

Every message is sent with Issend, which completes when the receiver has taken it. That makes an
unfinished send a credit in use (nothing queues up unseen), keeps each buffer alive until its
completion is seen, and makes the end exact: a rank enters a non-blocking barrier once all its sends
are complete, and keeps receiving until the barrier is (Hoefler et al. 2010, the NBX algorithm).
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from apex.metrics import MAX_REPORT
from apex.ports import WORDS
from apex.refusals import Refusals, Refusing
from apex.schema import Limits
from apex.topology import LEARNER, LEARNER_RANK, REPLAY, Topology
from apex.transport.checked import Arrived, Bin, probe
from apex.transport.shared import neighbours

INTAKE, SAMPLE_REQUEST, SAMPLE, PRIORITY, WEIGHT_REQUEST, WEIGHTS, REPORT, STOP, STOP_REQUEST, ANNOUNCEMENT, ANSWER = range(1, 12)
_LOOKS_EVERY_S = 0.005
NOTHING = np.zeros(0, np.uint8)
REFUSAL = np.zeros(1, np.uint8)  # in place of a sample batch or a publish when the run ends; no other message is as long


class MpiPort(Refusing):
    """What every role may ask (see ``apex.ports.Port``)."""

    def __init__(self, comm: MPI.Comm, topology: Topology, limits: Limits, share: bool):
        self.comm, self.topology, self.limits = comm.Dup(), topology, limits
        self.announcements = comm.Dup()  # which a rank looks for now and then: probes for other messages must not find them
        self.intake = comm.Dup()  # whose messages wait until there is a place for them; those behind must not
        self._looks_at = self._sweeps_at = 0.0
        self.refusals = Refusals(topology.name(comm.rank))
        self._bin = Bin(self.refusals)
        self.role, self.index = topology.role(comm.rank)
        entries = max(limits.intake_in_flight, limits.prefetch) + 1
        self._desk, self.peers = neighbours(comm.rank, comm.size, entries, comm.allgather) if share else (None, {})
        self.ranks_here = _ranks_here(comm)
        self._sends: list[tuple[MPI.Request, str, object, object]] = []
        self._finishing, self._barrier, self.finished = False, None, False
        self._report, self._report_free = np.zeros(MAX_REPORT), True
        self._asked_to_stop = False
        self.stopping = False

    def progress(self) -> None:
        """Complete sends, hear a message, and step towards the final barrier."""
        self._complete_sends()
        self._bin.settle()
        self._hear()
        self._sweep()
        if self._sends or not self._bin.is_empty or self._open_receives() or any(peer.open for peer in self.peers.values()):
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

    def poll_announcement(self) -> np.ndarray | None:
        """Receive what the learner has announced; MPI is asked every ``_LOOKS_EVERY_S``, since it costs as much as a small copy."""
        now = time.monotonic()
        if now < self._looks_at:
            return None
        self._looks_at = now + _LOOKS_EVERY_S
        arrived = probe(self.announcements)
        if arrived is None:
            return None
        if (arrived.source, arrived.tag, arrived.nbytes) == (LEARNER_RANK, ANNOUNCEMENT, 8 * WORDS):
            return arrived.take().view(np.int64)
        return self._drop(arrived)

    def answer(self, words: np.ndarray) -> None:
        """Send a copy to the learner."""
        self._send(words.astype(np.int64).view(np.uint8), LEARNER_RANK, ANSWER, "answer")

    def request_stop(self) -> None:
        """Ask the learner once, and not while the run ends already: it may be gone."""
        if not self._asked_to_stop and not self.stopping:
            self._asked_to_stop = True
            self._send(NOTHING, LEARNER_RANK, STOP_REQUEST, "stop request")

    def finish(self) -> None:
        """Enter the barrier as soon as everything of this rank has been received."""
        self._finishing = True

    def waits_for(self) -> str:
        """Name the messages of this rank that are not complete."""
        open_sends = [f"{self.topology.name(dest)} to take a {what}" for _, what, dest, _ in self._sends]
        lent = [f"{self.topology.name(peer.rank)} to take a {what}" for peer in self.peers.values() for what, _ in peer.open]
        parts = open_sends + lent + self._open_receives()
        return "; ".join(parts[:4]) or ("the other ranks to finish" if self._barrier is not None else "messages")

    def _send(self, message: np.ndarray, dest: int, tag: int, what: str, done=None) -> None:
        """Send uint8 ``message``; it is kept alive, and ``done()`` called, when the receiver has it."""
        request = (self.intake if tag == INTAKE else self.comm).Issend([message, MPI.BYTE], dest, tag)
        self._sends.append((request, what, dest, done))

    def _send_or_lend(self, message: np.ndarray, dest: int, tag: int, what: str, done) -> None:
        """Lend ``message`` where it lies in the outbox and ``dest`` is on this host, else send it; then as ``_send``."""
        peer = self.peers.get(dest)
        place = None if peer is None else self._desk.place(message)
        if place is None:
            self._send(message, dest, tag, what, done)
        else:
            peer.lend(place, len(message), what, done)

    def _refuse(self, dest: int, tag: int, what: str) -> None:
        """Answer a request with nothing, in order with what was lent or sent."""
        if dest in self.peers:
            self.peers[dest].refuse(what)
        else:
            self._send(REFUSAL, dest, tag, what)

    def _complete_sends(self) -> None:
        for peer in self.peers.values():
            if peer.open:
                peer.settle()
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

    def _hear(self) -> bool:
        """Take a message if there is one; return whether there was."""
        arrived = probe(self.comm)
        if arrived is not None:
            self._take(arrived)
        return arrived is not None

    def _take(self, arrived: Arrived) -> None:
        """Receive what this rank expects, and drop all else; a role's own messages come first."""
        if (arrived.source, arrived.tag, arrived.nbytes) == (LEARNER_RANK, STOP, 0) and self.comm.rank != LEARNER_RANK:
            arrived.take()
            self.stopping = True
        else:
            self._drop(arrived)

    def _sweep(self) -> None:
        """Drop what is on communicators on which this rank expects nothing; MPI is asked every ``_LOOKS_EVERY_S``."""
        now = time.monotonic()
        if now < self._sweeps_at:
            return
        self._sweeps_at = now + _LOOKS_EVERY_S
        expected = {LEARNER: (), REPLAY: (self.intake, self.announcements)}.get(self.role, (self.announcements,))
        for comm in (self.intake, self.announcements):
            arrived = None if comm in expected else probe(comm)
            if arrived is not None:
                self._drop(arrived)

    def _drop(self, arrived: Arrived) -> None:
        self._bin.drop(arrived, self.topology.name(arrived.source))


def _ranks_here(comm: MPI.Comm) -> int:
    """Return the ranks on this host, this one included. Collective."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = host.size
    host.Free()
    return size
