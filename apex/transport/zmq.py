"""The wire over ZeroMQ: the same messages and the same limits in flight as over MPI.

The learner binds a ROUTER for all other ranks, each replay rank one for the actors; they connect a DEALER
each (see ``zmq_link``). A wire reads one message at a time from each socket. While that message is of a kind
that the role does not ask for, such as intake without a free place, the socket waits. The wire acknowledges
the kinds that the table of ``wire`` marks. Samples and weights answer requests, so nothing piles up in front
of a rank that is slow, asleep or stopped.

Messages between two ranks keep their order across kinds, so "finished" is the last message of a rank.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Collection

import numpy as np
import zmq

from apex.ports import LOST, REPLACED, Change, Waking
from apex.processes import own_process
from apex.schema import Limits, aligned_bytes
from apex.topology import ACTOR, LEARNER, LEARNER_RANK, REPLAY, Topology
from apex.transport.wire import (
    CONTROL_NBYTES,
    KINDS,
    Allowed,
    Kind,
    Received,
    Sent,
    decode,
    encode,
    refusal_kind,
)
from apex.transport.zmq_link import Hub, Link, Message, aligned, wait_on
from apex.transport.zmq_world import World

_HELLO, _WELCOME, _TAKEN = 101, 102, 103  # kinds of the wire's own
_KINDS = {int(kind): kind for kind in Kind}
_NOTHING = np.zeros(0, np.uint8)
_LOOKS_FOR_CUTS_EVERY_S = 0.25
_CONTROL = frozenset([Kind.CONTROL])


def make_wire(world: World, topology: Topology, limits: Limits, command: list[str] | None = None) -> ZmqWire:
    """Return this rank's wire. Collective over ``world``, which must have ``topology.size`` ranks.

    With ``command``, of which only that it is there matters, the loss of an acting rank is survived:
    ``launch.run.spawn`` starts a process in its place.
    """
    role = topology.role(world.rank)[0]
    may_lose = range(topology.evaluator_rank, topology.size) if command is not None else ()
    callers = {LEARNER: range(1, topology.size), REPLAY: topology.actor_ranks}.get(role, ())
    largest = {LEARNER: limits.sample_nbytes, REPLAY: limits.intake_nbytes}.get(role)
    return ZmqWire(world, list(callers), largest, _called(topology, world.rank), frozenset(may_lose))


def connect(joining: World) -> World:
    """Return what :func:`join_wire` needs in a process that replaces a lost one."""
    return joining


def join_wire(connected: World, topology: Topology) -> ZmqWire:
    """Return the wire of that process."""
    return ZmqWire(connected, [], None, _called(topology, connected.rank), frozenset([connected.rank]))


def _called(topology: Topology, rank: int) -> list[int]:
    role = topology.role(rank)[0]
    return [] if role == LEARNER else [LEARNER_RANK, *(topology.replay_ranks_range if role == ACTOR else [])]


class _Framed(Received):
    """A message whose payload is here."""

    __slots__ = ("_number", "_payload", "_wire")

    def __init__(self, wire: ZmqWire, message: Message, payload: np.ndarray):
        self.source, self.kind, self.nbytes = message.rank, _KINDS[message.kind], len(payload)
        self._wire, self._number, self._payload = wire, message.arg, payload

    def into(self, buffer: np.ndarray) -> None:
        """Copy."""
        buffer[: self.nbytes] = self._payload
        self.release()

    def view(self) -> np.ndarray:
        """Return the frame's memory, or a copy where that is not aligned."""
        self._payload = aligned(self._payload)
        return self._payload

    def release(self) -> None:
        """Tell the sender, where it waits for that."""
        if KINDS[self.kind].is_acknowledged:
            self._wire.acknowledge(self.source, self._number)

    def reject(self, why: str) -> None:
        """Drop and count."""
        self._wire.refusals.add(refusal_kind(self.kind), why)


class ZmqWire:
    """The wire of one rank (see :class:`apex.transport.wire.Wire`)."""

    neighbours: Collection[int] = ()

    def __init__(
        self,
        world: World,
        callers: list[int],
        largest: int | None,
        called: list[int],
        may_lose: frozenset[int],
    ):
        self.rank, self.size, self.handover = world.rank, world.size, world.handover
        self.survives, self._may_lose, self._world = bool(may_lose), may_lose, world
        self.refusals = world.refusals
        self.allowed: Allowed = {}
        self._hub = world.hub(callers, largest) if callers else None
        self._endpoints, self.processes, self.ranks_on_host = self._meet_all()
        self._links = {rank: world.link(self._endpoints[rank], rank) for rank in called}
        self._boxes: list[Hub | Link] = [*self._links.values(), *([self._hub] if self._hub else [])]
        self._to_learner = self._links.get(LEARNER_RANK)
        self._heads: dict[Hub | Link, tuple[Message, np.ndarray]] = {}
        self._full: list[Hub | Link] = []  # may have a message in this turn; the next to be asked first
        self._numbers = itertools.count(1)
        self._unacknowledged: dict[tuple[int, int], Sent] = {}
        self._leaving: list[
            tuple[zmq.MessageTracker, Sent]
        ] = []  # (what tells when its buffer is free, the message)
        self._completed: list[Sent] = []
        self._changes: list[Change] = []
        self._joining: set[int] = set()  # ranks whose new process has still to greet
        self._looks_for_cuts_at, self._ends = 0.0, False
        self._greet_all(callers)
        if self._hub is not None:
            self._hub.may_lose = may_lose

    # --- sending ---

    def allocate(self, rows: int, nbytes: int) -> np.ndarray:
        """Return plain memory: large messages leave from wherever they are."""
        return aligned_bytes(rows, nbytes)

    def send(self, dest: int, kind: Kind, message: np.ndarray, token: int = 0) -> None:
        """Send; a large message is not copied before it has left."""
        sent, payload = Sent(dest, kind, token), message if len(message) else None
        if KINDS[kind].is_acknowledged:
            self._send(dest, kind, self._expect(sent), payload)
            return
        tracker = self._send(dest, kind, 0, payload, track=bool(token))
        if tracker is not None:
            self._leaving.append((tracker, sent))
        elif token:
            self._completed.append(sent)

    def send_control(self, dest: int, message: dict, token: int = 0, urgent: bool = True) -> None:
        """Send JSON; every message ends a wait, urgent or not."""
        number = self._expect(Sent(dest, Kind.CONTROL, token)) if token else 0
        self._send(dest, Kind.CONTROL, number, encode(message))

    def acknowledge(self, rank: int, number: int) -> None:
        """Tell a rank that its message has been taken."""
        self._send(rank, _TAKEN, number)

    def completed(self) -> list[Sent]:
        """Return the sends that have been acknowledged, or whose buffers are free."""
        if not self._completed:
            return []
        completed, self._completed = self._completed, []
        return completed

    def open_sends(self) -> list[tuple[int, Kind]]:
        """Return what has not been acknowledged."""
        return [(sent.dest, sent.kind) for sent in self._unacknowledged.values()]

    def _send(
        self, dest: int, kind: int, number: int, payload: np.ndarray | None = None, track: bool = False
    ) -> zmq.MessageTracker | None:
        link = self._links.get(dest)
        if link is not None:
            return link.send(kind, number, payload, track)
        assert self._hub is not None, "a rank sends to those that it has met"
        return self._hub.send(dest, kind, number, payload, track)

    def _expect(self, sent: Sent) -> int:
        number = next(self._numbers)
        self._unacknowledged[sent.dest, number] = sent
        return number

    # --- receiving ---

    def receive(self, kinds: Collection[Kind]) -> Received | None:
        """Return the next message of one of these kinds; sockets take turns."""
        found = self._next(kinds)
        return None if found is None else _Framed(self, *found)

    def poll_control(self) -> tuple[int, dict] | None:
        """Return the next control message, and acknowledge it where that is asked for."""
        while (found := self._next(_CONTROL)) is not None:
            message, text = found
            if message.arg:
                self.acknowledge(message.rank, message.arg)
            control = decode(text)
            if control is not None:
                return message.rank, control
            self.refusals.add("control", f"a control message of rank {message.rank} that is no JSON object")
        return None

    def _next(self, kinds: Collection[Kind]) -> tuple[Message, np.ndarray] | None:
        """Return the oldest message of a socket, in turn; ask an empty one again after :meth:`progress`."""
        for box in tuple(self._full):
            head = self._head(box)
            if head is None:
                self._full.remove(box)
            elif head[0].kind in kinds:
                del self._heads[box]
                self._full.remove(box)
                self._full.append(box)
                return head
        return None

    def _head(self, box: Hub | Link) -> tuple[Message, np.ndarray] | None:
        """Return the oldest message of a socket that is not for the wire itself."""
        head = self._heads.get(box)
        while head is None:
            message = box.receive()
            if message is None:
                return None
            if message.kind > Kind.CONTROL:
                self._take_own(box, message)
                continue
            head = self._checked(box, message)
        self._heads[box] = head
        return head

    def _checked(self, box: Hub | Link, message: Message) -> tuple[Message, np.ndarray] | None:
        """Return a message with its payload, or None where it is not allowed, and is dropped."""
        least, most = self.allowed.get((message.rank, message.kind), (1, 0))
        if message.kind == Kind.CONTROL:
            least, most = 1, CONTROL_NBYTES
        payload = box.payload() if message.has_payload else _NOTHING
        if payload is not None and not least <= len(payload) <= most:
            why = f"a message of rank {message.rank} (kind {message.kind}, {len(payload)} bytes)"
            self.refusals.add(refusal_kind(message.kind), why)
            return None
        return None if payload is None else (message, payload)

    def _take_own(self, box: Hub | Link, message: Message) -> None:
        """Act on a message between wires, which no role sees."""
        rank, is_plain = message.rank, not message.has_payload
        if message.kind == _TAKEN and is_plain and (rank, message.arg) in self._unacknowledged:
            self._completed.append(self._unacknowledged.pop((rank, message.arg)))
        elif (
            message.kind == _HELLO
            and is_plain
            and rank in (self._joining if self.rank == LEARNER_RANK else self._may_lose)
        ):
            self._welcome(rank)
        else:
            box.refuse()

    # --- progress and membership ---

    def progress(self) -> None:
        """Read messages between wires; notice broken connections and processes that want to join."""
        if self._hub is not None:
            self._look_for_cuts()
        is_cut = self._to_learner is not None and self._to_learner.is_lost()
        self._full = [box for box in self._boxes if self._head(box) is not None]
        if len(self._full) > 1:
            self._boxes.append(self._boxes.pop(0))  # the next turn begins with another
        if self._leaving:
            self._completed += [sent for tracker, sent in self._leaving if tracker.done]
            self._leaving = [entry for entry in self._leaving if not entry[0].done]
        if is_cut and self._to_learner not in self._full:  # what came before is still to be received
            self._changes.append(Change(LEARNER_RANK, LOST, "the connection has broken"))
        if self.survives and self.rank == LEARNER_RANK:
            self._accept_joiners()

    def changes(self) -> list[Change]:
        """Return losses and replacements."""
        if not self._changes:
            return []
        changes, self._changes = self._changes, []
        return changes

    def replace(self, rank: int, handover: dict | None) -> None:
        """Tell the process that has come already."""
        if handover is None:
            self._joining.discard(rank)
        else:
            handover |= {"rank": rank, "endpoints": self._endpoints, "ranks_on_host": self.ranks_on_host}
        self._world.answer(rank, handover)

    def begin_end(self) -> None:
        """Ranks leave by themselves from now on."""
        self._ends = True

    def pending(self) -> list[str]:
        """Name the processes that have still to greet."""
        return ["a new process to join"] * bool(self._joining)

    def waking(self) -> Waking:
        """Every message ends a wait."""
        return Waking(wait=wait_on(self._boxes))

    def close(self) -> None:
        """Close the sockets; what was sent last still leaves."""
        for box in self._boxes:
            box.close()

    def _look_for_cuts(self) -> None:
        """Count connections that were cut, now and then."""
        now = time.monotonic()
        if now >= self._looks_for_cuts_at and not self._ends and self._hub is not None:
            self._looks_for_cuts_at = now + _LOOKS_FOR_CUTS_EVERY_S
            self._hub.count_cuts()

    def _accept_joiners(self) -> None:
        while (joiner := self._world.joiner()) is not None:
            rank, process = joiner
            if rank not in self._may_lose:
                self.refusals.add("other", f"a process in the place of rank {rank}, which cannot be lost")
                continue
            self.processes[rank] = process
            self._joining.add(rank)
            lost = [number for number in self._unacknowledged if number[0] == rank]
            self._completed += [self._unacknowledged.pop(number) for number in lost]
            self._changes.append(Change(rank, LOST, "its process has ended"))

    def _welcome(self, rank: int) -> None:
        """Greet a process that has taken a lost one's place."""
        self._send(rank, _WELCOME, 0)
        if rank in self._joining:
            self._joining.discard(rank)
            self._changes.append(Change(rank, REPLACED, ""))

    # --- meeting ---

    def _meet_all(self) -> tuple[list[str], list[list], int]:
        """Return all endpoints, all processes, and how many ranks this host has. Collective at the start."""
        if self.handover is not None:
            return self.handover["endpoints"], [], self.handover["ranks_on_host"]
        endpoints = self._world.allgather(self._hub and self._hub.endpoint)
        processes = self._world.allgather([socket.gethostname(), *own_process()])
        return endpoints, processes, [host for host, *_ in processes].count(socket.gethostname())

    def _greet_all(self, callers: list[int]) -> None:
        """Greet the ranks that this one connects to, and wait for them: no message arrives too early."""
        for link in self._links.values():
            link.send(_HELLO)
        missing: set[int | None] = set(callers)
        while missing and self._hub is not None:
            missing.discard(_greeting(self._hub, _HELLO))
        for rank in callers:
            self._send(rank, _WELCOME, 0)
        for link in self._links.values():
            while _greeting(link, _WELCOME) is None:
                pass


def _greeting(box: Hub | Link, kind: int) -> int | None:
    """Wait for a message; return who sent it if it is a greeting."""
    box.socket.poll()
    message = box.receive()
    if message is None:
        return None
    if message.kind == kind and not message.has_payload:
        return message.rank
    box.refuse()
    return None
