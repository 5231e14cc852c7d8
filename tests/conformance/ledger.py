"""The account that a rank of a storm keeps of its messages (see ``stormers``), for ``port_conformance`` to compare."""

import zlib
from collections import defaultdict

import numpy as np


class Ledger:
    """What one rank sent and received, and which rules it saw broken."""

    def __init__(self, rank: int):
        self.rank = rank
        self.sent = defaultdict(list)  # (kind, from, to) -> [(length, checksum)], in order
        self.received = defaultdict(list)
        self.published: dict[int, tuple] = {}  # param_version -> (length, checksum)
        self.weights: list[tuple[int, int, int, tuple]] = []  # (param_version, learner steps, steps asked for, (length, checksum))
        self.asked_for_weights = self.evaluated = 0
        self.problems: list[str] = []

    def expect(self, holds: bool, rule: str) -> None:
        """Note a broken rule."""
        if not holds:
            self.problems.append(f"rank {self.rank}: {rule}")


def seal(data: np.ndarray) -> tuple[int, int]:
    """Return ``(length, checksum)`` of a message."""
    return len(data), zlib.crc32(data)
