"""The priority index "numpy": the readable oracle of the C tree, equal to it to the last bit."""

from typing import Any

import numpy as np

from replay_rank.index import (
    MASS_DTYPE,
    SLOT_DTYPE,
    PriorityIndex,
    as_floats,
    as_slots,
    as_update,
    bad_slot,
    bad_target,
    bad_update,
)


class NumpyTree(PriorityIndex):
    """A binary sum and minimum tree in two arrays, one level at a time.

    Nodes are numbered as in a heap: the root is 1, the children of n are 2n and 2n + 1, leaf i is
    width + i, where width is the smallest power of two >= capacity. Node 0 is not used.
    """

    name = backend = "numpy"
    bytes_per_slot = 64.0

    def __init__(self, capacity: int, **options: Any):
        super().__init__(capacity, **options)
        self._depth = (self.capacity - 1).bit_length()
        self._width = 1 << self._depth
        self._sum = np.zeros(2 * self._width, MASS_DTYPE)
        # An empty leaf is no candidate for the minimum, hence infinity.
        self._min = np.full(2 * self._width, np.inf, MASS_DTYPE)
        self.nbytes = self._sum.nbytes + self._min.nbytes
        self._torn = (
            False  # whether leaves may have changed and their parents not yet: an update was interrupted
        )

    @property
    def total(self) -> float:
        self._mend()
        return float(self._sum[1])

    @property
    def minimum(self) -> float:
        self._mend()
        return float(self._min[1])

    def set(self, slots: np.ndarray, mass: np.ndarray) -> tuple[float, float]:
        slots, mass = as_update(slots, mass)
        bad = self._outside(slots) | ~((mass >= 0.0) & (mass < np.inf))
        if bad.any():
            raise bad_update(self, slots, mass, int(bad.argmax()))
        # All leaves before any parent, in the order of the rows: the last duplicate wins. Adding
        # +0.0 turns -0.0 into +0.0.
        leaves = self._width + slots
        self._mend()
        self._torn = True
        self._sum[leaves] = mass + 0.0
        self._add_up(leaves)
        self._torn = False
        return self.total, self.minimum

    def get(self, slots: np.ndarray) -> np.ndarray:
        slots = as_slots(slots)
        bad = self._outside(slots)
        if bad.any():
            raise bad_slot(self, slots, int(bad.argmax()))
        return self._sum[self._width + slots]

    def find_prefix(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        targets = as_floats(targets, "targets")
        bad = ~(targets >= 0.0) | (self.total == 0.0)
        if bad.any():
            raise bad_target(self, targets, int(bad.argmax()))
        left_over = np.minimum(targets, np.nextafter(self.total, 0.0))
        nodes = np.ones(targets.size, SLOT_DTYPE)
        for _ in range(self._depth):
            left = self._sum[2 * nodes]
            # Rounding can leave a target beyond a whole node; an empty right child is no way out.
            right = (left_over >= left) & (self._sum[2 * nodes + 1] > 0.0)
            left_over = np.where(right, left_over - left, left_over)
            nodes = 2 * nodes + right
        return nodes - self._width, self._sum[nodes]

    def check(self) -> None:
        self._mend()
        nodes = np.arange(1, self._width)
        sums, minima = self._from_children(nodes)
        self._refuse(nodes, (self._sum[nodes] == sums) & (self._min[nodes] == minima))
        leaves = np.arange(self._width, 2 * self._width)
        mass = self._sum[leaves]
        allowed = (mass >= 0.0) & (mass < np.inf)
        allowed &= (leaves < self._width + self.capacity) | (mass == 0.0)
        self._refuse(leaves, allowed & (self._min[leaves] == np.where(mass > 0.0, mass, np.inf)))

    def _mend(self) -> None:
        """Repair the nodes after an interrupted update (Ctrl-C, no memory): leaves determine all others."""
        if self._torn:
            self._add_up(np.arange(self._width, 2 * self._width))
            self._torn = False

    def _add_up(self, nodes: np.ndarray) -> None:
        """Recompute the minima of leaves (int64[n]) and all nodes above them from the leaves' masses."""
        self._min[nodes] = np.where(self._sum[nodes] > 0.0, self._sum[nodes], np.inf)
        for _ in range(self._depth):
            nodes = np.unique(nodes // 2)
            self._sum[nodes], self._min[nodes] = self._from_children(nodes)

    def _from_children(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the sums and minima of inner nodes (int64[n]) must be: the only place that adds."""
        left, right = 2 * nodes, 2 * nodes + 1
        sums = self._sum[left] + self._sum[right]
        return sums, np.minimum(self._min[left], self._min[right])

    def _outside(self, slots: np.ndarray) -> np.ndarray:
        """Which of slots (int64[k]) are not in [0, capacity), bool[k]."""
        return (slots < 0) | (slots >= self.capacity)

    @staticmethod
    def _refuse(nodes: np.ndarray, good: np.ndarray) -> None:
        if not good.all():
            node = nodes[good.argmin()]
            raise AssertionError(f"node {node} is not the sum and minimum of its children")


Index = NumpyTree
