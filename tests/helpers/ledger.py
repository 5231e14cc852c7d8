"""What the ranks of a storm write down (see ``stress_roles``).

Every message that each has sent and received.
"""

import zlib
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from apex.schema import Limits

INTAKE, SAMPLE, PRIORITY, REPORT = "intake batch", "sample batch", "priority message", "report"
REQUEST, REFUSAL = "sample request", "refusal"
CONTROL_REQUEST, ACK = "request", "acknowledgement"
ANY_REPLAY = -1  # the port chooses which replay rank an intake batch goes to
NEVER = 10**9  # learner steps that no publish reaches


class Scenario(NamedTuple):
    """How much is sent before the end, and how large; sizes in bytes."""

    samples: int  # sample batches the learner takes before it ends the run
    intake: int  # intake batches each actor sends, and
    weights: int  # weights it receives, before it asks for the end
    rounds: int  # times all of it is done, each with new ports
    intake_nbytes: int
    weight_nbytes: int
    limits: Limits
    ask_for_never: bool = False  # half of the acting ranks ask for weights that are never published
    delay_s: float = 0.002  # longest random pause


class Ledger:
    """What one rank sent and received, and which rules it saw broken."""

    def __init__(self, rank: int):
        self.rank = rank
        self.sent = defaultdict(list)  # (kind, from, to) -> [(length, checksum)], in order
        self.received = defaultdict(list)
        self.published: dict[int, tuple] = {}  # param_version -> (length, checksum)
        self.weights: list[
            tuple[int, int, int, tuple]
        ] = []  # (param_version, learner steps, steps asked for, (length, checksum))
        self.asked_for_weights = 0
        self.problems: list[str] = []

    def expect(self, holds: bool, rule: str) -> None:
        """Note a broken rule."""
        if not holds:
            self.problems.append(f"rank {self.rank}: {rule}")


def seal_control(message: tuple) -> tuple[int, int]:
    """Return ``(length, checksum)`` of a control message."""
    return seal(np.frombuffer(repr(message).encode(), np.uint8))


def seal(data: np.ndarray) -> tuple[int, int]:
    """Return ``(length, checksum)`` of a message."""
    return len(data), zlib.crc32(data)
