"""The priority index "rank": draws by rank in place of mass, in C (`native/ranked_tree.c`)."""

import native
from replay_rank.index._native import NativeIndex


class RankedTree(NativeIndex):
    """P(i) in proportion to rank(i)^-alpha (Schaul et al. 2016, section 3.3); the ranks are always exact."""

    name = "rank"
    rule = "rank"
    kind = native.RANKED
    bad_part = (
        "block {0} is out of order or not as its slots say, or, after the last block, a count or sum is wrong"
    )
    bytes_per_slot = 84.0  # 48 after a load, 40 in practice, and the most with every block a quarter full


Index = RankedTree
