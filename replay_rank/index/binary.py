"""The priority index "binary": the C tree of `native/segment_tree.h`."""

import ctypes
import weakref

import numpy as np

import native
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

_DONE = -1


def _address(array: np.ndarray) -> int:
    """Where a writable, contiguous, non-empty array lies; a third of the cost of `.ctypes.data`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


class NativeTree(PriorityIndex):
    """A binary sum and minimum tree in C; k rows cost O(k log capacity)."""

    name, backend = "binary", "cpu"

    def __init__(self, capacity: int, **options):
        super().__init__(capacity, **options)
        self._lib = native.library()
        self._tree = self._lib.segment_tree_create(self.capacity)
        if self._tree is None:
            raise MemoryError(f"no memory for a priority index of capacity {self.capacity}")
        self.nbytes = 32 << (self.capacity - 1).bit_length()
        # Not at exit: code that runs late may still use the tree, and the process frees it anyway.
        weakref.finalize(self, self._lib.segment_tree_destroy, self._tree).atexit = False

    def __reduce__(self):
        raise TypeError("a NativeTree owns memory outside Python; it cannot be copied or pickled")

    @property
    def total(self) -> float:
        return self._lib.segment_tree_total(self._tree)

    @property
    def minimum(self) -> float:
        return self._lib.segment_tree_minimum(self._tree)

    def set(self, slots: np.ndarray, mass: np.ndarray) -> tuple[float, float]:
        slots, mass = as_update(slots, mass)
        k = slots.size
        if k == 0:
            return self.total, self.minimum
        row = self._lib.segment_tree_set(self._tree, _address(slots), _address(mass), k)
        if row != _DONE:
            raise bad_update(self, slots, mass, row)
        return self.total, self.minimum

    def get(self, slots: np.ndarray) -> np.ndarray:
        slots = as_slots(slots)
        k = slots.size
        mass = np.empty(k, MASS_DTYPE)
        if k == 0:
            return mass
        row = self._lib.segment_tree_get(self._tree, _address(slots), _address(mass), k)
        if row != _DONE:
            raise bad_slot(self, slots, row)
        return mass

    def find_prefix(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        targets = as_floats(targets, "targets")
        k = targets.size
        slots, mass = np.empty(k, SLOT_DTYPE), np.empty(k, MASS_DTYPE)
        if k == 0:
            return slots, mass
        row = self._lib.segment_tree_find_prefix(self._tree, _address(targets), _address(slots), _address(mass), k)
        if row != _DONE:
            raise bad_target(self, targets, row)
        return slots, mass

    def check(self) -> None:
        node = self._lib.segment_tree_check(self._tree)
        if node != _DONE:
            raise AssertionError(f"node {node} is not the sum and minimum of its children")


Index = NativeTree
