"""What a sample batch must hold before anything is computed from it."""

from __future__ import annotations

import numpy as np

_ROUNDING = 0.999  # far more than any index rounds by


def what_is_wrong(views: dict[str, np.ndarray], num_actions: int) -> str | None:
    """Return what is wrong with the views of a sample message; None where nothing is.

    An action that there is not would be read beyond the end of the Q-values; a probability or minimum that is none would
    give weights above 1, or poison those of later batches too. What makes only this batch's loss NaN is left to the train step.
    """
    action, probability = views["action"], views["probability"]
    total, minimum = float(views["total"][0]), float(views["minimum"][0])
    if not 0 <= action.min() <= action.max() < num_actions:
        return f"an action is none of {num_actions}"
    if not (probability.min() > 0 and probability.max() <= 1):  # both are false for a NaN
        return "a probability is not in (0, 1]"
    if not (0 < minimum <= total < np.inf and minimum / total > 0):
        return f"masses with minimum {minimum} and total {total}"
    if probability.min() < _ROUNDING * minimum / total:
        return "a probability is below that of the smallest mass"
    return None
