"""The wire over MPI: synchronous non-blocking sends, matched receives, and memory shared within a host.

Issend completes when the receiver has taken the message. So an unfinished send is a credit in use: nothing
queues up unseen, and each buffer lives until it is taken. Between ranks of one host bulk messages do not
move: they are posted in shared memory (see ``shared_memory``).

A look for posted messages costs next to nothing, a call of MPI as much as a small copy. So MPI is asked first
in two looks of ``_TURNS``, and every few milliseconds for control messages and losses.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

import numpy as np
from mpi4py import MPI

from apex.ports import LOST, NOT_REPLACED, REPLACED, Change, Waking
from apex.processes import own_process
from apex.refusals import Refusals
from apex.schema import Limits, aligned_bytes
from apex.topology import LEARNER_RANK, Topology
from apex.transport.mpi_comm import (
    CONTROL,
    HELD,
    MESSAGES,
    CommTable,
    DiscardQueue,
    MatchedMessage,
    Membership,
)
from apex.transport.mpi_spawn import Newcomer, Spawner, connect
from apex.transport.shared_memory import ControlPage, SharedPeer, make_page, neighbours
from apex.transport.wire import (
    CONTROL_NBYTES,
    KINDS,
    Allowed,
    Kind,
    Received,
    Sent,
    decode,
    encode,
    posted_at_a_time,
    refusal_kind,
)

__all__ = ["MpiWire", "connect", "join_wire", "make_wire"]
_TURNS = 8
_KINDS = {int(kind): kind for kind in Kind}
_LOOKS_EVERY_S = 0.005
# Tags on CONTROL: a message, one that wakes no rank, and the order to spawn a process together.
_CONTROL, _QUIET, _SPAWN = 1, 2, 3


def make_wire(
    comm: MPI.Intracomm,
    topology: Topology,
    limits: Limits,
    share: bool = True,
    command: list[str] | None = None,
) -> MpiWire:
    """Return this rank's wire. Collective over ``comm``, which must have ``topology.size`` ranks.

    With ``share``, ranks of one host read bulk messages in place; without, all goes through MPI. With
    ``command`` the loss of an acting rank is survived, and the command is what starts a process in its place
    (see ``mpi_spawn``).
    """
    entries = posted_at_a_time(limits)
    page = make_page(comm.size, entries) if share else None
    peers = neighbours(list(range(comm.size)), comm.rank, page, comm.allgather)
    page = page if peers else None
    wire = MpiWire(Membership.of(comm, command is not None), page, peers, _ranks_on_host(comm), entries)
    if command is not None:
        wire.processes = comm.allgather((MPI.Get_processor_name(), *own_process()))
        core = [LEARNER_RANK, *topology.replay_ranks_range]
        if comm.rank in core:
            wire.survive(Spawner(comm, core, command, page), [rank for rank in core if rank != LEARNER_RANK])
    return wire


def join_wire(connected: tuple, topology: Topology) -> MpiWire:
    """Return the wire of a process that has taken a lost one's place (see ``mpi_spawn.connect``)."""
    membership, page, peers = connected
    handover = membership.handover
    return MpiWire(membership, page, peers, handover["ranks_on_host"], handover["entries"])


def _ranks_on_host(comm: MPI.Comm) -> int:
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    size = host.size
    host.Free()
    return size


class _Matched(Received):
    """A message of MPI; a long one moves only while its sender makes progress."""

    def __init__(self, wire: MpiWire, matched: MatchedMessage, kind: Kind):
        super().__init__(matched.source, kind, matched.nbytes)
        self._wire, self._matched = wire, matched
        self._request: MPI.Request | None = None
        self._buffer: np.ndarray | None = None

    def into(self, buffer: np.ndarray) -> None:
        """Begin to receive."""
        self._request = self._matched.into(buffer)
        self._wire.receiving.add(self)

    def view(self) -> np.ndarray:
        """Begin to receive into a buffer of the wire's."""
        if self._buffer is None:
            self._buffer = self._wire.take_buffer(self.nbytes)
            self.into(self._buffer)
        return self._buffer

    def arrived(self) -> bool | None:
        """Whether all of it is here; None where its sender was lost on the way."""
        if self._request is None:
            return True
        arrived = self._wire.comms.guarded(self._request.Test)
        if arrived is not False:
            self._request = None
            self._wire.receiving.discard(self)
        return arrived

    def release(self) -> None:
        """Give the buffer back; a short message may still be on its way, for which nobody waits."""
        while self.arrived() is False:
            pass
        if self._buffer is not None:
            self._wire.free_buffers.setdefault(self.nbytes, []).append(self._buffer)
            self._buffer = None

    def reject(self, why: str) -> None:
        """Drop and count."""
        self._wire.refusals.add(refusal_kind(self.kind), why)
        self._wire.discards.add(self._matched)


class _Posted(Received):
    """A message in the memory of a rank of this host."""

    __slots__ = ("_payload", "_peer", "_refusals")

    def __init__(self, peer: SharedPeer, kind: Kind, payload: np.ndarray, refusals: Refusals):
        self.source, self.kind, self.nbytes = peer.rank, kind, len(payload)
        self._peer, self._payload, self._refusals = peer, payload, refusals

    def into(self, buffer: np.ndarray) -> None:
        """Copy."""
        buffer[: self.nbytes] = self._payload
        self._peer.release()

    def view(self) -> np.ndarray:
        """Return the other rank's memory."""
        return self._payload

    def release(self) -> None:
        """The other rank may write there again."""
        self._peer.release()

    def reject(self, why: str) -> None:
        """Drop and count."""
        self._refusals.add(refusal_kind(self.kind), why)
        self._peer.release()


class MpiWire:
    """The wire of one rank (see :class:`apex.transport.wire.Wire`)."""

    def __init__(
        self,
        membership: Membership,
        page: ControlPage | None,
        peers: dict[int, SharedPeer],
        ranks_on_host: int,
        entries: int,
    ):
        self.rank, self.size, self.ranks_on_host = membership.rank, membership.size, ranks_on_host
        self.handover, self.survives = membership.handover, membership.survives
        self.comms = CommTable(membership)
        self.refusals = Refusals(f"rank {self.rank}")
        self.allowed: Allowed = {}
        self.processes: list = []
        self.discards = DiscardQueue(self.comms.guarded)
        self.receiving: set[_Matched] = set()
        self.free_buffers: dict[int, list[np.ndarray]] = {}
        self._page, self.neighbours, self._entries = page, peers, entries
        self._lenders = deque(peers.values())
        self._sends: list[tuple[MPI.Request, int, Kind, int, np.ndarray]] = []
        self._completed: list[Sent] = []
        self._changes: list[Change] = []
        self._spawner: Spawner | None = None
        self._core: list[int] = []  # on the rank that asks for a process: who spawns it with this one
        self._starting, self._ends, self._traffic, self._turn = -1, False, 0, 0
        self._control_at = self._sweeps_at = 0.0

    # --- sending ---

    def allocate(self, rows: int, nbytes: int) -> np.ndarray:
        """Return memory that ranks of this host read in place, also those that come later."""
        if self._page is None:
            return aligned_bytes(rows, nbytes)
        return self._page.make_arena(rows * nbytes).reshape(rows, nbytes)

    def send(self, dest: int, kind: Kind, message: np.ndarray, token: int = 0) -> None:
        """Post the message in shared memory if possible, else send it."""
        peer = self.neighbours.get(dest) if KINDS[kind].is_bulk else None
        place = self._place(message) if peer is not None else None
        if peer is not None and place is not None:
            peer.post(kind, place, len(message), token)
        else:
            self._issend(dest, HELD if KINDS[kind].is_held else MESSAGES, kind, message, kind, token)

    def _place(self, message: np.ndarray) -> int | None:
        """Return where neighbours find a message: 0 for an empty one, None outside the arenas."""
        return (
            self._page.place(message)
            if self._page is not None and len(message)
            else None
            if len(message)
            else 0
        )

    def send_control(self, dest: int, message: dict, token: int = 0, urgent: bool = True) -> None:
        """Send JSON on a communicator of its own."""
        text = encode(message)
        self._issend(dest, CONTROL, _CONTROL if urgent else _QUIET, text, Kind.CONTROL, token)

    def completed(self) -> list[Sent]:
        """Return the sends that have been taken, or whose receiver was lost."""
        completed = self._completed
        if completed:
            self._completed = []
        return completed

    def open_sends(self) -> list[tuple[int, Kind]]:
        """Return the sends that are not complete, and the messages that are still being discarded."""
        posted = [(peer.rank, Kind(kind)) for peer in self.neighbours.values() for kind, _ in peer.open]
        dropped = [] if self.discards.is_empty else [(self.rank, Kind.CONTROL)]
        return [(dest, kind) for _, dest, kind, _, _ in self._sends] + posted + dropped

    def _issend(self, dest: int, channel: int, tag: int, message: np.ndarray, kind: Kind, token: int) -> None:
        comm, number = self.comms.to(dest, channel)
        request = None
        if not self.comms.is_gone(dest):
            request = self.comms.guarded(comm.Issend, [message, MPI.BYTE], number, tag)
        if request is None:
            self._complete(dest, kind, token)
            return
        self._sends.append((request, dest, kind, token, message))
        if (channel, tag) != (CONTROL, _QUIET) and dest in self.neighbours:
            self.neighbours[dest].wake()

    def _complete(self, dest: int, kind: int, token: int) -> None:
        if token:
            self._completed.append(Sent(dest, _KINDS[kind], token))

    def _reap_sends(self) -> None:
        for peer in self._lenders:
            if peer.open:
                for kind, token in peer.reap():
                    self._complete(peer.rank, kind, token)
        if self._sends:
            still_open = []
            for entry in self._sends:
                if self.comms.guarded(entry[0].Test):
                    self._complete(*entry[1:4])
                else:
                    still_open.append(entry)
            self._sends = still_open

    # --- receiving ---

    def receive(self, kinds: Collection[Kind]) -> Received | None:
        """Return the next message: a posted one first, but for two calls of ``_TURNS``."""
        self._turn = (self._turn + 1) % _TURNS
        if self._turn == 0:
            return self._matched(MESSAGES, kinds) or self._posted(kinds) or self._matched(HELD, kinds)
        if self._turn == 1:
            return self._matched(HELD, kinds) or self._posted(kinds) or self._matched(MESSAGES, kinds)
        return self._posted(kinds) or self._matched(MESSAGES, kinds) or self._matched(HELD, kinds)

    def _posted(self, kinds: Collection[Kind]) -> Received | None:
        lenders = self._lenders
        for _ in range(len(lenders)):
            peer = lenders[0]
            lenders.rotate(-1)
            kind = peer.next_kind()
            if kind is None:
                continue
            bounds = self.allowed.get((peer.rank, kind))
            if bounds is None or kind in kinds:
                return self._peeked(peer, kind, bounds or (1, 0))
        return None

    def _peeked(self, peer: SharedPeer, kind: int, bounds: tuple[int, int]) -> Received | None:
        try:
            payload = peer.peek()
        except (ValueError, OverflowError, OSError) as error:
            self.refusals.add(refusal_kind(kind), f"what rank {peer.rank} posts: {error}")
            peer.release()
            return None
        if bounds[0] <= len(payload) <= bounds[1]:
            return _Posted(peer, _KINDS[kind], payload, self.refusals)
        size = f"{len(payload)} bytes posted by rank {peer.rank} (kind {kind})"
        self.refusals.add(refusal_kind(kind), size)
        peer.release()
        return None

    def _matched(self, channel: int, kinds: Collection[Kind]) -> Received | None:
        """Match a message of a channel; discard one that is not allowed."""
        held = Kind.INTAKE in kinds
        if not (held if channel == HELD else len(kinds) > held):
            return None
        matched = self._probe(channel)
        if matched is None:
            return None
        is_held = matched.tag in KINDS and KINDS[Kind(matched.tag)].is_held
        if is_held != (channel == HELD) or not self._is_allowed(matched.source, matched.tag, matched.nbytes):
            self._drop(matched, refusal_kind(matched.tag))
            return None
        return _Matched(self, matched, Kind(matched.tag))

    def poll_control(self) -> tuple[int, dict] | None:
        """Probe every ``_LOOKS_EVERY_S``, and again while there are messages."""
        now = time.monotonic()
        if now < self._control_at:
            return None
        while (matched := self._probe(CONTROL)) is not None:
            if (
                matched.tag == _SPAWN
                and matched.source == LEARNER_RANK
                and self._spawner is not None
                and not matched.nbytes
            ):
                matched.payload()
                self._spawner.ask({})  # the learner may be ready for the next when this rank is not yet
                continue
            if matched.tag not in (_CONTROL, _QUIET) or matched.nbytes > CONTROL_NBYTES:
                self._drop(matched, "control")
                continue
            message = self._parsed(matched)
            if message is not None:
                return matched.source, message
        self._control_at = now + _LOOKS_EVERY_S
        return None

    def _parsed(self, matched: MatchedMessage) -> dict | None:
        message = decode(matched.payload())
        if message is None:
            self.refusals.add("control", f"a control message of rank {matched.source} that is no JSON object")
        return message

    def _probe(self, channel: int) -> MatchedMessage | None:
        """Match a message and wake its sender, unless it is quiet. Messages of a lost rank are discarded."""
        matched = self.comms.probe(channel)
        if matched is None:
            return None
        if self.comms.is_gone(
            matched.source
        ):  # a late report would be ahead of the counts with which a new process begins
            self.discards.add(matched)
            return None
        if (channel, matched.tag) != (CONTROL, _QUIET):
            self._traffic += 1
            if matched.source in self.neighbours:
                self.neighbours[matched.source].wake()
        return matched

    def _is_allowed(self, source: int, kind: int, nbytes: int) -> bool:
        least, most = self.allowed.get((source, kind), (1, 0))
        return least <= nbytes <= most

    def _drop(self, matched: MatchedMessage, kind: str) -> None:
        size = f"tag {matched.tag}, {matched.nbytes} bytes"
        why = f"a message of rank {matched.source} that is unexpected or malformed ({size})"
        self.refusals.add(kind, why)
        self.discards.add(matched)

    def take_buffer(self, nbytes: int) -> np.ndarray:
        """Return a buffer to receive into."""
        free = self.free_buffers.get(nbytes)
        return free.pop() if free else aligned_bytes(nbytes)

    # --- progress and membership ---

    def progress(self) -> None:
        """Notice losses, complete sends, and accept processes that join."""
        if self.survives:
            for rank in self.comms.failed():
                self._lose(rank, "its process has ended")
        self._reap_sends()
        now = time.monotonic()
        if now >= self._sweeps_at:
            self._sweeps_at = now + _LOOKS_EVERY_S
            self._sweep()
        if self._spawner is not None:
            self._spawn(self._spawner)

    def changes(self) -> list[Change]:
        """Return losses and replacements."""
        changes = self._changes
        if changes:
            self._changes = []
        return changes

    def replace(self, rank: int, handover: dict | None) -> None:
        """Queue the start of a process that receives ``handover``."""
        if handover is not None and self._spawner is not None:
            wire = {
                "rank": rank,
                "size": self.size,
                "entries": self._entries,
                "ranks_on_host": self.ranks_on_host,
            }
            self._spawner.ask(handover | wire)

    def survive(self, spawner: Spawner, core: list[int]) -> None:
        """Survive the loss of a rank that is not of the core, and help to replace it."""
        self._spawner, self._core = spawner, core if self.rank == LEARNER_RANK else []

    def begin_end(self) -> None:
        """Start no more processes."""
        self._ends = True

    def pending(self) -> list[str]:
        """Name a process that is being started."""
        return ["a new process to join"] if self._spawner is not None and self._spawner.busy else []

    def waking(self) -> Waking:
        """Neighbours ring a bell; ranks of other hosts cannot."""
        bell = None if self._page is None else self._page.bell
        return Waking(bell=bell, traffic=lambda: self._traffic, moving=self._is_moving)

    def close(self) -> None:
        """MPI frees what it holds when it ends."""

    def _is_moving(self) -> bool:
        """Whether a message moves only while this rank polls; within a host messages are small or posted."""
        return bool(self.receiving) or any(entry[1] not in self.neighbours for entry in self._sends)

    def _sweep(self) -> None:
        """Discard held messages where this rank takes none of the kind."""
        self.discards.reap()
        if (
            not any(KINDS[Kind(kind)].is_held for _, kind in self.allowed)
            and (matched := self._probe(HELD)) is not None
        ):
            self._drop(matched, refusal_kind(matched.tag))

    def _lose(self, rank: int, why: str) -> None:
        """Drop a rank: all sends to it count as complete."""
        self.comms.leave(rank)
        peer = self.neighbours.pop(rank, None)
        for kind, token in peer.open if peer is not None else ():
            self._complete(rank, kind, token)
        for entry in self._sends:
            if entry[1] == rank:
                self._complete(*entry[1:4])
        self._sends = [entry for entry in self._sends if entry[1] != rank]
        self._lenders = deque(self.neighbours.values())
        self._changes.append(Change(rank, LOST, why))

    def _spawn(self, spawner: Spawner) -> None:
        """Accept the process that has joined, and only then start the next."""
        if self._ends:
            spawner.hurry()
        outcome = spawner.ended()
        if isinstance(outcome, Newcomer):
            self._greet(outcome)
        elif outcome is not None:
            self._tell(self._starting, LOST if spawner.has_started else NOT_REPLACED, outcome)
        if self.rank == LEARNER_RANK and (self._ends or spawner.broken is not None):
            for waiting in spawner.waiting():
                self._tell(waiting["rank"], NOT_REPLACED, spawner.broken or "the run ends")
        handover = spawner.next()
        if handover is not None:
            self._starting = handover.get("rank", -1)
            for rank in self._core:
                self._issend(rank, CONTROL, _SPAWN, np.zeros(0, np.uint8), Kind.CONTROL, 0)
            spawner.begin(handover)

    def _greet(self, newcomer: Newcomer) -> None:
        rank = newcomer.rank
        if not self.comms.is_gone(rank):  # the learner has seen the loss, this rank has not
            self._lose(rank, "its process has ended")
        self.comms.join(rank, newcomer.comms)
        self.processes[rank] = newcomer.process
        if newcomer.peer is not None:
            self.neighbours[rank] = newcomer.peer
            self._lenders = deque(self.neighbours.values())
        self._changes.append(Change(rank, REPLACED, ""))

    def _tell(self, rank: int, what: str, why: str) -> None:
        """Report the outcome on the rank that asked for the process."""
        if rank >= 0:
            self._changes.append(Change(rank, what, why))
