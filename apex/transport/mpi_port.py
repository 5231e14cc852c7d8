"""What the ports over MPI share: synchronous non-blocking sends on private communicators, lent payloads, the end.

Every message is sent with Issend, which completes when the receiver has taken it. That makes an
unfinished send a credit in use (nothing queues up unseen), keeps each buffer alive until its
completion is seen, and makes the end exact: a rank tells the learner once all its sends are complete and
all its questions answered, and keeps receiving until the learner, when all have told, says that all is done.
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from apex.metrics import MAX_REPORT
from apex.ports import WORDS, PeerLost, Waking
from apex.refusals import Refusals, Refusing
from apex.schema import Limits
from apex.topology import LEARNER, LEARNER_RANK, REPLAY, Topology
from apex.transport.checked import Arrived, Bin
from apex.transport.mpi_ways import ANNOUNCEMENTS, INTAKES, MESSAGES, Meeting, Ways
from apex.transport.process import end_process
from apex.transport.shared import Desk, Peer, make_desk, neighbours

INTAKE, SAMPLE_REQUEST, SAMPLE, PRIORITY, WEIGHT_REQUEST, WEIGHTS, REPORT, STOP, STOP_REQUEST, ANNOUNCEMENT, ANSWER = range(1, 12)
FINISHED, DONE, REPLACE, KILL = range(12, 16)
_CHANNELS = {INTAKE: INTAKES, ANNOUNCEMENT: ANNOUNCEMENTS, KILL: ANNOUNCEMENTS}  # of all other tags: MESSAGES
_LOOKS_EVERY_S = 0.005
NOTHING = np.zeros(0, np.uint8)
REFUSAL = np.zeros(1, np.uint8)  # in place of a sample batch or a publish when the run ends; no other message is as long


class MpiPort(Refusing):
    """What every role may ask (see ``apex.ports.Port``)."""

    def __init__(self, meeting: Meeting, topology: Topology, limits: Limits, met: tuple[Desk | None, dict[int, Peer]], ranks_here: int):
        self.rank, self.topology, self.limits, self.about = meeting.rank, topology, limits, meeting.about
        self.ways, self.ranks_here = Ways(meeting), ranks_here
        self.role, self.index = topology.role(self.rank)
        self._desk, self.peers = met
        self._traffic, self.ways.heard = 0, self._heard
        self._looks_at = self._sweeps_at = 0.0
        self.refusals = Refusals(topology.name(self.rank))
        self._bin = Bin(self.refusals, self.ways.tried)
        self._sends: list[tuple[MPI.Request, str, int, object]] = []
        self._finishing = self._told_finished = self._all_done = self.finished = False
        self._report, self._report_free = np.zeros(MAX_REPORT), True
        self._asked_to_stop = self.stopping = False

    def waking(self) -> Waking:
        """Neighbours ring; ranks of other hosts cannot."""
        bell = None if self._desk is None else self._desk.bell
        return Waking(bell=bell, traffic=lambda: self._traffic, moving=self._is_moving)

    def _is_moving(self) -> bool:
        """Whether a message is on its way that only polls carry on; what ranks of this host are sent is small, or lent."""
        return self._is_receiving() or any(dest not in self.peers for _, _, dest, _ in self._sends)

    def _is_receiving(self) -> bool:
        """Whether a message has been matched and is not here in full."""
        return False

    def progress(self) -> None:
        """Notice losses, complete sends, hear a message, and step towards the end."""
        for rank in self.ways.lost():
            self._lose(rank)
        self._complete_sends()
        self._bin.settle()
        self._hear()
        self._sweep()
        if self._all_done:  # so all that this rank has sent was taken, whether or not it has seen that yet: the takers may be gone
            self.finished = not self._open_receives()
        elif self.stopping and self._finishing and not self._told_finished and not self._is_open():
            self._told_finished = True
            self._tell_finished()

    def _is_open(self) -> bool:
        """Whether anything of this rank has not been taken, or not been given to it."""
        lent = any(peer.open for peer in self.peers.values())
        return bool(self._sends or lent or not self._bin.is_empty or self._open_receives())

    def _tell_finished(self) -> None:
        self._send(NOTHING, LEARNER_RANK, FINISHED, "word that this rank is through")

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
        arrived = self.ways.probe(ANNOUNCEMENTS)
        if arrived is None:
            return None
        if (arrived.source, arrived.nbytes) == (LEARNER_RANK, 8 * WORDS) and arrived.tag in (ANNOUNCEMENT, KILL):
            words = arrived.take().view(np.int64)
            if arrived.tag == ANNOUNCEMENT:
                return words
            end_process(*words[:2].tolist())
            return None
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
        """Tell the learner as soon as everything of this rank has been received."""
        self._finishing = True

    def waits_for(self) -> str:
        """Name the messages of this rank that are not complete."""
        open_sends = [f"{self.topology.name(dest)} to take a {what}" for _, what, dest, _ in self._sends]
        lent = [f"{self.topology.name(peer.rank)} to take a {what}" for peer in self.peers.values() for what, _ in peer.open]
        parts = open_sends + lent + self._open_receives()
        return "; ".join(parts[:4]) or ("the other ranks to finish" if self._told_finished else "messages")

    def _send(self, message: np.ndarray, dest: int, tag: int, what: str, done=None) -> None:
        """Send uint8 ``message``; it is kept alive, and ``done()`` called, when the receiver has it, or is lost."""
        comm, number = self.ways.to(dest, _CHANNELS.get(tag, MESSAGES))
        request = None if self.ways.is_gone(dest) else self.ways.tried(comm.Issend, [message, MPI.BYTE], number, tag)
        if request is not None:
            self._sends.append((request, what, dest, done))
            if tag != REPORT and dest in self.peers:
                self.peers[dest].wake()
        elif done is not None:
            done()

    def _heard(self, arrived: Arrived) -> None:
        """A message has come, and its sender may wait for that. Reports are for nobody who waits."""
        if arrived.tag != REPORT:
            self._traffic += 1
            if arrived.source in self.peers:
                self.peers[arrived.source].wake()

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
            if not self.ways.tried(entry[0].Test):
                still_open.append(entry)
            elif entry[3] is not None:
                entry[3]()
        self._sends = still_open

    def _lose(self, rank: int) -> None:
        """Go on without a rank, if that can be."""
        if not (self.topology.is_acting(rank) or self._may_leave(rank)):
            raise PeerLost(f"{self.topology.name(rank)} was lost, without which the run cannot go on")
        self.ways.leave(rank)
        peer = self.peers.pop(rank, None)
        given_up = [done for _, _, dest, done in self._sends if dest == rank] + [done for _, done in (peer.open if peer else ())]
        self._sends = [entry for entry in self._sends if entry[2] != rank]
        for done in given_up:
            if done is not None:
                done()

    def _may_leave(self, rank: int) -> bool:
        """Whether the end of a rank, which MPI tells as a loss, is in order: all leave once they are told that all is done."""
        return self._all_done or (self._told_finished and rank != LEARNER_RANK)

    def _open_receives(self) -> list[str]:
        """Name what this rank has asked for and not yet been given; it cannot leave before."""
        return []

    def _free_report(self) -> None:
        self._report_free = True

    def _hear(self) -> bool:
        """Take a message if there is one; return whether there was."""
        arrived = self.ways.probe(MESSAGES)
        if arrived is not None:
            self._take(arrived)
        return arrived is not None

    def _take(self, arrived: Arrived) -> None:
        """Receive what this rank expects, and drop all else; a role's own messages come first."""
        what = (arrived.source, arrived.tag, arrived.nbytes)
        if what == (LEARNER_RANK, STOP, 0) and self.rank != LEARNER_RANK:
            arrived.take()
            self.stopping = True
        elif what == (LEARNER_RANK, DONE, 0) and self._told_finished and self.rank != LEARNER_RANK:
            arrived.take()
            self._all_done = True
        else:
            self._drop(arrived)

    def _sweep(self) -> None:
        """Drop what is on communicators on which this rank expects nothing; MPI is asked every ``_LOOKS_EVERY_S``."""
        now = time.monotonic()
        if now < self._sweeps_at:
            return
        self._sweeps_at = now + _LOOKS_EVERY_S
        unexpected = {LEARNER: (INTAKES, ANNOUNCEMENTS), REPLAY: ()}.get(self.role, (INTAKES,))
        for channel in unexpected:
            arrived = self.ways.probe(channel)
            if arrived is not None:
                self._drop(arrived)

    def _drop(self, arrived: Arrived) -> None:
        self._bin.drop(arrived, self.topology.name(arrived.source))


def entries(limits: Limits) -> int:
    """Return how many messages two ranks may lend each other at a time."""
    return max(limits.intake_in_flight, limits.prefetch) + 1


def met_at_start(comm: MPI.Comm, limits: Limits, share: bool) -> tuple[Desk | None, dict[int, Peer]]:
    """Return this rank's desk, and whom it can lend to. Collective."""
    desk = make_desk(comm.size, entries(limits)) if share else None
    peers = neighbours(list(range(comm.size)), comm.rank, desk, comm.allgather)
    return (desk, peers) if peers else (None, {})


def ranks_here(comm: MPI.Comm) -> int:
    """Return the ranks on this host, this one included. Collective."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = host.size
    host.Free()
    return size
