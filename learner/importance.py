"""Importance-sampling weights (Schaul et al. 2016, section 3.4)."""

from __future__ import annotations

import numpy as np


class ImportanceWeights:
    """is_weight_i = (1 / (size * probability_i))^beta, divided by its maximum.

    The maximum is over the batch (``normalizer="batch"``) or over all of replay (``"global"``): the
    weight of the smallest mass in any replay rank, as last heard from each. A global maximum does
    not depend on which rows a batch happens to hold.
    """

    def __init__(self, beta: float, normalizer: str, num_replay: int):
        self.beta, self.normalizer = beta, normalizer
        self._largest = np.zeros(num_replay)

    def __call__(self, replay: int, views: dict[str, np.ndarray]) -> np.ndarray:
        """Return float32[B] in (0, 1] for a sample message of replay rank ``replay``."""
        size = int(views["size"][0])
        weight = (size * views["probability"]) ** -self.beta
        if self.normalizer == "batch":
            return (weight / weight.max()).astype(np.float32)
        smallest_probability = views["minimum"][0] / views["total"][0]
        self._largest[replay] = (size * smallest_probability) ** -self.beta
        return (weight / self._largest.max()).astype(np.float32)
