"""The priority index "rank_torch": draws by rank (Schaul et al. 2016, section 3.3) on a device of torch."""

import numpy as np
import torch

from replay_rank.index._tensor import TensorIndex, last_rows


class TorchRanks(TensorIndex):
    """Priorities, sorted when a draw needs it; the item of rank r has the mass r^-alpha.

    The masses of all ranks and their sums are made once. The n filled slots have the first n ranks,
    since priorities are sorted in descending order and a slot of priority 0 is empty.
    """

    name, rule = "rank_torch", "rank"
    bytes_per_slot = 56.0  # 32, and the room in which they are sorted

    def __init__(self, capacity: int, alpha: float = 0.6, device: str = "cpu"):
        super().__init__(capacity, alpha, device)
        self._priorities = self._zeros(self.capacity + 1)  # one spare slot, for rows that are dropped
        self._order = torch.arange(self.capacity, device=self._device)
        self._sorted = False
        mass = np.arange(1.0, self.capacity + 1.0) ** -self.alpha
        # Made on the host, and one after the other: the same bits on every device.
        self._mass, self._cumulative = self._tensor(mass), self._tensor(np.cumsum(mass))
        self._empty = self._tensor(np.array([0.0, np.inf]))
        tensors = (self._priorities, self._order, self._mass, self._cumulative)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)

    def check(self) -> None:
        allowed = (self._priorities >= 0.0) & (self._priorities < torch.inf)
        allowed[self.capacity] &= self._priorities[self.capacity] == 0.0
        if not allowed.all():
            raise AssertionError(f"slot {int(allowed.to(torch.uint8).argmin())} holds no priority")
        self._sort()
        if not torch.equal(self._order.sort().values, torch.arange(self.capacity, device=self._device)):
            raise AssertionError("the order of the ranks is no permutation of the slots")
        ranked = self._priorities[self._order]
        tied = (ranked[1:] == ranked[:-1]) & (self._order[1:] > self._order[:-1])
        good = (ranked[1:] < ranked[:-1]) | tied
        if not good.all():
            raise AssertionError(f"rank {int(good.to(torch.uint8).argmin()) + 2} is out of order")

    def _store(self, slots: torch.Tensor, mass: torch.Tensor) -> None:
        slots, mass = last_rows(slots, mass, self.capacity)
        self._sorted = False  # first, so that an interrupt in between leaves no order that is wrong
        self._priorities[slots] = mass

    def _find(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._sort()
        total = self._sums()[0]
        lowered = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
        ranks = torch.searchsorted(self._cumulative, lowered, right=True).clamp(max=self.capacity - 1)
        return self._order[ranks], self._mass[ranks]

    def _sums(self) -> torch.Tensor:
        # One row, as a tensor of no dimension would be read on the host to index with it.
        n = (self._priorities > 0.0).sum().view(1)
        last = (n - 1).clamp(min=0)
        of_filled = torch.cat([self._cumulative[last], self._mass[last]])
        return torch.where(n > 0, of_filled, self._empty)

    def _leaves(self) -> torch.Tensor:
        return self._priorities[: self.capacity]

    def _sort(self) -> None:
        """Sort if needed. The sort is stable, so the lower slot of equal priorities comes first."""
        if not self._sorted:
            self._order = torch.sort(self._leaves(), descending=True, stable=True).indices
            self._sorted = True


Index = TorchRanks
