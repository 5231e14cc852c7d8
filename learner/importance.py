"""Importance-sampling weights (Schaul et al. 2016, section 3.4)."""

from __future__ import annotations

import numpy as np

from apex.state import is_number, list_of, require

STATE = {"smallest": list_of(is_number)}


class ImportanceWeights:
    """is_weight_i = (1 / (size * probability_i))^beta, divided by its maximum.

    The size cancels: is_weight_i = (smallest probability / probability_i)^beta, where the smallest is
    that of the batch (``normalizer="batch"``) or of all replay ranks (``"global"``). A global maximum does
    not depend on the rows of a batch. Replay ranks are sampled in turn, so a row is drawn with its
    probability within its rank divided by the number of ranks, which cancels too. ``smallest``, float64
    [num_replay], holds the newest value from each rank.
    """

    def __init__(self, beta: float, normalizer: str, num_replay: int):
        self.beta, self.normalizer = beta, normalizer
        self.smallest = np.full(num_replay, np.inf)

    def __call__(self, replay: int, views: dict[str, np.ndarray]) -> np.ndarray:
        """Return float32[B] in (0, 1] for a sample message of replay rank ``replay``."""
        probability = views["probability"]
        if self.normalizer == "batch":
            smallest = probability.min()
        else:
            self.smallest[replay] = views["minimum"][0] / views["total"][0]
            smallest = self.smallest.min()
        return ((smallest / probability) ** self.beta).astype(np.float32)

    def state_dict(self) -> dict:
        """Return ``smallest`` as a list."""
        return {"smallest": self.smallest.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict``; with another number of replay ranks, change nothing."""
        require(state, STATE)
        if len(state["smallest"]) == len(self.smallest):
            self.smallest[:] = state["smallest"]
