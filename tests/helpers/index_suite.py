"""What the tests of every priority index share.

Batches that are hard on one, and comparisons with an oracle.
"""

import math
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from index_oracles import FLOAT32_MAX, MassOracle, RankOracle, stored

from replay_rank.index import PriorityIndex

CAPACITIES = [1, 2, 3, 4, 5, 7, 8, 1000, 4096]
TINY = 5e-324
EPS = 2.0**-52
TOLERANCE = 1e-12  # of the total, for an index that is not `exact`
BAD_MASSES = [math.nan, math.inf, -math.inf, -1.0, -TINY]

# Below 1e300, so that no sum of a test overflows.
masses = st.one_of(
    st.sampled_from([0.0, -0.0, TINY, 3 * TINY, 1e-310, 1e-45, 0.1, 1.0, 1e12]),
    st.floats(min_value=0.0, max_value=1e300),
    st.floats(min_value=1e-6, max_value=1e6),
)
# Sums of these end halfway between two float64, where a target can be rounded beyond its slot.
ties = st.sampled_from([0.5 * EPS, 1.5 * EPS, 2.5 * EPS, 1.0 + 2 * EPS, 1.0 + 4 * EPS])
sparse_masses = st.one_of(st.just(0.0), ties, masses)

# The same inherited test runs in each subclass; each has its own index, so no state is shared.
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


def bits(values) -> bytes:
    """The bytes of float64 values: equal only when equal to the last bit, signs of zero included."""
    return np.asarray(values, np.float64).tobytes()


def held(index) -> np.ndarray:
    """What `set` gave each slot, float64[capacity], as the index stored it."""
    return index.get(np.arange(index.capacity))


def snapshot(index) -> bytes:
    """Everything an index says about its content, as bytes."""
    return bits([index.total, index.minimum]) + bits(held(index))


def filled(index, mass):
    """`index` after giving its first slots the masses."""
    index.set(np.arange(len(mass)), np.asarray(mass, np.float64))
    return index


def fitting(index, mass) -> np.ndarray:
    """The masses (float64[k]), those above the largest finite leaf lowered to it."""
    return np.minimum(mass, np.finfo(index.leaf_dtype).max)


def boundary_targets(index) -> np.ndarray:
    """Targets at, just below and just above every prefix sum, the ends and beyond included."""
    parts = held(index)
    if index.rule == "rank":
        parts = np.arange(1, np.count_nonzero(parts) + 1.0) ** -index.alpha
    at = np.concatenate([[0.0, index.total, math.inf], np.cumsum(parts)])
    return np.concatenate([at, np.nextafter(at, 0.0), np.nextafter(at, math.inf)])


def spread(rng, k) -> np.ndarray:
    """Masses (float64[k]) over twelve orders of magnitude."""
    return 10.0 ** rng.uniform(-6, 6, k)


class IndexSuite:
    """The implementation under test, its oracle, and how close the two must be.

    Attributes:
        exact: sums and finds equal those of the oracle to the last bit. If not, sums differ by at most
            1e-12 of the total, and finds only for a target as close as that to a boundary; all else is equal.
        small_capacities: of the random operations; kept small, as each compares the whole index.
        large_capacities: of the few comparisons in which a tree has more levels.
        examples: histories of random operations that are tried.
        device: where `new_index` makes an index.
    """

    exact = True
    examples = 100
    device = "cpu"
    small_capacities: ClassVar[list] = [1, 2, 3, 4, 5, 7, 8, 13]
    large_capacities: ClassVar[list] = [100, 1000, 4096]

    def new_index(self, capacity: int, **options) -> PriorityIndex:
        """A new, empty index of the implementation under test."""
        raise NotImplementedError

    def new_oracle(self, capacity: int) -> MassOracle | RankOracle:
        """An empty oracle that `new_index(capacity)` must equal."""
        raise NotImplementedError

    def filled(self, mass, capacity: int | None = None):
        """A new index whose first slots have the masses."""
        return filled(self.new_index(capacity or len(mass)), mass)

    def oracle_of(self, index):
        """An oracle that holds what the index holds."""
        oracle = self.new_oracle(index.capacity)
        oracle.set(range(index.capacity), held(index))
        return oracle

    def assert_close(self, value, expected) -> None:
        """Equal to the last bit, or within the tolerance."""
        if self.exact:
            assert bits(value) == bits(expected)
        else:
            np.testing.assert_allclose(value, expected, rtol=TOLERANCE, atol=0.0)

    def assert_sums(self, index, oracle, sums=None) -> None:
        """The index says the same total and minimum as the oracle, and `sums` is what it says."""
        self.assert_close(index.total, oracle.total())
        if index.rule == "rank":
            self.assert_close(index.minimum, oracle.minimum())
        else:
            assert bits(index.minimum) == bits(oracle.minimum())
        assert sums is None or bits(sums) == bits([index.total, index.minimum])

    def assert_equals(self, index, oracle, sums=None) -> None:
        """The index holds what the oracle holds, and is sound."""
        index.check()
        assert bits(held(index)) == bits(oracle.held)
        self.assert_sums(index, oracle, sums)

    def assert_drawable(self, index, targets) -> np.ndarray:
        """The slots found: each in range, above zero mass, and returned with its own mass."""
        slots, mass = index.find_prefix(targets)
        assert slots.dtype == np.int64 and mass.dtype == np.float64
        assert ((slots >= 0) & (slots < index.capacity)).all()
        assert (mass > 0.0).all() and (held(index)[slots] > 0.0).all()
        if index.rule == "rank":
            self.assert_close(mass, self.oracle_of(index).masses()[slots])
        else:
            assert bits(mass) == bits(index.get(slots))
        return slots

    def assert_finds(self, index, oracle, targets) -> None:
        """The index finds what the oracle finds; unless it is exact, but for targets close to a boundary."""
        slots = self.assert_drawable(index, targets)
        if self.exact:
            assert slots.tolist() == [oracle.find(target) for target in targets]
            return
        total = oracle.total()
        lowered, limit = np.minimum(targets, math.nextafter(total, 0.0)), TOLERANCE * total
        begin, end = (edge[slots] for edge in oracle.spans())
        assert ((begin - limit <= lowered) & (lowered <= end + limit)).all()

    def assert_refused(self, index, match: str, call, *arguments, error=ValueError) -> None:
        """The call is refused in words that match, and the index is as before."""
        before = snapshot(index)
        with pytest.raises(error, match=match):
            call(*arguments)
        assert snapshot(index) == before
        index.check()

    def stored(self, mass) -> np.ndarray:
        """Masses (float64[k]) as leaves of the implementation hold them."""
        return stored(mass, self.new_index(1).leaf_dtype)

    def fits(self, mass: float) -> bool:
        """Whether a leaf of the implementation can hold the mass."""
        return self.new_index(1).leaf_dtype == np.float64 or mass <= FLOAT32_MAX
