"""What the priority indexes of torch share: the checks of the contract on the host, and tensors without them.

Arrays go through the `PriorityIndex` methods, which refuse a bad row by name; each of them waits for the
device. `write` and `draw_tensors` take and return tensors on the device and never wait for it. What they
would have to refuse they clamp or drop, and count on the device. So there, no tensor is indexed by
booleans or by a tensor of no dimension, and no scalar becomes a tensor that would have to be copied.
"""

import abc
import math
import sys
import textwrap

import numpy as np
import torch

from replay_rank.index import PriorityIndex, as_floats, as_slots, as_update, bad_slot, bad_target, bad_update

FLOOR = 1e-6
_NO_MEMORY_ON_CPU = "DefaultCPUAllocator"


class TensorIndex(PriorityIndex):
    """Host-facing and tensor-facing calls over four hooks: `_store`, `_find`, `_sums` and `_leaves`.

    Attributes:
        floor: what a mass that is NaN or below zero becomes in `write`.
        largest: what a mass above it becomes in `write`.
        clamped: rows of `write` whose mass was clamped, int64[] on the device.
        dropped: rows of `write` whose slot was out of range, int64[] on the device.
    """

    on_any_device = True
    largest = sys.float_info.max

    def __init__(self, capacity: int, alpha: float = 0.6, device: str = "cpu", floor: float = FLOOR):
        super().__init__(capacity, alpha, device)
        if not 0.0 < floor < math.inf:
            raise ValueError(f"floor must be finite and > 0, got {floor}")
        self.floor, self.backend = floor, f"torch {device}"
        self._device = find_device(device)
        self.clamped, self.dropped = self._zeros((), torch.int64), self._zeros((), torch.int64)

    # Tensors in, tensors out; no call waits for the device

    def write(self, slots: torch.Tensor, mass: torch.Tensor) -> None:
        """Give slots (int64[k]) their mass (any float dtype [k]), both on the device; the last of duplicates wins.

        A mass that is NaN or below zero is stored as `floor`, one above `largest` as `largest`, and either
        is counted in `clamped`; 0 empties the slot. A row whose slot is out of range is counted in
        `dropped` and changes nothing. ValueError when the shapes differ or are not [k].
        """
        if slots.ndim != 1 or slots.shape != mass.shape:
            raise ValueError(f"slots and mass must be of one length, got {tuple(slots.shape)} and {tuple(mass.shape)}")
        slots, mass = slots.detach().to(torch.int64), mass.detach()
        inside = (slots >= 0) & (slots < self.capacity)
        mass, bad = clamp(mass.to(torch.float64), self.floor, self.largest)
        self.clamped += (bad & inside).sum()
        self.dropped += (~inside).sum()
        self._store(slots.masked_fill(~inside, self.capacity), mass)

    def draw_tensors(
        self, k: int, uniforms: torch.Tensor | None = None, generator: torch.Generator | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One slot from each of k equal strata of the total: slots (int64[k]), mass and probability (float64[k]).

        Target i is ``(i + u_i) * (total / k)`` (Schaul et al. 2016, appendix B.2.1). `uniforms`
        (float64[k] in [0, 1), on the device) are made by `generator` unless given. From an empty index
        every row is slot 0 of mass and probability 0. ValueError when k < 0 or the shape is not [k].
        """
        if k < 0:
            raise ValueError(f"the number of draws must be >= 0, got {k}")
        if uniforms is None:
            uniforms = torch.rand(k, generator=generator, dtype=torch.float64, device=self._device)
        if uniforms.shape != (k,):
            raise ValueError(f"{k} draws need as many uniforms, got shape {tuple(uniforms.shape)}")
        total = self._sums()[0]
        rows = torch.arange(k, dtype=torch.float64, device=self._device)
        slots, mass = self._find((rows + uniforms) * (total / max(k, 1)))
        return slots, mass, (mass / total).masked_fill(total == 0.0, 0.0)

    # Arrays in, arrays out; checked first

    @property
    def total(self) -> float:
        return self._sums()[0].item()

    @property
    def minimum(self) -> float:
        return self._sums()[1].item()

    def set(self, slots: np.ndarray, mass: np.ndarray) -> tuple[float, float]:
        slots, mass = as_update(slots, mass)
        bad = self._outside(slots) | ~((mass >= 0.0) & (mass < np.inf))
        if bad.any():
            raise bad_update(self, slots, mass, int(bad.argmax()))
        self._store(self._tensor(slots), self._tensor(mass))
        return tuple(self._sums().tolist())

    def get(self, slots: np.ndarray) -> np.ndarray:
        slots = as_slots(slots)
        bad = self._outside(slots)
        if bad.any():
            raise bad_slot(self, slots, int(bad.argmax()))
        return self._leaves()[self._tensor(slots)].cpu().numpy()

    def find_prefix(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        targets = as_floats(targets, "targets")
        bad = ~(targets >= 0.0) | (self.total == 0.0)
        if bad.any():
            raise bad_target(self, targets, int(bad.argmax()))
        slots, mass = self._find(self._tensor(targets))
        return slots.cpu().numpy(), mass.cpu().numpy()

    # What an implementation gives

    @abc.abstractmethod
    def _store(self, slots: torch.Tensor, mass: torch.Tensor) -> None:
        """Store good masses (float64[k]) in slots (int64[k]) in [0, capacity]; slot `capacity` drops its row."""

    @abc.abstractmethod
    def _find(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots (int64[k]) on which targets (float64[k], >= 0) fall, and their mass (float64[k])."""

    @abc.abstractmethod
    def _sums(self) -> torch.Tensor:
        """The total and the minimum, float64[2] on the device."""

    @abc.abstractmethod
    def _leaves(self) -> torch.Tensor:
        """What was stored in each slot, float64[>= capacity] on the device."""

    def _outside(self, slots: np.ndarray) -> np.ndarray:
        """Which of slots (int64[k]) are not in [0, capacity), bool[k]."""
        return (slots < 0) | (slots >= self.capacity)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """`array` on the device; on the CPU it shares the memory of `array`."""
        # NumPy calls an array of one row contiguous whatever its stride is; torch refuses a negative one.
        return torch.from_numpy(array if array.size > 1 else array.copy()).to(self._device)

    def _zeros(self, shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Zeros on the device. Raises MemoryError when there is no memory for them."""
        try:
            return torch.zeros(shape, dtype=dtype, device=self._device)
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY_ON_CPU in str(error)):
                raise
            raise MemoryError(f"no memory for a priority index of capacity {self.capacity} on {self.device}") from error


def find_device(name: str) -> torch.device:
    """The device of torch called `name`. Raises ValueError when there is none, or it holds no float64 or no data."""
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError, ImportError) as error:
        reason = textwrap.shorten(str(error), 100, placeholder=" ...")
        raise ValueError(f"there is no device {name!r} here that holds float64: {reason}") from error
    if device.type == "meta":
        raise ValueError("the device 'meta' holds no data")
    return device


def clamp(mass: torch.Tensor, floor: float, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`mass` (float64[k]) with NaN and negatives as `floor` and the rest at most `largest`, and which changed (bool[k])."""
    low = ~(mass >= 0.0)
    return mass.masked_fill(low, floor).clamp(max=largest), low | (mass > largest)


def last_rows(slots: torch.Tensor, mass: torch.Tensor, spare: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows (int64[k], float64[k]) by slot; all but the last row of a slot go to slot `spare`, whose mass is 0.

    Every row for one slot then has one mass, so that the order of a parallel write does not matter.
    """
    slots, rows = torch.sort(slots, stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    last[:-1] = slots[1:] != slots[:-1]
    last &= slots != spare
    # Adding +0.0 turns -0.0 into +0.0.
    return slots.masked_fill(~last, spare), (mass[rows] + 0.0).masked_fill(~last, 0.0)
