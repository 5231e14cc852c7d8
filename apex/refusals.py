"""Messages that a rank refuses, as malformed, oversized or unexpected: dropped and counted by kind."""

from __future__ import annotations

from collections import Counter

from apex.say import warn

KINDS = ("intake", "sample_request", "sample", "priority", "weight_request", "weights", "control", "other")
"""The kinds of message (see ``apex.transport.wire.Kind``); other: none of them, or from outside the run."""


class Refusals:
    """Counts what ``owner``, a rank's name, refuses. The first message of each kind is reported on stderr."""

    def __init__(self, owner: str):
        self.owner = owner
        self._all: Counter[str] = Counter()
        self._new: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Messages refused so far."""
        return self._all.total()

    def add(self, kind: str, why: str) -> None:
        """Count one message of a kind of :data:`KINDS`; ``why`` names the message, sender and fault."""
        if not self._all[kind]:
            warn(f"apex: {self.owner} refused {why}; more of this kind are only counted")
        self._all[kind] += 1
        self._new[kind] += 1

    def poll(self) -> dict[str, int]:
        """Return kind -> messages refused since the last call."""
        new, self._new = self._new, Counter()
        return dict(new)
