"""Weight messages that several ranks read, and who is answered with which."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


class Publish:
    """A weight message and the number of ranks that still read it."""

    def __init__(self, message: np.ndarray):
        self.message, self.readers = message, 0

    def release(self) -> None:
        """One has read it."""
        self.readers -= 1


def answer(requests: dict[int, int], steps: int, give: Callable[[int], None], refuse: Callable[[int], None] | None) -> None:
    """Answer the requests (rank -> learner steps wanted) that ``steps`` are enough for; where there is ``refuse``, all, with nothing."""
    for rank, wanted in list(requests.items()):
        if refuse is not None:
            refuse(rank)
        elif steps >= wanted:
            give(rank)
        else:
            continue
        del requests[rank]
