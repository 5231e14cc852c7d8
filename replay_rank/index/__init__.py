"""The priority index: which slot holds which mass, and which slot a prefix sum falls on.

`PriorityIndex` is the contract; `make_index` finds an implementation by name. A new one is a module
here that defines `Index`, and one subclass of the mixin in `tests/conformance/`.
"""

import abc
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from apex import plugins
from replay_rank.strata import Strata

SLOT_DTYPE = np.dtype(np.int64)
MASS_DTYPE = np.dtype(np.float64)
Drawn = tuple[np.ndarray, np.ndarray, np.ndarray]
MAX_CAPACITY = 2**40
MAX_ALPHA = 10.0  # r^-alpha stays above zero for any rank r
_ON_DEVICES = "torch and rank_torch live on any device of torch"


class PriorityIndex(abc.ABC):
    """A mass (float64, finite, >= 0) for each slot in [0, capacity), and draws by prefix sum.

    Every method takes a batch of k rows, k = 0 included, and checks all of it first: when it
    raises, nothing was changed. An interrupted update (KeyboardInterrupt) is complete or had no effect.
    Arrays are one-dimensional; other integer or float types, read-only and strided arrays are
    converted. Results are new arrays that the caller owns. One index is for one thread at a time.

    ValueError names the first bad row, the value there and what is right, or the shapes or lengths
    that do not fit. TypeError names a dtype that cannot be converted without loss.

    Sums are of children, never of deltas: after any history the index equals, to the last bit, a
    new one filled with the same masses. They must stay below the largest float64.

    Attributes:
        name: the implementation's name in `make_index`.
        rule: "proportional", P(i) = mass_i / total; or "rank": `set` takes priorities in place of
            masses, and the mass of the item of rank r (1: the largest priority; of equal ones the
            lower slot comes first) is r^-alpha (Schaul et al. 2016, section 3.3).
        leaf_dtype: what a leaf is stored as; a mass is rounded to it, but never to zero.
        capacity: number of slots, 1 to MAX_CAPACITY.
        backend: what runs the calls, in words: the instruction set or the device.
        nbytes: memory the index holds, in bytes.
        bytes_per_slot: a large index never takes more than this for a slot.
    """

    name: str
    rule = "proportional"
    leaf_dtype: np.dtype = MASS_DTYPE
    on_any_device = False  # whether `device` may be other than "cpu"
    capacity: int
    backend: str
    nbytes: int
    bytes_per_slot: float

    def __init__(self, capacity: int, alpha: float = 0.6, device: str = "cpu"):
        """All slots empty; `alpha` is for rule "rank", `device` for an index of torch.

        Raises ValueError on a bad capacity, alpha or device, MemoryError without memory.
        """
        self.capacity = operator.index(capacity)
        if not 1 <= self.capacity <= MAX_CAPACITY:
            raise ValueError(f"capacity must be from 1 to {MAX_CAPACITY}, got {capacity}")
        if not 0.0 <= alpha <= MAX_ALPHA:
            raise ValueError(f"alpha must be from 0 to {MAX_ALPHA:g}, got {alpha}")
        if device != "cpu" and not self.on_any_device:
            raise ValueError(
                f"the priority index {self.name!r} lives on the cpu, got device {device!r}; {_ON_DEVICES}"
            )
        self.alpha, self.device = alpha, device

    @property
    @abc.abstractmethod
    def total(self) -> float:
        """The sum of all masses; 0.0 when the index is empty."""

    @property
    @abc.abstractmethod
    def minimum(self) -> float:
        """The smallest mass above zero; inf when the index is empty."""

    @abc.abstractmethod
    def set(self, slots: np.ndarray, mass: np.ndarray) -> tuple[float, float]:
        """Give slots (int64[k]) their mass (float64[k]); of duplicate slots the last row wins.

        A mass of 0 empties the slot, and -0.0 is stored as 0.0. Returns the new total and minimum.
        Raises ValueError for a slot out of range or a mass that is NaN, infinite or negative (or
        above the largest finite leaf).
        """

    def set_range(self, first: int, mass: np.ndarray) -> tuple[float, float]:
        """Give the k slots from `first` on, wrapping around at the capacity, their mass (float64[k]).

        Returns the new total and minimum. Raises ValueError as `set` does, when `first` is out of
        range, or when k > capacity.
        """
        mass = as_floats(mass, "mass")
        check_range(self, first, mass.size)
        return self.set((first + np.arange(mass.size)) % self.capacity, mass)

    @abc.abstractmethod
    def get(self, slots: np.ndarray) -> np.ndarray:
        """The mass (float64[k]) of slots (int64[k]). Raises ValueError for one out of range."""

    @abc.abstractmethod
    def find_prefix(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slots (int64[k]) on which targets (float64[k]) in [0, total) fall, and their mass.

        Slot i is found when prefix_sum(i) <= target < prefix_sum(i + 1). A target at or beyond the
        total counts as the largest float64 below it. A slot of zero mass is never returned.
        Raises ValueError when a target is NaN or negative, or when k > 0 and the index is empty.
        """

    def draw(self, strata: Strata, k: int, out: Drawn | None = None) -> Drawn:
        """The slots (int64[k]) that `strata.targets(k, total)` fall on, their mass and probability.

        Mass and probability = mass / total are float64[k]. With `out` they are written into these
        three arrays of length k, which are returned. Raises ValueError when k < 0, when k > 0 and the
        index is empty, or when an array of `out` is of another shape, not contiguous, aligned and
        writable, or shares memory with another; TypeError when it is no array of its type. Then
        `strata` has not moved.
        """
        check_draw(self, strata, k, out)
        total = self.total
        slots, mass = self.find_prefix(strata.targets(k, total))
        drawn = slots, mass, mass / total
        if out is None:
            return drawn
        for array, values in zip(out, drawn, strict=True):
            array[:] = values
        return out

    def save(self) -> np.ndarray:
        """What `set` gave every slot, float64[capacity]: what a checkpoint keeps."""
        return self.get(np.arange(self.capacity))

    def load(self, mass: np.ndarray) -> tuple[float, float]:
        """Give all slots their mass (float64[capacity]); the inverse of `save`. Errors as in `set`."""
        mass = as_floats(mass, "mass")
        if mass.size != self.capacity:
            raise ValueError(f"load needs a mass for each of {self.capacity} slots, got {mass.size}")
        return self.set_range(0, mass)

    def state_dict(self) -> dict:
        """Return ``mass`` float64[capacity], which restores this index or another one of the same rule."""
        return {"mass": self.save()}

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict``. Raises as `load` does, and KeyError without a mass."""
        self.load(state["mass"])

    def describe(self) -> str:
        """Return name, backend, slots and memory in one line for a log."""
        return f"{self.name} ({self.backend}), {self.capacity} slots, {self.nbytes / 2**20:.1f} MiB"

    @abc.abstractmethod
    def check(self) -> None:
        """Verify every node of the structure; AssertionError names a bad one."""


def make_index(name: str, capacity: int, **options: Any) -> PriorityIndex:
    """A new, empty index of the implementation called `name`; options as in `PriorityIndex()`.

    Raises ValueError for an unknown name or a bad capacity or option, ImportError when the
    implementation is not built, MemoryError without memory.
    """
    return index_class(name)(capacity, **options)


def index_names() -> list[str]:
    """Return the names of all implementations here, sorted; a leading underscore makes a module private."""
    return plugins.names(__path__)


def index_class(name: str) -> type[PriorityIndex]:
    """The implementation called `name`. Raises ValueError and ImportError as `make_index` does."""
    return plugins.load(__name__, name, index_names(), f"no priority index is called {name!r}").Index


def as_slots(slots: ArrayLike) -> np.ndarray:
    """`slots` as an aligned, contiguous, writable int64[k]; itself when it is one already.

    Raises ValueError unless one-dimensional, TypeError unless of integers that all fit int64.
    """
    return _as_row(slots, SLOT_DTYPE, "slots", "iu")


def as_floats(values: ArrayLike, name: str) -> np.ndarray:
    """`values` as an aligned, contiguous, writable float64[k]; itself when it is one already.

    Raises ValueError unless one-dimensional, TypeError unless of real numbers; both say `name`.
    """
    return _as_row(values, MASS_DTYPE, name, "fiu")


def as_update(slots: ArrayLike, mass: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of `set` as int64[k] and float64[k]; ValueError when their lengths differ."""
    rows, masses = as_slots(slots), as_floats(mass, "mass")
    if rows.size != masses.size:
        raise ValueError(f"slots and mass must be of one length, got {rows.size} and {masses.size}")
    return rows, masses


def check_range(index: PriorityIndex, first: int, k: int) -> None:
    """Raise ValueError unless k slots from `first` on are slots of `index`, none of them twice."""
    if not 0 <= operator.index(first) < index.capacity:
        raise ValueError(f"first slot {first} is out of range; it must be >= 0 and < {index.capacity}")
    if k > index.capacity:
        raise ValueError(f"{k} masses are too many for {index.capacity} slots")


def check_draw(index: PriorityIndex, strata: Strata, k: int, out: Drawn | None = None) -> None:
    """Raise ValueError or TypeError, as `draw` says, unless `index` can draw k slots into `out`."""
    if k < 0:
        raise ValueError(f"the number of draws must be >= 0, got {k}")
    if out is not None:
        _check_out(strata, k, out)
    if k > 0 and index.total == 0.0:
        raise bad_target(index, (), 0)


def bad_update(index: PriorityIndex, slots: np.ndarray, mass: np.ndarray, row: int) -> ValueError:
    """The error for `row` of an update that `index` must refuse."""
    if not 0 <= slots[row] < index.capacity:
        return bad_slot(index, slots, row)
    return bad_mass(index, mass, slots[row], row)


def bad_mass(index: PriorityIndex, mass: np.ndarray, slot: int, row: int) -> ValueError:
    """The error for the mass in `row`, meant for `slot`, that `index` must refuse."""
    limit = "" if index.leaf_dtype == MASS_DTYPE else f" and <= {np.finfo(index.leaf_dtype).max:.9g}"
    return ValueError(
        f"row {row}: mass {mass[row]} for slot {slot} is refused; a mass must be finite and >= 0{limit}"
    )


def bad_slot(index: PriorityIndex, slots: np.ndarray, row: int) -> ValueError:
    """The error for `row` of slots that `index` must refuse."""
    return ValueError(
        f"row {row}: slot {slots[row]} is out of range; a slot must be >= 0 and < {index.capacity}"
    )


def bad_target(index: PriorityIndex, targets: Sequence[float] | np.ndarray, row: int) -> ValueError:
    """The error for `row` of targets that `index` must refuse."""
    if index.total == 0.0:
        return ValueError("the index is empty: no slot has a mass above 0, so none can be drawn")
    return ValueError(f"row {row}: target {targets[row]} is refused; a target must be >= 0")


def _check_out(strata: Strata, k: int, out: Drawn) -> None:
    if len(out) != 3:
        raise ValueError(f"draws are written into three arrays, got {len(out)}")
    names = "slots", "mass", "probability"
    for name, array, dtype in zip(names, out, (SLOT_DTYPE, MASS_DTYPE, MASS_DTYPE), strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} of draws must be an array of {dtype}, got {type(array).__name__}")
        if array.dtype != dtype:
            raise TypeError(f"{name} of draws must be an array of {dtype}, got {array.dtype}")
        if array.shape != (k,):
            raise ValueError(f"{name} of {k} draws must be of length {k}, got shape {array.shape}")
        if not array.flags.carray:
            raise ValueError(f"{name} of draws must be contiguous, aligned and writable")
    for one, other in itertools.combinations((strata.state, *out), 2):
        if np.may_share_memory(one, other):
            raise ValueError("arrays for draws must not share memory")


def _as_row(values: ArrayLike, dtype: np.dtype, name: str, kinds: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    # The identity test is the cheap one; an equal dtype that is another object is converted below.
    if array.dtype is dtype and array.flags.carray:
        return array
    convertible = array.dtype.kind in kinds and np.can_cast(array.dtype, dtype, "safe")
    if array.size and not convertible:
        raise TypeError(f"{name} must be {dtype} or convertible to it, got {array.dtype}")
    return np.require(array, dtype, ["C", "A", "W"])
