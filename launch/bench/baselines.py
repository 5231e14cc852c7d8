"""What ``apex bench index`` compares: our indexes, a tree in plain Python, and other libraries.

Each of the others is at its best: whole batches, the arrays or tensors it takes without converting, and
no work that its user could leave out. Where one raises priorities to a power itself, the power is 1.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from apex.config import ConfigError, nearest
from replay_rank.index import PriorityIndex, index_class, index_names, make_index
from replay_rank.strata import Strata

_FORMS = {"binary-element": "element", "binary-rebuild": "rebuild", "binary": "auto"}
_ALL_OPS = ("sample", "update", "insert", "step")
_CHUNK = 1 << 16


class Candidate:
    """A priority structure under test, full of masses.

    ``update`` and ``insert`` take what ``prepare`` and ``prepare_insert`` return: the same rows in the
    types that this structure takes fastest. Only ``sample``, ``update`` and ``insert`` are timed.

    Attributes:
        name: the row's name. leaf: what a mass is stored as. ops: the operations worth measuring.
        index: the priority index behind it, if it is ours. package: the package it comes from, if not.
        time_calls: what times its calls in C (see ``native.timing.time_calls``), None where it is not in C.
    """

    name: str
    leaf = "float64"
    ops: tuple[str, ...] = _ALL_OPS
    index: PriorityIndex | None = None
    package: str | None = None
    time_calls: Callable[..., np.ndarray] | None = None

    def prepare(self, slots: np.ndarray, mass: np.ndarray) -> tuple:
        """Return the arguments of ``update`` for slots (int64[k]) and their mass (float64[k])."""
        return slots, mass

    def prepare_insert(self, first: int, mass: np.ndarray) -> tuple:
        """Return the arguments of ``insert``: mass (float64[k]) for the slots from ``first`` on."""
        return self.prepare(np.arange(first, first + mass.size), mass)

    def sample(self, k: int) -> Any:
        """Draw k slots with their probability or weight."""
        raise NotImplementedError

    def update(self, slots: Any, mass: Any) -> Any:
        """Give slots their mass."""
        raise NotImplementedError

    def insert(self, slots: Any, mass: Any) -> Any:
        """Give a run of slots their mass."""
        self.update(slots, mass)


class Own(Candidate):
    """One of the indexes here, by the calls of its contract."""

    index: PriorityIndex

    def __init__(self, name: str, mass: np.ndarray):
        self.name = name
        self.index = _in_form(name, mass.size) if name in _FORMS else make_index(name, mass.size)
        self.time_calls = _timed_in_c(self.index)
        self.index.load(mass)
        self.leaf = self.index.leaf_dtype.name
        self.ops = ("update",) if name == "binary-rebuild" else _ALL_OPS
        self._strata, self._out = Strata(0), (np.empty(0, np.int64), np.empty(0), np.empty(0))
        # Without a call in between, which would be timed too.
        self.update, self.insert = self.index.set, self.index.set_range  # type: ignore[method-assign, assignment]

    def prepare_insert(self, first: int, mass: np.ndarray) -> tuple:
        return first, mass

    def sample(self, k: int) -> Any:
        """Draw into the same arrays again, as a replay rank does."""
        if len(self._out[0]) != k:
            self._out = np.empty(k, np.int64), np.empty(k), np.empty(k)
        return self.index.draw(self._strata, k, self._out)


class PythonTree(Candidate):
    """The field's usual tree in plain Python (as in OpenAI Baselines): two lists, one slot at a time.

    Node 1 is the root, the children of n are 2n and 2n + 1. Every add and minimum is written out in the
    loop, which is faster than the calls through ``operator`` that are usual.
    """

    name = "python"

    def __init__(self, mass: np.ndarray):
        self.width = 1 << (mass.size - 1).bit_length()
        sums, minima = np.zeros(self.width), np.full(self.width, np.inf)
        sums[: mass.size], minima[: mass.size] = mass, np.where(mass > 0.0, mass, np.inf)
        self.sums, self.minima = _heap(sums, np.add), _heap(minima, np.minimum)

    def prepare(self, slots: np.ndarray, mass: np.ndarray) -> tuple:
        return slots.tolist(), mass.tolist()

    def update(self, slots: Any, mass: Any) -> Any:
        sums, minima, width = self.sums, self.minima, self.width
        for slot, value in zip(slots, mass):
            node = slot + width
            sums[node] = value
            minima[node] = value if value > 0.0 else float("inf")
            node >>= 1
            while node:
                left, right = 2 * node, 2 * node + 1
                sums[node] = sums[left] + sums[right]
                minima[node] = minima[left] if minima[left] < minima[right] else minima[right]
                node >>= 1

    def find_prefix(self, target: float) -> int:
        """Return the slot that ``target``, in [0, total), falls on."""
        sums, node, width = self.sums, 1, self.width
        while node < width:
            node *= 2
            if target >= sums[node]:
                target -= sums[node]
                node += 1
        return node - width

    def sample(self, k: int) -> Any:
        total = self.sums[1]
        stratum = total / k
        slots = [self.find_prefix((row + random.random()) * stratum) for row in range(k)]
        return slots, [self.sums[slot + self.width] / total for slot in slots]


def _heap(leaves: np.ndarray, join: np.ufunc) -> list[float]:
    """Return the nodes above the leaves and the leaves, with node 1 the root and node 0 unused."""
    levels = [leaves]
    while levels[0].size > 1:
        levels.insert(0, join(levels[0][::2], levels[0][1::2]))
    return [0.0, *np.concatenate(levels).tolist()]


class _TreeOfArrays(Candidate):
    """Stratified draws from a tree that finds a whole array of prefix sums."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def _targets(self, k: int, total: float) -> np.ndarray:
        return (np.arange(k) + self._rng.random(k)) * (total / k)


class TorchrlTree(_TreeOfArrays):
    """The sum and minimum trees in C++ under torchrl's sampler, called with NumPy arrays."""

    name, package = "torchrl-tree", "torchrl"

    def __init__(self, mass: np.ndarray):
        super().__init__()
        trees = _torchrl_trees()
        self._sum, self._min = trees.SumSegmentTreeFp64(mass.size), trees.MinSegmentTreeFp64(mass.size)
        self._size = mass.size
        self.update(np.arange(mass.size), mass)

    def sample(self, k: int) -> Any:
        total = self._sum.query(0, self._size)
        slots = self._sum.scan_lower_bound(self._targets(k, total))
        return slots, self._sum[slots] / total

    def update(self, slots: Any, mass: Any) -> Any:
        self._sum[slots] = mass
        self._min[slots] = mass


class TorchrlSampler(Candidate):
    """torchrl's ``PrioritizedSampler`` with its defaults, called with tensors; draws are not stratified."""

    name, package, leaf = "torchrl-sampler", "torchrl", "float32"

    def __init__(self, mass: np.ndarray):
        import torch

        _torchrl_trees()
        from torchrl.data.replay_buffers.samplers import PrioritizedSampler

        self._torch, self._storage = torch, _Filled(mass.size, torch.device("cpu"))
        self._sampler = PrioritizedSampler(mass.size, alpha=1.0, beta=1.0)
        self.update(*self.prepare(np.arange(mass.size), mass))

    def prepare(self, slots: np.ndarray, mass: np.ndarray) -> tuple:
        return self._torch.from_numpy(slots), self._torch.from_numpy(mass.astype(np.float32))

    def sample(self, k: int) -> Any:
        return self._sampler.sample(self._storage, k)

    def update(self, slots: Any, mass: Any) -> Any:
        self._sampler.update_priority(slots, mass)


class _Filled:
    """What torchrl's sampler asks of a storage: how much there is, and where."""

    ndim = 1

    def __init__(self, size: int, device: Any):
        self._size, self.device = size, device

    def __len__(self) -> int:
        return self._size


class Cpprb(Candidate):
    """cpprb's ``PrioritizedReplayBuffer`` with one byte a transition, its smallest."""

    name = package = "cpprb"
    leaf = "float32"

    def __init__(self, mass: np.ndarray):
        from cpprb import PrioritizedReplayBuffer

        self._buffer = PrioritizedReplayBuffer(mass.size, {"byte": {"dtype": np.uint8}}, alpha=1.0, eps=0.0)
        for first in range(0, mass.size, _CHUNK):
            self.insert(*self.prepare_insert(first, mass[first : first + _CHUNK]))

    def prepare(self, slots: np.ndarray, mass: np.ndarray) -> tuple:
        return slots.astype(np.uint64), mass.astype(np.float32)

    def prepare_insert(self, first: int, mass: np.ndarray) -> tuple:
        return np.zeros(mass.size, np.uint8), mass.astype(np.float32)

    def sample(self, k: int) -> Any:
        return self._buffer.sample(k, beta=1.0)

    def update(self, slots: Any, mass: Any) -> Any:
        self._buffer.update_priorities(slots, mass)

    def insert(self, slots: Any, mass: Any) -> Any:
        self._buffer.add(byte=slots, priorities=mass)


class Tianshou(_TreeOfArrays):
    """tianshou's ``SegmentTree`` in Numba: sums only, so about half the work of the others."""

    name = package = "tianshou"

    def __init__(self, mass: np.ndarray):
        from tianshou.data.utils.segtree import SegmentTree

        super().__init__()
        self._tree = SegmentTree(mass.size)
        self._tree[np.arange(mass.size)] = mass

    def sample(self, k: int) -> Any:
        total = self._tree.reduce()
        slots = self._tree.get_prefix_sum_idx(self._targets(k, total))
        return slots, self._tree[slots] / total

    def update(self, slots: Any, mass: Any) -> Any:
        self._tree[slots] = mass


_Other = type[PythonTree | TorchrlTree | TorchrlSampler | Cpprb | Tianshou]
_OTHERS: dict[str, _Other] = {
    candidate.name: candidate for candidate in (PythonTree, TorchrlTree, TorchrlSampler, Cpprb, Tianshou)
}


def load_native() -> None:
    """Load the C part before torch, whose libgomp may lack OpenACC; without it the C indexes are left out."""
    with contextlib.suppress(ImportError):
        index_class("wide")


def choose(asked: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the names to measure, and in words those left out. None asks for all there are.

    Raises :class:`ConfigError` for a name that is unknown or whose package is not installed.
    """
    known = [*_own_names(), *_OTHERS]
    for name in asked or ():
        if name not in known:
            raise ConfigError(f"--indexes: unknown index '{name}'; {nearest(name, known)}")
    missing = {name: text for name in asked or known if (text := _not_installed(name))}
    if asked and missing:
        raise ConfigError(f"--indexes: {next(iter(missing.values()))}; pip install 'apex-mpi[bench]'")
    return [name for name in dict.fromkeys(asked or known) if name not in missing], list(missing.values())


def make(name: str, mass: np.ndarray) -> Candidate:
    """Return the candidate ``name`` with mass float64[n]; raises ImportError where it cannot be loaded."""
    return _OTHERS[name](mass) if name in _OTHERS else Own(name, mass)


def _own_names() -> list[str]:
    return [*_FORMS, *(name for name in index_names() if name != "binary")]


def _in_form(name: str, capacity: int) -> PriorityIndex:
    from replay_rank.index.binary import BinaryTree  # not above: without the C part there are the others

    tree = BinaryTree(capacity)
    tree.form = _FORMS[name]
    return tree


def _timed_in_c(index: PriorityIndex) -> Callable[..., np.ndarray] | None:
    with contextlib.suppress(ImportError):
        from replay_rank.index._native import NativeIndex

        if isinstance(index, NativeIndex):
            return index.timed_from_c()
    return None


def _not_installed(name: str) -> str | None:
    package = _OTHERS[name].package if name in _OTHERS else None
    return (
        f"{name}: {package} is not installed"
        if package and importlib.util.find_spec(package) is None
        else None
    )


def _torchrl_trees() -> Any:
    """Return the compiled module of torchrl.

    A wheel of torchrl is made for one version of torch, and not every torch has one. Bound lazily, it
    loads beside others too: the trees call nothing of torch that differs between them.
    """
    import torch  # noqa: F401  loads the libraries that the module is bound to

    with _lazily_bound():
        from torchrl import _torchrl
    return _torchrl


@contextlib.contextmanager
def _lazily_bound() -> Iterator[None]:
    before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)
    try:
        yield
    finally:
        sys.setdlopenflags(before)
