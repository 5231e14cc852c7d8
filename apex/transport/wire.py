"""What passes between ranks: one table of every kind of message, and the wire that carries them.

A :class:`Wire` moves bytes between ranks, tells which ranks are lost, and knows no role. The endpoints
(:mod:`apex.transport.endpoints`) know the roles and are written once, over any wire.

Two planes. Data: a few kinds of a fixed layout (see :mod:`apex.schema`), large and many. Control: one
kind, JSON of at most ``CONTROL_NBYTES``, small and few. Between two ranks messages of one kind keep
their order, and so do control messages. A control message may overtake data, and data a control message.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from apex.ports import Change, Waking
from apex.refusals import Refusals
from apex.schema import Limits
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY

CONTROL_NBYTES = 1 << 16
_ANY_LENGTH = sys.maxsize
_WEIGHT_REQUEST_NBYTES = 8


class Kind(IntEnum):
    """The kinds of message; CONTROL is the whole control plane."""

    INTAKE, SAMPLE_REQUEST, SAMPLE, PRIORITY, WEIGHT_REQUEST, WEIGHTS, CONTROL = range(1, 8)

    def __str__(self) -> str:
        return _SPOKEN[self]


_SPOKEN = {kind: kind.name.lower().replace("_", " ") for kind in Kind} | {
    Kind.INTAKE: "intake batch",
    Kind.SAMPLE: "sample batch",
    Kind.PRIORITY: "priority message",
    Kind.WEIGHTS: "publish",
    Kind.CONTROL: "control message",
}


def refusal_kind(kind: int) -> str:
    """Return the kind (see ``apex.refusals.KINDS``) under which a message that is refused is counted."""
    return Kind(kind).name.lower() if kind in set(Kind) else "other"


class Spec(NamedTuple):
    """One line of the table of data messages."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    nbytes: Callable[[Limits], tuple[int, int]]
    """Least and most bytes."""
    flow: str
    """What bounds the messages in flight."""
    on_loss: str
    """What happens to them when the other rank is lost."""
    is_bulk: bool = False
    """Large: a wire that shares memory with the receiver lets it read the payload in place."""
    is_acknowledged: bool = False
    """Every wire reports when the receiver has taken it; for other kinds, when the buffer is free again."""
    is_held: bool = False
    """The receiver may leave it where it is, for as long as it likes, and receive other kinds meanwhile."""


KINDS: dict[Kind, Spec] = {
    Kind.INTAKE: Spec(
        (ACTOR,), (REPLAY,), lambda limits: (1, limits.intake_nbytes or _ANY_LENGTH),
        "actor.in_flight to each replay rank", "a batch that has arrived whole is kept, any other is dropped",
        is_bulk=True, is_acknowledged=True, is_held=True,
    ),
    Kind.SAMPLE_REQUEST: Spec(
        (LEARNER,), (REPLAY,), lambda limits: (0, 0),
        "learner.prefetch, over all replay ranks", "ends the run",
    ),
    Kind.SAMPLE: Spec(
        (REPLAY,), (LEARNER,), lambda limits: (0, limits.sample_nbytes),
        "one for each request; empty: none, as the run ends", "ends the run", is_bulk=True,
    ),
    Kind.PRIORITY: Spec(
        (LEARNER,), (REPLAY,), lambda limits: (limits.priority_nbytes, limits.priority_nbytes),
        "one for each sample batch", "ends the run",
    ),
    Kind.WEIGHT_REQUEST: Spec(
        (ACTOR, EVALUATOR), (LEARNER, ACTOR), lambda limits: (_WEIGHT_REQUEST_NBYTES, _WEIGHT_REQUEST_NBYTES),
        "one for each rank that acts", "is forgotten",
    ),
    Kind.WEIGHTS: Spec(
        (LEARNER, ACTOR), (ACTOR, EVALUATOR), lambda limits: (0, _ANY_LENGTH),
        "one for each request; empty: none, as the run ends", "its buffer is free again", is_bulk=True,
    ),
}  # fmt: skip
"""Every kind of data message. An actor sends weights to actors of its host only (see ``weights.Relay``)."""


def posted_at_a_time(limits: Limits) -> int:
    """Return how many bulk messages may be on their way between two ranks."""
    return max(limits.intake_in_flight, limits.prefetch) + 1


class Control(NamedTuple):
    """One line of the table of control messages: senders, receivers, types of fields, and what bounds it."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    fields: dict[str, type]
    flow: str


_ACTING = (EVALUATOR, ACTOR)
_MEMBERS = (REPLAY, *_ACTING)
CONTROLS: dict[str, Control] = {
    "report": Control(
        _MEMBERS, (LEARNER,), {"values": list}, "one in flight: the next waits until it has been taken"
    ),
    "checkpoint": Control(
        (LEARNER,),
        _MEMBERS,
        {"number": int, "learner_steps": int, "base": int},
        "one request, until it is acknowledged",
    ),
    "checkpoint written": Control(
        _MEMBERS, (LEARNER,), {"number": int, "error": int, "state": dict}, "one for each request"
    ),
    "epsilon": Control(
        (LEARNER,), (ACTOR,), {"position": int, "total": int}, "one request, until it is acknowledged"
    ),
    "epsilon taken": Control((ACTOR,), (LEARNER,), {}, "one for each request"),
    "no more intake": Control(
        (LEARNER,), (REPLAY,), {}, "one for each rank, after all else that it was sent"
    ),
    "stop request": Control(_MEMBERS, (LEARNER,), {}, "one for each rank"),
    "stop": Control((LEARNER,), _MEMBERS, {}, "one for each rank"),
    "finished": Control(_MEMBERS, (LEARNER,), {}, "one for each rank, once it waits for nothing any more"),
    "done": Control((LEARNER,), _MEMBERS, {}, "one for each rank, once all have finished"),
    "kill": Control((LEARNER,), _MEMBERS, {"pid": int, "began": int}, "one for each heartbeat timeout"),
}
"""Every control message, by its ``"kind"``. A rank that is lost takes its own with it."""


def encode(control: dict[str, Any]) -> np.ndarray:
    """Return a control message as it travels: JSON, uint8."""
    return np.frombuffer(json.dumps(control).encode(), np.uint8)


def decode(text: np.ndarray) -> dict[str, Any] | None:
    """Return the control message that has arrived, or None where it is no JSON object."""
    try:
        control = json.loads(text.tobytes())
    except (ValueError, RecursionError):
        return None
    return control if type(control) is dict else None


class Sent(NamedTuple):
    """The receiver has taken the message with ``token`` (acknowledged kinds), or its buffer is free again."""

    dest: int
    kind: Kind
    token: int


class Received(ABC):
    """A matched message: copy it by :meth:`into`, read it in place after :meth:`view`, or :meth:`reject` it.

    What arrives over a network may need time: the payload is here once :meth:`arrived` returns true.
    """

    __slots__ = ("kind", "nbytes", "source")

    def __init__(self, source: int, kind: Kind, nbytes: int):
        self.source, self.kind, self.nbytes = source, kind, nbytes

    @abstractmethod
    def into(self, buffer: np.ndarray) -> None:
        """Receive the payload into the front of uint8 ``buffer``, which has room for it, and release it."""

    @abstractmethod
    def view(self) -> np.ndarray:
        """Return where the payload is, or will be: uint8[nbytes], read-only, valid until :meth:`release`."""

    def arrived(self) -> bool | None:
        """Whether the payload is here; None where its sender was lost on the way."""
        return True

    @abstractmethod
    def release(self) -> None:
        """Give the memory of :meth:`view` back. Messages of one rank are released in order of receipt."""

    @abstractmethod
    def reject(self, why: str) -> None:
        """Drop the message and count it, in place of :meth:`into` and :meth:`view`."""


class Held(Received):
    """A message whose payload is this process's own, as of a run that resumes."""

    def __init__(self, source: int, kind: Kind, payload: np.ndarray):
        super().__init__(source, kind, len(payload))
        self._payload = payload

    def into(self, buffer: np.ndarray) -> None:
        """Copy."""
        buffer[: self.nbytes] = self._payload

    def view(self) -> np.ndarray:
        """Return it."""
        return self._payload

    def release(self) -> None:
        """Nobody waits."""

    def reject(self, why: str) -> None:
        """Nobody counts."""


Allowed = Mapping[tuple[int, int], tuple[int, int]]
"""(source, kind) -> least and most bytes of what a rank takes; a wire rejects all else."""


class Wire(Protocol):
    """Carries messages between ranks that have met; no call waits."""

    rank: int
    size: int
    ranks_on_host: int
    """Ranks on this rank's host, this one included."""
    neighbours: Collection[int]
    """Ranks that read this rank's allocated memory in place."""
    processes: list[Any]
    """Of each rank: its host, process id, and when the process began."""
    survives: bool
    """Whether the run survives the loss of a rank that it does not need."""
    handover: dict[str, Any] | None
    """The learner's handover to a process that replaces a lost one; None for a process of the start."""
    refusals: Refusals
    allowed: Allowed

    def allocate(self, rows: int, nbytes: int) -> np.ndarray:
        """Return uint8[rows, nbytes], zeroed, that neighbours read in place; call it twice at most."""

    def send(self, dest: int, kind: Kind, message: np.ndarray, token: int = 0) -> None:
        """Send uint8 ``message``; leave it unchanged until :meth:`completed` returns ``token``."""

    def completed(self) -> list[Sent]:
        """Return the sends with a token that have been completed since the last call."""

    def receive(self, kinds: Collection[Kind]) -> Received | None:
        """Return the next message of one of these kinds: allowed, and in turn where several ranks send.

        All kinds that are not held (see :class:`Spec`) are asked for together. A wire may answer from what it
        has read in :meth:`progress`.
        """

    def send_control(self, dest: int, message: dict[str, Any], token: int = 0, urgent: bool = True) -> None:
        """Send JSON, acknowledged where there is a token; a message that is not ``urgent`` wakes nobody."""

    def poll_control(self) -> tuple[int, dict[str, Any]] | None:
        """Return ``(source, message)`` of the next control message."""

    def changes(self) -> list[Change]:
        """Return the ranks lost or replaced since the last call. Sends to a lost rank count as completed."""

    def replace(self, rank: int, handover: dict[str, Any] | None) -> None:
        """Start a process in the place of a lost rank and give it ``handover``; None: start none."""

    def begin_end(self) -> None:
        """The run ends: no new process is started, and none is waited for for long."""

    def progress(self) -> None:
        """Let messages move; cheap, called often."""

    def waking(self) -> Waking:
        """Return how messages wake this rank."""

    def open_sends(self) -> list[tuple[int, Kind]]:
        """Return ``(rank, kind)`` of each send that is not complete, as far as this wire knows."""

    def pending(self) -> list[str]:
        """Name what this rank must stay for beside its messages."""

    def close(self) -> None:
        """Free what the wire holds; what was sent last still leaves."""
