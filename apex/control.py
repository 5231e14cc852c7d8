"""What the learner asks of a rank beside data, and what the rank acknowledges.

Each message is a named tuple whose fields travel as JSON (see ``CONTROLS`` in :mod:`apex.transport.wire`,
which says who may send which to whom). ``fault()`` says what is wrong with the values of one that has
arrived.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

_MAX_ERRNO = 4095  # as the kernel has it


class CheckpointRequest(NamedTuple):
    """A rank is to write its part of checkpoint ``number`` of this run's process, at ``learner_steps``.

    ``base`` is the number of the newest complete one, on which it builds; 0 is the one resumed from.
    """

    number: int
    learner_steps: int
    base: int

    def fault(self) -> str | None:
        """Say what is wrong with the values; None where nothing is."""
        if 0 <= self.base < self.number < 2**63 and 0 <= self.learner_steps < 2**63:
            return None
        return f"a request of checkpoint {self.number} at step {self.learner_steps} on {self.base}"

    def partial(self, checkpoints: Path) -> Path:
        """Return the folder that it is written into."""
        return checkpoints / f".{self.name}-{self.number}.partial"

    @property
    def name(self) -> str:
        """Return the name of the folder once it is complete."""
        return f"step-{self.learner_steps:09d}"


class CheckpointAck(NamedTuple):
    """A rank's part is written. ``error`` is 0, or the error number of what went wrong.

    ``state`` is what a rank that writes no file goes on from: plain values (see :mod:`apex.state`).
    """

    number: int
    error: int
    state: dict[str, Any]

    def fault(self) -> str | None:
        """Say what is wrong with the values; None where nothing is."""
        return None if 0 <= self.error <= _MAX_ERRNO else f"a part of a checkpoint with error {self.error}"


class EpsilonAssignment(NamedTuple):
    """An actor explores from now on as number ``position`` of ``total`` actors."""

    position: int
    total: int

    def fault(self) -> str | None:
        """Say what is wrong with the values; None where nothing is."""
        return None if 0 <= self.position < self.total else f"a place {self.position} of {self.total} actors"


class EpsilonAck(NamedTuple):
    """The actor explores so."""

    def fault(self) -> str | None:
        """Nothing can be wrong."""
        return None


class NoMoreIntake(NamedTuple):
    """All actors have finished: a replay rank's counts are final once it has received what is here."""

    def fault(self) -> str | None:
        """Nothing can be wrong."""
        return None


Request = CheckpointRequest | EpsilonAssignment | NoMoreIntake
Ack = CheckpointAck | EpsilonAck
REQUESTS: dict[str, type[Request]] = {
    "checkpoint": CheckpointRequest, "epsilon": EpsilonAssignment, "no more intake": NoMoreIntake,
}  # fmt: skip
ACKS: dict[str, type[Ack]] = {"checkpoint written": CheckpointAck, "epsilon taken": EpsilonAck}


def as_json(message: Request | Ack) -> dict[str, Any]:
    """Return a message as it travels."""
    kinds = {cls: kind for kind, cls in {**REQUESTS, **ACKS}.items()}
    return {"kind": kinds[type(message)], **message._asdict()}
