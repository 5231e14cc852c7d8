"""What the priority indexes of torch share: the checks of the contract on the host, and the tensors.

Every method of `PriorityIndex` checks its rows on the host, and then waits for the device.
"""

import abc
import textwrap

import numpy as np
import torch

from replay_rank.index import PriorityIndex, as_floats, as_slots, as_update, bad_slot, bad_target, bad_update

_NO_MEMORY_ON_CPU = "DefaultCPUAllocator"


class TensorIndex(PriorityIndex):
    """The methods of the contract over four hooks: `_store`, `_find`, `_sums` and `_leaves`."""

    on_any_device = True

    def __init__(self, capacity: int, alpha: float = 0.6, device: str = "cpu"):
        super().__init__(capacity, alpha, device)
        self.backend = f"torch {device}"
        self._device = find_device(device)

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

    @abc.abstractmethod
    def _store(self, slots: torch.Tensor, mass: torch.Tensor) -> None:
        """Store valid masses (float64[k]) in slots (int64[k]) in [0, capacity)."""

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

    def _zeros(self, shape: tuple[int, ...] | int) -> torch.Tensor:
        """Return float64 zeros on the device. Raises MemoryError when there is no memory for them."""
        try:
            return torch.zeros(shape, dtype=torch.float64, device=self._device)
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY_ON_CPU in str(error)):
                raise
            raise MemoryError(
                f"no memory for a priority index of capacity {self.capacity} on {self.device}"
            ) from error


def find_device(name: str) -> torch.device:
    """Return the torch device `name`. Raises ValueError if it is missing or cannot hold float64 data."""
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError, ImportError) as error:
        reason = textwrap.shorten(str(error), 100, placeholder=" ...")
        raise ValueError(f"there is no device {name!r} here that holds float64: {reason}") from error
    if device.type == "meta":
        raise ValueError("the device 'meta' holds no data")
    return device


def last_rows(slots: torch.Tensor, mass: torch.Tensor, spare: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (int64[k], float64[k]) sorted by slot; duplicates but the last go to `spare`, with mass 0.

    Every row for one slot then has one mass, so that the order of a parallel write does not matter.
    """
    slots, rows = torch.sort(slots, stable=True)
    last = torch.ones_like(slots, dtype=torch.bool)
    last[:-1] = slots[1:] != slots[:-1]
    last &= slots != spare
    # Adding +0.0 turns -0.0 into +0.0.
    return slots.masked_fill(~last, spare), (mass[rows] + 0.0).masked_fill(~last, 0.0)
