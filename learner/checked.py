"""The check of a sample batch before anything is computed from it."""

from __future__ import annotations

import numpy as np

_ROUNDING = 0.999  # far more than any index rounds by


def sample_fault(views: dict[str, np.ndarray], num_actions: int) -> str | None:
    """Return what is wrong with the views of a sample message; None if nothing is.

    An impossible action would read beyond the Q-values. An impossible probability or minimum would give
    weights above 1 and spoil those of later batches. The train step itself catches a loss that is NaN.
    """
    action, probability = views["action"], views["probability"]
    total, minimum = float(views["total"][0]), float(views["minimum"][0])
    if not 0 <= action.min() <= action.max() < num_actions:
        return f"an action is not in 0 to {num_actions - 1}"
    if not (probability.min() > 0 and probability.max() <= 1):  # both are false for a NaN
        return "a probability is not in (0, 1]"
    if not (0 < minimum <= total < np.inf and minimum / total > 0):
        return f"masses with minimum {minimum} and total {total}"
    if probability.min() < _ROUNDING * minimum / total:
        return "a probability is below that of the smallest mass"
    return None
