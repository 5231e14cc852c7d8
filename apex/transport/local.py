"""The wire within one process: messages wait in the receiver's inbox. Deterministic, for tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np

from apex.ports import Change, Waking
from apex.refusals import Refusals
from apex.schema import aligned_bytes
from apex.transport.wire import KINDS, Allowed, Kind, Received, Sent, decode, encode, refusal_kind


class LocalWorld:
    """The wires of so many ranks."""

    def __init__(self, size: int):
        self.wires = [LocalWire(self, rank, size) for rank in range(size)]


class LocalMessage(Received):
    """A message in an inbox; the payload is the sender's own memory until it is received or released."""

    def __init__(self, sender: LocalWire, kind: Kind, payload: np.ndarray, dest: int, token: int):
        super().__init__(sender.rank, kind, len(payload))
        self.sender, self.payload, self.dest, self.token = sender, payload, dest, token

    def into(self, buffer: np.ndarray) -> None:
        """Copy."""
        buffer[: self.nbytes] = self.payload
        self.release()

    def view(self) -> np.ndarray:
        """Return the sender's memory."""
        return self.payload

    def release(self) -> None:
        """Tell the sender."""
        self.sender.taken(self)

    def reject(self, why: str) -> None:
        """Drop and count."""
        self.release()
        self.sender.world.wires[self.dest].refusals.add(refusal_kind(self.kind), why)


class LocalWire:
    """The wire of one rank (see :class:`apex.transport.wire.Wire`)."""

    neighbours: Collection[int] = ()
    survives = False
    handover: dict[str, Any] | None = None

    def __init__(self, world: LocalWorld, rank: int, size: int):
        self.world, self.rank, self.size, self.ranks_on_host = world, rank, size, size
        self.processes: list[Any] = []
        self.refusals = Refusals(f"rank {rank}")
        self.allowed: Allowed = {}
        self._inbox: deque[LocalMessage] = deque()
        self._held: deque[LocalMessage] = deque()  # what the receiver may leave here
        self._controls: deque[tuple[int, np.ndarray, int]] = deque()  # source, JSON, token
        self._open: list[LocalMessage] = []  # of this rank's sends
        self._completed: list[Sent] = []

    def allocate(self, rows: int, nbytes: int) -> np.ndarray:
        """Return plain memory."""
        return aligned_bytes(rows, nbytes)

    def send(self, dest: int, kind: Kind, message: np.ndarray, token: int = 0) -> None:
        """Put a message into the receiver's inbox."""
        entry = LocalMessage(self, kind, message, dest, token)
        self._open.append(entry)
        self.world.wires[dest].put(entry)

    def put(self, entry: LocalMessage) -> None:
        """Take a message into this rank's inbox."""
        (self._held if KINDS[entry.kind].is_held else self._inbox).append(entry)

    def taken(self, entry: LocalMessage) -> None:
        """The receiver has taken a message of this rank's."""
        self._open.remove(entry)
        if entry.token:
            self._completed.append(Sent(entry.dest, entry.kind, entry.token))

    def completed(self) -> list[Sent]:
        """Return the sends that have been taken."""
        completed, self._completed = self._completed, []
        return completed

    def receive(self, kinds: Collection[Kind]) -> Received | None:
        """Return the oldest message; held kinds come last."""
        for box in (self._inbox, self._held):
            while box and box[0].kind in kinds:
                message = box.popleft()
                least, most = self.allowed.get((message.source, message.kind), (1, 0))
                if least <= message.nbytes <= most:
                    return message
                message.reject(
                    f"a message of rank {message.source} (kind {message.kind}, {message.nbytes} bytes)"
                )
        return None

    def send_control(self, dest: int, message: dict[str, Any], token: int = 0, urgent: bool = True) -> None:
        """Put it into the receiver's inbox."""
        self.world.wires[dest]._controls.append((self.rank, encode(message), token))

    def poll_control(self) -> tuple[int, dict[str, Any]] | None:
        """Return the oldest control message."""
        if not self._controls:
            return None
        source, text, token = self._controls.popleft()
        if token:
            self.world.wires[source]._completed.append(Sent(self.rank, Kind.CONTROL, token))
        message = decode(text)
        return None if message is None else (source, message)

    def changes(self) -> list[Change]:
        """No rank is lost alone."""
        return []

    def replace(self, rank: int, handover: dict[str, Any] | None) -> None:
        """No rank is replaced."""

    def begin_end(self) -> None:
        """Nothing is being started."""

    def progress(self) -> None:
        """Nothing moves by itself here."""

    def waking(self) -> Waking:
        """No rank sleeps here."""
        return Waking()

    def open_sends(self) -> list[tuple[int, Kind]]:
        """Return what lies in inboxes."""
        return [(entry.dest, entry.kind) for entry in self._open]

    def pending(self) -> list[str]:
        """Nothing else is waited for."""
        return []

    def close(self) -> None:
        """Nothing is held."""

    def state_dict(self) -> dict[str, Any]:
        """Return the messages in this rank's inboxes; a resumed run needs no control messages."""
        messages = [*self._inbox, *self._held]
        return {
            "messages": [
                [m.source, int(m.kind), m.token * KINDS[m.kind].is_acknowledged, m.payload.copy()]
                for m in messages
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the inboxes; only senders of acknowledged messages expect a completion."""
        for source, kind, token, payload in state["messages"]:
            sender = self.world.wires[source]
            entry = LocalMessage(sender, Kind(kind), payload, self.rank, token)
            sender._open.append(entry)
            self.put(entry)
