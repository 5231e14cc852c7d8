"""The priority indexes in C: one binding of `native/segment_tree.h` for all kinds of tree.

An array that C can read as it is goes straight there; any other is first converted, or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import numpy as np

import native
from replay_rank.index import (
    MASS_DTYPE,
    SLOT_DTYPE,
    Drawn,
    PriorityIndex,
    as_floats,
    as_slots,
    as_update,
    bad_mass,
    bad_slot,
    bad_target,
    bad_update,
    check_draw,
    check_range,
)
from replay_rank.strata import Strata


class NativeIndex(PriorityIndex):
    """A tree in C; a subclass gives its kind. `portable` keeps it from using AVX2, with the same results."""

    kind: int
    bad_part: str  # what a bad number of `check` counts and what is wrong there; {0} is the number

    def __init__(self, capacity: int, portable: bool = False, **options: Any):
        super().__init__(capacity, **options)
        try:
            self._tree = native.Tree(self.kind, self.capacity, self.alpha, portable)
        except MemoryError:
            raise MemoryError(f"no memory for a priority index of capacity {self.capacity}") from None
        self.backend = self._tree.backend

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} owns memory outside Python; it cannot be copied or pickled")

    @property
    def total(self) -> float:
        return self._tree.total

    @property
    def minimum(self) -> float:
        return self._tree.minimum

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # read only: it grows with a tree of ranks
        return self._tree.nbytes

    def set(self, slots: np.ndarray, mass: np.ndarray) -> tuple[float, float]:
        try:
            try:
                return self._tree.set(slots, mass)
            except native.Unfit:
                slots, mass = as_update(slots, mass)
                return self._tree.set(slots, mass)
        except native.Refused as refused:
            raise bad_update(self, slots, mass, refused.args[0]) from None

    def set_range(self, first: int, mass: np.ndarray) -> tuple[float, float]:
        try:
            try:
                sums = self._tree.set_range(first, mass)
            except native.Unfit:
                mass = as_floats(mass, "mass")
                sums = self._tree.set_range(first, mass)
        except native.Refused as refused:
            check_range(self, first, len(mass))
            raise bad_mass(self, mass, (first + refused.args[0]) % self.capacity, refused.args[0]) from None
        except OverflowError:
            check_range(self, first, 0)
            raise
        if len(mass) == 0:
            check_range(self, first, 0)
        return sums

    def get(self, slots: np.ndarray) -> np.ndarray:
        slots = as_slots(slots)
        mass = np.empty(slots.size, MASS_DTYPE)
        try:
            self._tree.get(slots, mass)
        except native.Refused as refused:
            raise bad_slot(self, slots, refused.args[0]) from None
        return mass

    def find_prefix(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        targets = as_floats(targets, "targets")
        slots, mass = np.empty(targets.size, SLOT_DTYPE), np.empty(targets.size, MASS_DTYPE)
        try:
            self._tree.find_prefix(targets, slots, mass)
        except native.Refused as refused:
            raise bad_target(self, targets, refused.args[0]) from None
        return slots, mass

    def draw(self, strata: Strata, k: int, out: Drawn | None = None) -> Drawn:
        if out is None:
            if k < 0:
                check_draw(self, strata, k)
            out = np.empty(k, SLOT_DTYPE), np.empty(k, MASS_DTYPE), np.empty(k, MASS_DTYPE)
        try:
            self._tree.draw(k, strata.state, *out)
        except native.Refused:
            raise bad_target(self, (), 0) from None
        except (TypeError, OverflowError):  # native.Unfit, or not three arrays, or no such number
            check_draw(self, strata, k, out)
            raise
        return out

    def save(self) -> np.ndarray:
        mass = np.empty(self.capacity, MASS_DTYPE)
        self._tree.save(mass)
        return mass

    def check(self) -> None:
        number = self._tree.check()
        if number == native.NOT_CHECKED:
            raise MemoryError(f"no memory to check a priority index of capacity {self.capacity}")
        if number != -1:
            raise AssertionError(self.bad_part.format(number))

    def timed_from_c(self) -> Callable[..., np.ndarray] | None:
        """Return `native.timing.time_calls` of this tree; warn and return None without a C compiler."""
        from native import timing  # only the benchmark compiles it

        return None if timing.load() is None else partial(timing.time_calls, self._tree.address)
