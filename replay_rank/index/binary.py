"""The priority index "binary": two children a node, in C (`native/binary_tree.c`), also on an accelerator.

An update takes one of three forms: the nodes above each slot, row by row; the nodes above all its slots,
level by level; or all nodes. "auto" chooses the faster of the last two for k rows. That depends on the
machine, so the first tree of each size measures it.
"""

import time
from typing import Any

import numpy as np

import native
from native import accelerator
from replay_rank.index import MASS_DTYPE
from replay_rank.index._native import NativeIndex

_measured: dict[int, tuple[int, int]] = {}  # levels of a tree -> its crossovers on this machine
_SMALLEST_MEASURED, _MEASUREMENTS = 64, 2


class BinaryTree(NativeIndex):
    """The textbook tree: the reference of the benchmarks, and the form for an accelerator.

    Attributes:
        form: "auto", or how to update always: "element" (leaf to root, row by row; searches go row by row
            too), "levels" (only nodes above the slots, level by level) or "rebuild" (every node).
        crossovers: the first measured k at which "rebuild" beats "element", and beats "levels";
            `native.NEVER` where it does not.
    """

    name = "binary"
    kind = native.BINARY
    bad_part = "node {0} is not the sum and minimum of its children, or no leaf"
    bytes_per_slot = 64.0  # 32 at a power of two, twice that just above it

    def __init__(self, capacity: int, **options: Any):
        accelerator.settle()
        super().__init__(capacity, **options)
        self.crossovers = _crossovers(self._tree, self.capacity)
        self.form = "auto"

    def describe(self) -> str:
        element, levels = ("never" if k == native.NEVER else f"from k = {k}" for k in self.crossovers)
        faster = f"rebuilding is faster than element by element {element}, than levels {levels}"
        return f"{super().describe()}; {faster}"

    @property
    def form(self) -> str:
        return self._form

    @form.setter
    def form(self, form: str) -> None:
        if form not in native.FORMS:
            raise ValueError(f"form must be one of {', '.join(native.FORMS)}, got {form!r}")
        self._form = form
        self._tree.binary_form(native.FORMS.index(form), self.crossovers[1])


def _crossovers(tree: native.Tree, capacity: int) -> tuple[int, int]:
    """Return the crossovers of trees of this size; the empty ``tree`` measures them the first time."""
    levels = (capacity - 1).bit_length()
    if levels not in _measured:
        slots = np.random.default_rng(0).integers(0, capacity, max(2**levels // 2, 1))
        _measured[levels] = _crossover(tree, slots, "element"), _crossover(tree, slots, "levels")
    return _measured[levels]


def _crossover(tree: native.Tree, slots: np.ndarray, form: str) -> int:
    k = _SMALLEST_MEASURED
    while k <= slots.size:
        if _time(tree, slots[:k], "rebuild") < _time(tree, slots[:k], form):
            return k
        k *= 2
    return native.NEVER


def _time(tree: native.Tree, slots: np.ndarray, form: str) -> int:
    """Return the least time of an update of an empty tree with zeros, in ns."""
    mass = np.zeros(slots.size, MASS_DTYPE)
    tree.binary_form(native.FORMS.index(form), native.NEVER)
    times = []
    for _ in range(_MEASUREMENTS):
        begin = time.perf_counter_ns()
        tree.set(slots, mass)
        times.append(time.perf_counter_ns() - begin)
    return min(times)


Index = BinaryTree
