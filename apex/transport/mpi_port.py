"""What the ports over MPI share: synchronous non-blocking sends on private communicators, lent payloads, the end.

Every message is sent with Issend, which completes when the receiver has taken it. That makes an
unfinished send a credit in use (nothing queues up unseen), keeps each buffer alive until its
completion is seen, and makes the end exact: a rank enters a non-blocking barrier once all its sends
are complete, and keeps receiving until the barrier is (Hoefler et al. 2010, the NBX algorithm).
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from apex.metrics import MAX_REPORT
from apex.ports import WORDS
from apex.schema import Limits
from apex.topology import LEARNER_RANK, Topology
from apex.transport.shared import Inbox, Outbox, neighbours

INTAKE, SAMPLE_REQUEST, SAMPLE, PRIORITY, WEIGHT_REQUEST, WEIGHTS, REPORT, STOP, STOP_REQUEST, OUTBOX, ANNOUNCEMENT, ANSWER = range(1, 13)
NOTHING = np.zeros(0, np.uint8)
REFUSAL = np.zeros(1, np.uint8)  # in place of a sample batch or a publish when the run ends; no other message is as long


class MpiPort:
    """What every role may ask (see ``apex.ports.Port``)."""

    def __init__(self, comm: MPI.Comm, topology: Topology, limits: Limits, share: bool):
        self.comm, self.topology, self.limits = comm.Dup(), topology, limits
        self.role, self.index = topology.role(comm.rank)
        # Lent payloads are announced on a communicator of their own, where a message may wait unreceived.
        self.lent = comm.Dup()
        self.here = neighbours(comm.rank, comm.allgather) if share else set()
        self._entries = max(limits.intake_in_flight, limits.prefetch) + 1
        self._outbox: Outbox | None = None
        self._told: set[int] = set()
        self._inboxes: dict[int, Inbox] = {}
        self._addresses: dict[int, tuple[MPI.Request, np.ndarray]] = {}
        self.ranks_here = _ranks_here(comm)
        self._sends: list[tuple[MPI.Request, str, object, object]] = []
        self._stop_receive: MPI.Request | None = None
        self._finishing, self._barrier, self.finished = False, None, False
        self._report, self._report_free = np.zeros(MAX_REPORT), True
        self._asked_to_stop = False
        self.stopping = False
        if comm.rank != LEARNER_RANK:
            self._stop_receive = self.comm.Irecv([NOTHING, MPI.BYTE], LEARNER_RANK, STOP)

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

    def poll_announcement(self) -> np.ndarray | None:
        """Receive what the learner has announced: on the communicator where a message may wait unreceived."""
        message = self.lent.Improbe(LEARNER_RANK, ANNOUNCEMENT)
        if message is None:
            return None
        words = np.empty(WORDS, np.int64)
        message.Recv([words, MPI.BYTE])
        return words

    def answer(self, words: np.ndarray) -> None:
        """Send a copy to the learner."""
        self._send(words.astype(np.int64).view(np.uint8), LEARNER_RANK, ANSWER, "answer")

    def request_stop(self) -> None:
        """Ask the learner once."""
        if not self._asked_to_stop:
            self._asked_to_stop = True
            self._send(NOTHING, LEARNER_RANK, STOP_REQUEST, "stop request")

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

    def _make_outbox(self, nbytes: int) -> np.ndarray:
        """Return memory (uint8[nbytes]) from which payloads can be lent."""
        self._outbox = Outbox(self.comm.size, self._entries, nbytes)
        return self._outbox.data

    def _send_or_lend(self, message: np.ndarray, dest: int, tag: int, what: str, done) -> None:
        """Lend ``message`` where it lies in the outbox and ``dest`` is on this host, else send it; then as ``_send``."""
        if dest not in self.here or self._outbox is None or not self._outbox.holds(message):
            self._send(message, dest, tag, what, done)
            return
        if dest not in self._told:
            self._told.add(dest)
            self._sends.append((self.lent.Issend([self._outbox.address, MPI.BYTE], dest, OUTBOX), "address", dest, None))
        self._outbox.enter(dest, message)
        self._sends.append((self.lent.Issend([NOTHING, MPI.BYTE], dest, tag), what, dest, done))

    def _refuse(self, dest: int, tag: int, what: str) -> None:
        """Answer a request with nothing, in order with what was lent."""
        comm = self.lent if dest in self.here else self.comm
        self._sends.append((comm.Issend([REFUSAL, MPI.BYTE], dest, tag), what, dest, None))

    def _lent(self, source: int, tag: int) -> MPI.Status | None:
        """Return the status of the oldest announcement or refusal from a rank of this host, not yet received."""
        status = MPI.Status()
        if not self.lent.Iprobe(source, tag, status):
            return None
        return status if status.Get_count(MPI.BYTE) or self._has_opened(status.source) else None

    def _has_opened(self, source: int) -> bool:
        """Whether the outbox of ``source``, which has lent something, is open; its address is on its way at least."""
        if source in self._inboxes:
            return True
        if source not in self._addresses:
            address = np.zeros(3, np.int64)
            self._addresses[source] = self.lent.Irecv([address, MPI.BYTE], source, OUTBOX), address
        request, address = self._addresses[source]
        if not request.Test():
            return False
        self._inboxes[source] = Inbox(address, self.comm.size, self._entries, self.comm.rank)
        return True

    def _borrow(self, source: int) -> np.ndarray:
        """Return the payload (read-only) of the oldest message that ``source`` has lent: announced, not received, open."""
        return self._inboxes[source].next()

    def _give_back(self, source: int, tag: int) -> None:
        """Receive the announcement of a payload that is no longer needed: the sender may write there again. Or a refusal."""
        self.lent.Recv([np.empty_like(REFUSAL), MPI.BYTE], source, tag)

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


def _ranks_here(comm: MPI.Comm) -> int:
    """Return the ranks on this host, this one included. Collective."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = host.size
    host.Free()
    return size
