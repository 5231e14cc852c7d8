"""The oracles of the priority indexes, against sums and boundaries that are plain to see."""

import math

import numpy as np
import pytest
from index_oracles import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    BinaryOracle,
    RankOracle,
    WideOracle,
    fall,
    inclusive,
    stored,
)

ORACLES = {
    "binary": BinaryOracle,
    "wide": WideOracle,
    "wide of float32": lambda capacity: WideOracle(capacity, leaves_per_block=16),
    "wide of many levels": lambda capacity: WideOracle(capacity, top=1),
    "wide of two levels": lambda capacity: WideOracle(capacity, top=8),
}


def holding(name, mass):
    oracle = ORACLES[name](len(mass))
    oracle.set(range(len(mass)), mass)
    return oracle


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("capacity", [1, 7, 8, 9, 64, 100, 700])
def test_whole_numbers_add_up_exactly_and_are_found_exactly(name, capacity):
    mass = np.random.default_rng(capacity).integers(0, 4, capacity)
    mass[-1] = 1
    oracle = holding(name, mass)
    targets = np.arange(0.0, mass.sum(), max(0.5, mass.sum() // 200))
    assert oracle.total() == mass.sum() and oracle.minimum() == 1.0
    assert [oracle.find(t) for t in targets] == np.searchsorted(
        np.cumsum(mass), targets, side="right"
    ).tolist()


@pytest.mark.parametrize("name", ORACLES)
def test_slots_ascend_with_the_target_and_none_is_empty(name):
    rng = np.random.default_rng(1)
    for capacity in (5, 40, 300):
        mass = 10.0 ** rng.uniform(-6, 6, capacity) * (rng.random(capacity) < 0.6)
        mass[rng.integers(capacity)] = 1.0
        oracle = holding(name, mass)
        assert oracle.total() == pytest.approx(math.fsum(mass), rel=1e-14)
        edges = np.append(np.cumsum(mass), oracle.total())
        targets = np.sort(
            np.concatenate([edges, np.nextafter(edges, 0.0), rng.random(100) * oracle.total(), [math.inf]])
        )
        slots = [oracle.find(target) for target in targets]
        assert all(mass[slot] > 0.0 for slot in slots)
        begin, end = oracle.spans()
        inside = [
            begin[s] - 1e-12 * edges[-1] <= min(t, edges[-1]) <= end[s] + 1e-12 * edges[-1]
            for s, t in zip(slots, targets)
        ]
        assert all(inside)


def test_a_node_is_added_in_four_runs():
    big, small = 1.0, 2.0**-53  # a small element is lost beside the big one, but two of them together are not
    assert (
        inclusive([big, small, small, small] + [0.0] * 4)
        == [1.0, 1.0] + [1.0, 1.0 + 2.0**-52] + [1.0 + 2.0**-52] * 4
    )
    assert inclusive([big, 0.0, small, small, 0.0, 0.0, 0.0, 0.0])[3] == 1.0 + 2.0**-52
    ends = inclusive([big] + [small] * 15)
    assert ends[:4] == [1.0] * 4
    assert ends[7::4] == [1.0 + 2.0**-51, 1.0 + 2.0**-50, 1.0 + 3 * 2.0**-51]


def test_a_target_falls_on_the_first_end_above_it():
    ends = [1.0, 1.0, 3.0, 3.0]
    assert [fall(ends, t) for t in (0.0, 0.5, 1.0, 2.5)] == [(0, 0.0), (0, 0.5), (2, 0.0), (2, 1.5)]


def test_the_wide_oracle_has_as_many_levels_as_its_top_leaves():
    assert [len(WideOracle(4096, top=top).levels) for top in (1, 8, 64, 512)] == [4, 3, 2, 1]
    assert len(WideOracle(4096, leaves_per_block=16).levels) == 2


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_ranks_go_by_priority_and_then_by_slot(alpha):
    oracle = RankOracle(6, alpha)
    oracle.set(range(6), [2.0, 0.0, 9.0, 2.0, 0.5, 9.0])
    assert oracle.order() == [2, 5, 0, 3, 4]
    powers = [rank**-alpha for rank in range(1, 6)]
    assert oracle.masses() == pytest.approx([powers[2], 0.0, powers[0], powers[3], powers[4], powers[1]])
    assert (oracle.total(), oracle.minimum()) == pytest.approx((sum(powers), powers[-1]))
    middles = np.cumsum(powers) - np.array(powers) / 2
    assert [oracle.find(target) for target in (0.0, *middles, math.inf)] == [2, 2, 5, 0, 3, 4, 4]


def test_a_float32_leaf_rounds_to_nearest_but_never_to_zero():
    assert stored([1.0 + 2.0**-25, 1.0 + 1.5 * 2.0**-24, FLOAT32_MAX], np.float32).tolist() == [
        1.0,
        1.0 + 2.0**-23,
        FLOAT32_MAX,
    ]
    assert stored([5e-324, 1e-46, -0.0, 0.0], np.float32).tolist() == [FLOAT32_TINY, FLOAT32_TINY, 0.0, 0.0]
    assert stored([5e-324, 1e300, 0.1]).tolist() == [5e-324, 1e300, 0.1]
