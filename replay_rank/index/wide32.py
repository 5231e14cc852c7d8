"""The priority index "wide32": the tree of "wide" with float32 leaves; half the memory."""

import numpy as np

import native
from replay_rank.index._native import NativeIndex


class WideTree32(NativeIndex):
    """Sums are float64; a mass is rounded to the nearest float32, and never to zero."""

    name = "wide32"
    kind = native.WIDE32
    bad_part = "word {0} of the tree's memory is not that of a new tree with the same masses"
    bytes_per_slot = 5.3
    leaf_dtype = np.dtype(np.float32)


Index = WideTree32
