"""What a rank does not take: malformed, oversized or unasked for. Each is counted, the first is told."""

from __future__ import annotations

from apex.say import warn


class Refusals:
    """The number of messages that ``owner`` has refused."""

    def __init__(self, owner: str):
        self.owner, self.count = owner, 0

    def add(self, why: str, number: int = 1) -> None:
        """Count ``number`` more; say ``why`` where they are the first."""
        if not self.count:
            warn(f"apex: {self.owner} refused {why}; more are only counted")
        self.count += number


class Refusing:
    """What every port says of the messages that it, or the role behind it, has refused; to be given ``refusals``."""

    refusals: Refusals

    @property
    def refused(self) -> int:
        """Messages refused so far."""
        return self.refusals.count

    def refuse(self, why: str) -> None:
        """The role does not take what the port has handed out."""
        self.refusals.add(why)
