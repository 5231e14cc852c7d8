"""The priority index "torch": a wide sum and minimum tree in tensors, on any device of torch."""

import torch

from replay_rank.index._tensor import TensorIndex, last_rows

FAN_OUT = 128
_PIECE = 1 << 14  # targets that are looked up together: 16 MiB for each [targets, FAN_OUT] in between


class TorchTree(TensorIndex):
    """Rows of `fan_out` entries; the sum and the minimum of a row are one entry of the next level.

    Level 0 holds the masses of the slots, a spare leaf at `capacity` that stays empty, and empty
    leaves to fill the last row. The level above the last has one entry, the root. Rows are added in
    pairs, so that the sums are those of a binary tree: the same bits on every device.
    """

    name = "torch"
    bytes_per_slot = 8.3

    def __init__(self, capacity: int, alpha: float = 0.6, device: str = "cpu", fan_out: int = FAN_OUT):
        """`fan_out`: entries in a row, a power of two >= 2; ValueError for another."""
        super().__init__(capacity, alpha, device)
        if fan_out < 2 or fan_out & (fan_out - 1):
            raise ValueError(f"fan_out must be a power of two >= 2, got {fan_out}")
        self._shift = fan_out.bit_length() - 1
        self._rows = [_row_count(self.capacity + 1, fan_out)]
        while self._rows[-1] > 1:
            self._rows.append(_row_count(self._rows[-1], fan_out))
        shapes = [(rows, fan_out) for rows in self._rows] + [(1, 1)]
        self._sum = [self._zeros(shape) for shape in shapes]
        # An empty leaf is no candidate for the minimum, hence infinity. Level 0 has its minima in `_sum`.
        self._min = [self._zeros((0, 0))] + [self._zeros(shape).fill_(torch.inf) for shape in shapes[1:]]
        self.nbytes = sum(level.nbytes for level in self._sum + self._min)
        self._torn = (
            False  # whether leaves may have changed and the levels above not yet: an update was interrupted
        )

    def check(self) -> None:
        self._mend()
        leaves = self._sum[0].view(-1)
        allowed = (leaves >= 0.0) & (leaves < torch.inf)
        allowed[self.capacity :] &= leaves[self.capacity :] == 0.0
        self._refuse(0, allowed)
        for level, rows in enumerate(self._rows):
            sums, minima = self._of_rows(level, slice(None))
            held = (entries[level + 1].view(-1) for entries in (self._sum, self._min))
            for own, found, empty in zip(held, (sums, minima), (0.0, torch.inf)):
                self._refuse(level + 1, torch.cat([own[:rows] == found, own[rows:] == empty]))

    def _store(self, slots: torch.Tensor, mass: torch.Tensor) -> None:
        nodes, mass = last_rows(slots, mass, self.capacity)
        self._mend()
        self._torn = True
        self._sum[0].view(-1)[nodes] = mass
        self._add_up(nodes)
        self._torn = False

    def _mend(self) -> None:
        """Repair the levels after an interrupted update (Ctrl-C, no memory) from level 0."""
        if self._torn:
            self._add_up(torch.arange(self._sum[0].numel(), device=self._device))
            self._torn = False

    def _add_up(self, nodes: torch.Tensor) -> None:
        """Bring the levels above leaves (int64[k]) up to date."""
        for level, rows in enumerate(self._rows):
            nodes = nodes >> self._shift
            # As many nodes as rows: then all rows at once is less work, and needs no copy of them.
            touched = nodes if nodes.numel() < rows else slice(None)
            sums, minima = self._of_rows(level, touched)
            written = nodes if nodes.numel() < rows else slice(rows)
            self._sum[level + 1].view(-1)[written] = sums
            self._min[level + 1].view(-1)[written] = minima

    def _of_rows(self, level: int, rows: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums and minima (float64[n]) that rows of a level must have: the only place that adds."""
        sums = self._sum[level][rows]
        minima = self._min[level][rows] if level else sums.masked_fill(sums == 0.0, torch.inf)
        while sums.shape[1] > 1:
            sums = sums[:, 0::2] + sums[:, 1::2]
        return sums[:, 0], minima.amin(1)

    def _find(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = torch.cat([self._descend(piece) for piece in targets.split(_PIECE)])
        return slots, self._leaves()[slots]

    def _descend(self, targets: torch.Tensor) -> torch.Tensor:
        """The slots (int64[k]) on which targets (float64[k]) fall, one level at a time from the top."""
        nodes = torch.zeros_like(targets, dtype=torch.int64)
        for entries in reversed(self._sum[:-1]):
            child, targets = _fall(entries[nodes], targets)
            nodes = (nodes << self._shift) + child
        return nodes

    def _sums(self) -> torch.Tensor:
        self._mend()  # and so before every draw, which asks for the total first
        return torch.cat([self._sum[-1].view(-1), self._min[-1].view(-1)])

    def _leaves(self) -> torch.Tensor:
        return self._sum[0].view(-1)

    @staticmethod
    def _refuse(level: int, good: torch.Tensor) -> None:
        if not good.all():
            row = int((~good).to(torch.uint8).argmax())
            raise AssertionError(
                f"entry {row} of level {level} is not the sum and minimum of its row, or no mass"
            )


def _fall(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the entry of its row (float64[k, n]) for each target, int64[k], and the rest of it, float64[k].

    It is the first entry above zero whose inclusive prefix sum is above the target. Rounding, and a
    sum made in parallel, can leave no such entry or a negative rest; hence the two limits.
    """
    prefix, filled = rows.cumsum(1), rows > 0.0
    end = prefix.masked_fill(~filled, 0.0).amax(1)
    targets = torch.minimum(targets, torch.nextafter(end, torch.zeros_like(end)))
    child = ((prefix > targets[:, None]) & filled).to(torch.uint8).argmax(1)
    before = prefix.gather(1, (child - 1).clamp(min=0)[:, None])[:, 0]
    return child, (targets - before.masked_fill(child == 0, 0.0)).clamp(min=0.0)


def _row_count(entries: int, fan_out: int) -> int:
    return -(-entries // fan_out)


Index = TorchTree
