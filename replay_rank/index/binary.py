"""The priority index "binary": two children a node, in C (`native/binary_tree.c`), on a device where built for one.

An update takes one of three forms: the nodes above each slot, row by row; the nodes above all its slots,
level by level; or all nodes. A fourth name, "auto", stands for the faster of the last two for k rows. Which
that is depends on the machine, so it is measured on it, once for each size of tree.
"""

import functools
import logging
import time

import numpy as np

import native
from native import accelerator
from replay_rank.index import MASS_DTYPE
from replay_rank.native_index import NativeIndex

_log = logging.getLogger(__name__)
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

    def __init__(self, capacity: int, **options):
        accelerator.settle()
        super().__init__(capacity, **options)
        self.crossovers = _crossovers((self.capacity - 1).bit_length())
        self.form = "auto"

    @property
    def form(self) -> str:
        return self._form

    @form.setter
    def form(self, form: str) -> None:
        if form not in native.FORMS:
            raise ValueError(f"form must be one of {', '.join(native.FORMS)}, got {form!r}")
        self._form = form
        self._tree.binary_form(native.FORMS.index(form), self.crossovers[1])


@functools.cache
def _crossovers(levels: int) -> tuple[int, int]:
    """Measure the crossovers of trees of 2^levels leaves on this machine, and log them."""
    width = 2**levels
    tree = native.Tree(native.BINARY, width)
    slots = np.random.default_rng(0).integers(0, width, max(width // 2, 1))
    found = tuple(_crossover(tree, slots, form) for form in ("element", "levels"))
    told = ["never" if k == native.NEVER else f"from k = {k}" for k in found]
    _log.info("binary tree of %d leaves (%s): rebuilding is faster than element by element %s, than levels %s", width, tree.backend, *told)
    return found


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
