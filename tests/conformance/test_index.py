"""Each priority index against the conformance suite, and the C tree against its NumPy oracle."""

import functools

import numpy as np
import pytest

pytest.register_assert_rewrite("index_conformance")

from index_conformance import CAPACITIES, IndexConformance, RankConformance, bits, boundary_targets, snapshot  # noqa: E402
from index_oracles import WideOracle  # noqa: E402

from replay_rank.index import make_index  # noqa: E402

WIDE_TOP = 512  # as in native/wide_tree.h
WIDE_CAPACITIES = [100, 1000, 5000, 40_000]  # one, two and three levels


pytestmark = pytest.mark.usefixtures("one_torch_thread")


class TestBinaryIndex(IndexConformance):
    def new_index(self, capacity, **options):
        return make_index("binary", capacity, **options)


class TestBinaryIndexByElement(IndexConformance):
    form = "element"

    def new_index(self, capacity, **options):
        index = make_index("binary", capacity, **options)
        index.form = self.form
        return index


class TestBinaryIndexByRebuilding(TestBinaryIndexByElement):
    form = "rebuild"


class TestBinaryIndexByLevels(TestBinaryIndexByElement):
    form = "levels"


class TestWideIndex(IndexConformance):
    oracle_type = staticmethod(functools.partial(WideOracle, leaves_per_block=8, top=WIDE_TOP))
    large_capacities = WIDE_CAPACITIES

    def new_index(self, capacity, **options):
        return make_index("wide", capacity, **options)


class TestPortableWideIndex(TestWideIndex):
    def new_index(self, capacity, **options):
        return make_index("wide", capacity, portable=True, **options)


class TestWideIndexOfFloat32(IndexConformance):
    oracle_type = staticmethod(functools.partial(WideOracle, leaves_per_block=16, top=WIDE_TOP))
    large_capacities = WIDE_CAPACITIES

    def new_index(self, capacity, **options):
        return make_index("wide32", capacity, **options)


class TestPortableWideIndexOfFloat32(TestWideIndexOfFloat32):
    def new_index(self, capacity, **options):
        return make_index("wide32", capacity, portable=True, **options)


class TestRanks(RankConformance):
    exact = False  # C and NumPy raise to a power, each in its own way

    def new_index(self, capacity, **options):
        return make_index("rank", capacity, **options)


class TestNumpyIndex(IndexConformance):
    def new_index(self, capacity, **options):
        return make_index("numpy", capacity, **options)


class TestTorchIndex(IndexConformance):
    exact = False

    def new_index(self, capacity, **options):
        return make_index("torch", capacity, **options)


class TestTorchIndexOfManyLevels(TestTorchIndex):
    def new_index(self, capacity, **options):
        return make_index("torch", capacity, fan_out=2, **options)


class TestTorchRanks(RankConformance):
    def new_index(self, capacity, **options):
        return make_index("rank_torch", capacity, **options)


def random_mass(rng, k):
    """Masses (float64[k]) over many orders of magnitude, a third of them zero or denormal."""
    mass = 10.0 ** rng.uniform(-12, 12, k)
    corners = rng.choice([0.0, -0.0, 5e-324, 1e-310], k)
    return np.where(rng.random(k) < 0.33, corners, mass)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_c_tree_equals_the_numpy_tree_to_the_last_bit(capacity):
    rng = np.random.default_rng(capacity)
    binary, oracle = make_index("binary", capacity), make_index("numpy", capacity)
    for k in [1, 8, 50, 512, 2048, 0, 3]:
        slots, mass = rng.integers(0, capacity, k), random_mass(rng, k)
        binary.set(slots, mass)
        oracle.set(slots, mass)
        assert snapshot(binary) == snapshot(oracle)
        if binary.total > 0.0:
            assert_same_finds(binary, oracle, rng.random(1000) * binary.total)
            assert_same_finds(binary, oracle, boundary_targets(binary))
    binary.check()
    oracle.check()


def assert_same_finds(one, other, targets):
    """Both find the same slots and, to the last bit, the same masses."""
    (slots, mass), (other_slots, other_mass) = one.find_prefix(targets), other.find_prefix(targets)
    assert slots.tolist() == other_slots.tolist()
    assert bits(mass) == bits(other_mass)


@pytest.mark.parametrize("name", ["binary", "numpy", "torch", "rank_torch"])
def test_an_index_carries_its_name_and_capacity(name):
    index = make_index(name, 5)
    assert (index.name, index.capacity) == (name, 5)


@pytest.mark.parametrize("wrong, nearest", [("binry", "binary"), ("nunpy", "numpy")])
def test_an_unknown_name_is_refused_with_the_nearest_valid_one(wrong, nearest):
    with pytest.raises(ValueError, match=f"{wrong!r}; did you mean '{nearest}.*binary, numpy"):
        make_index(wrong, 5)


def test_check_names_a_damaged_node_of_the_numpy_tree():
    index = make_index("numpy", 6)
    index.set(np.arange(6), np.ones(6))
    index._sum[3] += 1.0
    with pytest.raises(AssertionError, match="node 1 "):
        index.check()
    index._sum[1] += 1.0
    with pytest.raises(AssertionError, match="node 3 "):
        index.check()
