"""What a role may ask of a transport: one port per role, all calls non-blocking.

A role never waits inside a port. It asks, does what work there is, and returns from its ``step``;
whoever drives the role decides how to wait (see ``apex/loop.py``). All message buffers are
flat uint8 arrays laid out by ``apex.schema``; nothing on these paths is pickled.

Ending: the learner calls ``stop``; every other port then reports ``stopping``. A role that sees it sends
nothing new except its last report and calls ``finish``; a replay rank does so when the learner has told it
that all actors are through, so that its last counts hold all that was on its way. ``finished`` turns true
once every message of every rank has been received, so no rank leaves while another still sends to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from apex.control import Ack, Request


class IntakeEvent(NamedTuple):
    """An intake batch has landed in the buffer given to ``poll``: its length and the sending actor."""

    nbytes: int
    actor: int


class SampleRequestEvent(NamedTuple):
    """The learner asks for one more sample batch."""


class PriorityEvent(NamedTuple):
    """Priorities came back: a priority message valid until the next ``poll``."""

    message: np.ndarray


class Report(NamedTuple):
    """A role's counters (see ``apex.metrics``): role, role index, float64 vector."""

    role: str
    index: int  # type: ignore[assignment]  # a field in place of tuple's method
    vector: np.ndarray


class Acknowledged(NamedTuple):
    """A rank has done what the learner asked for: role, role index, the acknowledgement."""

    role: str
    index: int  # type: ignore[assignment]  # a field in place of tuple's method
    ack: Ack


LOST, REPLACED, NOT_REPLACED = "lost", "replaced", "not replaced"


class Change(NamedTuple):
    """An acting rank is ``LOST``, ``REPLACED`` by a new process, or ``NOT_REPLACED``; and why."""

    rank: int
    what: str
    why: str


class PeerLost(RuntimeError):
    """A rank was lost that the run needs."""


class Waking(NamedTuple):
    """What a transport has for a rank that waits (see ``loop.Wait``); None for what it has not."""

    wait: Callable[[float], None] | None = None
    """Sleep until a message is here, at most so many seconds."""

    bell: Bell | None = None
    """Rung by ranks of the same host that send something."""

    traffic: Callable[[], int] | None = None
    """Count the messages that have come, those that the role never sees among them."""

    moving: Callable[[], bool] | None = None
    """Whether a message is on its way that only polls of this rank carry on."""


class Bell(Protocol):
    """Wakes a rank that has said that it sleeps (see ``shared.Bell``)."""

    def listen(self, whether: bool) -> None:
        """Say whether this rank sleeps."""

    def wait(self, seconds: float) -> bool:
        """Sleep at most this long; return whether somebody has woken this rank."""


class Port(Protocol):
    """What every role may ask."""

    ranks_here: int
    """Ranks on this host, this one included."""

    @property
    def refused(self) -> int:
        """Messages that were malformed, too long or unexpected, and dropped; one of each kind was printed."""

    def waking(self) -> Waking:
        """Return how messages wake this rank."""

    def refuse(self, kind: str, why: str) -> None:
        """Count a message whose content the role rejects, by a kind of ``apex.refusals``."""

    def poll_refusals(self) -> dict[str, int]:
        """Return kind -> messages refused since the last call."""

    def progress(self) -> None:
        """Let messages move; cheap, called often."""

    def send_report(self, vector: np.ndarray) -> bool:
        """Send this role's counters to the learner; False while an earlier report is on its way."""

    def poll_request(self) -> Request | None:
        """Return the learner's request if one has arrived; to be polled until ``finished``."""

    def acknowledge(self, ack: Ack) -> None:
        """Acknowledge the request that was polled last; once at most, and not after ``finish``."""

    def request_stop(self) -> None:
        """Ask the learner to end the run: a signal arrived here. Once ``stopping``, nothing is sent."""

    @property
    def stopping(self) -> bool:
        """The learner has ended the run."""

    def finish(self) -> None:
        """Declare that this role sends nothing new."""

    @property
    def finished(self) -> bool:
        """All ranks have finished and all messages have been received."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is in flight here, for a world of one process; the learner's port has that of all."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``, once the ports of all ranks exist."""

    def waits_for(self) -> str:
        """Say in a few words what this port's unfinished messages wait for."""


class WeightsPort(Port, Protocol):
    """Roles that act with the learner's weights: actors and the evaluator."""

    handover: dict[str, Any] | None
    """The learner's handover to a process that replaces a lost one; None for a process of the start."""

    def request_weights(self, min_learner_steps: int, into: np.ndarray) -> None:
        """Ask for the newest publish of at least that many learner steps, to be received in place.

        ``into`` is a weight message, left alone by the caller until ``poll_weights`` returns true.
        Ignored while an earlier request is open.
        """

    def poll_weights(self) -> bool:
        """Whether the publish asked for has arrived since the last call."""


class ActorPort(WeightsPort, Protocol):
    """An actor streams intake batches, at most a fixed number on the wire."""

    def intake_memory(self, rows: int, nbytes: int) -> np.ndarray:
        """Return uint8[rows, nbytes], zeroed, to build intake batches in; call it once."""

    def can_send_intake(self) -> bool:
        """Whether a credit is free."""

    def send_intake(self, token: int, message: np.ndarray) -> None:
        """Send ``message``, which must stay unchanged until ``completed_intake`` returns ``token``."""

    def completed_intake(self) -> list[int]:
        """Return the tokens whose batches the replay rank has received since the last call."""


class ReplayPort(Port, Protocol):
    """A replay rank receives events and answers sample requests."""

    def poll(self, landing: np.ndarray | None) -> IntakeEvent | SampleRequestEvent | PriorityEvent | None:
        """Return the next event since ``progress``. Intake goes into ``landing``; None takes none."""

    def sample_buffer(self) -> np.ndarray | None:
        """Return a free send buffer of one sample message, or None while all are on their way."""

    def send_sample(self, buffer: np.ndarray) -> None:
        """Answer the oldest open request with the filled ``buffer`` that ``sample_buffer`` returned."""

    def refuse_sample(self) -> None:
        """Answer the oldest open request with nothing, as the run is ending."""

    @property
    def quiet(self) -> bool:
        """Whether nothing that has been taken is still to be handed out by ``poll``."""


class LearnerPort(Port, Protocol):
    """The learner draws, returns priorities, publishes, hears reports, and ends the run."""

    def request_sample(self, replay: int) -> None:
        """Ask a replay rank for one more batch; batches arrive in the order asked."""

    def poll_sample(self) -> tuple[int, np.ndarray] | None:
        """Return ``(replay index, sample message)`` of the oldest request if it has arrived.

        The message, read-only, stays valid until the next call, or the first ``progress`` after ``stop``.
        """

    def priority_buffer(self) -> np.ndarray:
        """Return a free buffer of one priority message; ``send_priorities`` is to follow."""

    def send_priorities(self, replay: int) -> None:
        """Send what the last ``priority_buffer`` was filled with."""

    def wants_weights(self, learner_steps: int) -> bool:
        """Whether a rank waits for weights, and those of so many learner steps are enough for it."""

    def publish_buffer(self, nbytes: int) -> np.ndarray:
        """Return a buffer of one weight message that nobody reads; ``publish`` is to follow."""

    def publish(self) -> None:
        """Make the filled ``publish_buffer`` the newest publish; older ones are never sent again."""

    def poll_reports(self) -> list[Report]:
        """Return the reports received since the last call."""

    def request(self, rank: int, request: Request) -> None:
        """Ask a rank; not again before it has acknowledged, so that one request at most is on its way.

        After ``stop`` once more at most, without an acknowledgement, and it arrives after all else that this
        rank was sent.
        """

    def poll_acks(self) -> list[Acknowledged]:
        """Return the acknowledgements received since the last call."""

    def poll_changes(self) -> list[Change]:
        """Return the acting ranks lost or replaced since the last call."""

    def replace(self, rank: int, handover: dict[str, Any]) -> None:
        """Start a process in the place of a ``LOST`` rank and give it ``handover`` (JSON)."""

    def awaited(self) -> set[int]:
        """Return the ranks that the end of the run still waits for."""

    def kill(self, rank: int) -> bool:
        """Kill the process of an acting rank that hangs; return whether it could be reached."""

    @property
    def stop_requested(self) -> bool:
        """Some rank asked to end the run."""

    def stop(self) -> None:
        """Tell every role that the run ends."""
