"""The priority index "wide": fan-out 8, one cache line a node, in C (`native/wide_tree.h`)."""

import native
from replay_rank.index._native import NativeIndex


class WideTree(NativeIndex):
    """The fastest index on a processor; sums and leaves are float64."""

    name = "wide"
    kind = native.WIDE64
    bad_part = "word {0} of the tree's memory is not that of a new tree with the same masses"
    bytes_per_slot = 10.5


Index = WideTree
