"""Naive oracles of the priority indexes: plain Python floats, in the order in which an index adds.

An oracle has `set(slots, mass)`, and says from it `total()`, `minimum()`, `find(target)` and, for each
slot, `held` (what `set` gave), `masses()` and `spans()` (where its part of the total begins and ends).
"""

import itertools
import math

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = 2.0**-149


def stored(mass, leaf_dtype=np.float64) -> np.ndarray:
    """Masses (float64[k]) as leaves of `leaf_dtype` hold them: rounded to nearest, but never to zero."""
    mass = np.abs(np.asarray(mass, np.float64))
    if leaf_dtype == np.float64:
        return mass
    with np.errstate(over="ignore", under="ignore"):
        rounded = mass.astype(np.float32).astype(np.float64)
    return np.where((mass > 0.0) & (rounded == 0.0), FLOAT32_TINY, rounded)


class MassOracle:
    """Masses in a list. A subclass adds them (`total`) and finds (`_find`) in the order of its index."""

    def __init__(self, capacity: int):
        self.held = [0.0] * capacity

    def set(self, slots, mass) -> None:
        """Store the masses, row by row."""
        for slot, value in zip(slots, mass, strict=True):
            self.held[int(slot)] = abs(float(value))
        self.add()

    def add(self) -> None:
        """Recompute whatever is kept of sums."""

    def minimum(self) -> float:
        """The smallest mass above zero, or infinity."""
        return min((value for value in self.held if value > 0.0), default=math.inf)

    def masses(self) -> np.ndarray:
        """The mass of each slot, float64[capacity]."""
        return np.array(self.held)

    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the part of each slot begins and ends, float64[capacity], from sums that are rounded once."""
        ends = np.array([math.fsum(self.held[: slot + 1]) for slot in range(len(self.held))])
        return np.append(0.0, ends[:-1]), ends

    def find(self, target: float) -> int:
        """The slot on which a target falls."""
        return self._find(float(min(target, math.nextafter(self.total(), 0.0))))


class BinaryOracle(MassOracle):
    """Padded with zeros to a power of two; sums of halves by recursion. A node is (sum, left, right)."""

    def __init__(self, capacity: int):
        super().__init__(capacity)
        self.padding = [0.0] * ((1 << (capacity - 1).bit_length()) - capacity)
        self.add()

    def add(self) -> None:
        self.root = self._node(self.held + self.padding)

    def total(self) -> float:
        """The sum of all masses."""
        return self.root[0]

    def _node(self, mass):
        if len(mass) == 1:
            return (mass[0],)
        left, right = self._node(mass[: len(mass) // 2]), self._node(mass[len(mass) // 2 :])
        return (left[0] + right[0], left, right)

    def _find(self, target) -> int:
        node, slot = self.root, 0
        while len(node) > 1:
            _, left, right = node
            goes_right = right[0] > 0.0 and target >= left[0]
            target -= left[0] if goes_right else 0.0
            node, slot = (right if goes_right else left), 2 * slot + goes_right
        return slot


class WideOracle(MassOracle):
    """Blocks of leaves, nodes of eight entries and a flat top, each added as four runs of consecutive
    elements.

    A level has one entry for each node of the level below; the first level with at most `top` entries
    is the last. Its nodes lie side by side, each with the sum of those before it as its base.
    """

    def __init__(self, capacity: int, leaves_per_block: int = 8, top: int = 64):
        super().__init__(capacity)
        self.leaves_per_block, self.top = leaves_per_block, top
        self.add()

    def add(self) -> None:
        # levels[0] are the blocks of leaves; every node is its inclusive prefix sums.
        self.levels = [[inclusive(block) for block in groups(self.held, self.leaves_per_block)]]
        while len(self.levels[-1]) > self.top:
            self.levels.append([inclusive(node) for node in groups(self._sums_of_last_level(), 8)])
        nodes = [inclusive(node) for node in groups(self._sums_of_last_level(), 8)]
        self.bases = [0.0, *itertools.accumulate(node[-1] for node in nodes)]
        # The last entry of a node ends where the next node begins.
        ends = [
            [base + end for end in node[:-1]] + [after]
            for base, after, node in zip(self.bases, self.bases[1:], nodes)
        ]
        self.top_ends = [end for node in ends for end in node]

    def total(self) -> float:
        """The sum of all masses, as the flat top adds it."""
        return self.bases[-1]

    def _sums_of_last_level(self) -> list[float]:
        return [node[-1] for node in self.levels[-1]]

    def _find(self, target) -> int:
        entry, target = fall(self.top_ends, target)
        for level in reversed(self.levels):
            node = level[entry]
            if target >= node[-1]:
                target = math.nextafter(node[-1], 0.0)
            child, target = fall(node, target)
            entry = len(node) * entry + child
        return entry


def groups(values, size) -> list[list[float]]:
    """`values` in groups of `size`; the last one is filled with zeros."""
    padded = list(values) + [0.0] * (-len(values) % size)
    return [padded[i : i + size] for i in range(0, len(padded), size)]


def inclusive(elements) -> list[float]:
    """The inclusive prefix sums of a node; four runs are added up each, then one run after the other."""
    size = len(elements) // 4
    prefix, before = [], 0.0
    for start in range(0, len(elements), size):
        partial = list(itertools.accumulate(elements[start : start + size]))
        prefix += [before + end for end in partial]
        before = before + partial[-1]
    return prefix


def fall(ends, target) -> tuple[int, float]:
    """Which of ascending ends is the first above the target, and the target beyond the one before."""
    child = sum(end <= target for end in ends)
    return child, target - (ends[child - 1] if child else 0.0)


class RankOracle:
    """Priorities in a list; the item of rank r, sorted by (-priority, slot), has the mass r^-alpha."""

    def __init__(self, capacity: int, alpha: float = 0.6):
        self.held = [0.0] * capacity
        # Powers of NumPy, which differ from those of C in the last bit.
        self.rank_mass = np.arange(1, capacity + 1.0) ** -alpha
        self.cumulative = np.cumsum(self.rank_mass)

    def set(self, slots, mass) -> None:
        """Store the priorities, row by row."""
        for slot, value in zip(slots, mass, strict=True):
            self.held[int(slot)] = abs(float(value))

    def order(self) -> list[int]:
        """The filled slots, rank 1 first."""
        filled = [slot for slot, priority in enumerate(self.held) if priority > 0.0]
        return sorted(filled, key=lambda slot: (-self.held[slot], slot))

    def total(self) -> float:
        """The sum of the masses of the filled ranks."""
        n = len(self.order())
        return float(self.cumulative[n - 1]) if n else 0.0

    def minimum(self) -> float:
        """The mass of the last rank, or infinity."""
        n = len(self.order())
        return float(self.rank_mass[n - 1]) if n else math.inf

    def find(self, target: float) -> int:
        """The slot on which a target falls."""
        order = self.order()
        lowered = min(target, math.nextafter(self.total(), 0.0))
        return order[int(np.searchsorted(self.cumulative[: len(order)], lowered, side="right"))]

    def masses(self) -> np.ndarray:
        """The mass of each slot, float64[capacity]."""
        masses = np.zeros(len(self.held))
        for rank, slot in enumerate(self.order()):
            masses[slot] = self.rank_mass[rank]
        return masses

    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the part of each slot begins and ends, float64[capacity].

        Nothing of the total for an empty one.
        """
        order, ends = self.order(), np.append(0.0, self.cumulative)
        begin, end = np.zeros(len(self.held)), np.zeros(len(self.held))
        begin[order], end[order] = ends[: len(order)], ends[1 : len(order) + 1]
        return begin, end
