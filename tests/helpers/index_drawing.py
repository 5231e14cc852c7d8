"""Drawing from a priority index of either rule: what is found, what is drawn, and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_suite import (
    CAPACITIES,
    TINY,
    TOLERANCE,
    IndexSuite,
    bits,
    boundary_targets,
    filled,
    fitting,
    quick,
    sparse_masses,
    spread,
)
from scipy import stats

from replay_rank.strata import Strata


def _unaligned(array: np.ndarray) -> np.ndarray:
    return np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype)


def _sealed(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


# What a caller may spoil an array for draws by, the error, and what it says.
UNFIT = {
    "half the size": (
        lambda a: a.astype({"i": np.int32, "f": np.float32}[a.dtype.kind]),
        TypeError,
        "must be an array of",
    ),
    "another type": (
        lambda a: a.view(np.float64 if a.dtype.kind == "i" else np.int64),
        TypeError,
        "must be an array of",
    ),
    "big-endian": (lambda a: a.astype(a.dtype.newbyteorder(">")), TypeError, "must be an array of"),
    "a list": (lambda a: a.tolist(), TypeError, "must be an array of"),
    "nothing": (lambda a: None, TypeError, "must be an array of"),
    "shorter": (lambda a: a[:6], ValueError, "must be of length 7"),
    "longer": (lambda a: np.append(a, a), ValueError, "must be of length 7"),
    "two-dimensional": (lambda a: a.reshape(1, 7), ValueError, "must be of length 7"),
    "of no dimension": (lambda a: a[:1].reshape(()), ValueError, "must be of length 7"),
    "strided": (lambda a: np.repeat(a, 2)[::2], ValueError, "contiguous"),
    "unaligned": (_unaligned, ValueError, "aligned"),
    "read-only": (_sealed, ValueError, "writable"),
}


class Drawing(IndexSuite):
    """Tests of `find_prefix` and `draw`."""

    @given(st.lists(sparse_masses, min_size=1, max_size=40))
    @quick
    def test_a_slot_of_zero_mass_is_never_returned(self, mass):
        index = self.new_index(len(mass))
        filled(index, fitting(index, mass))
        if index.total > 0.0:
            self.assert_drawable(index, boundary_targets(index))

    def test_trees_of_more_levels_agree_with_the_oracle(self):
        for capacity in self.large_capacities:
            rng = np.random.default_rng(capacity)
            index, oracle = self.new_index(capacity), self.new_oracle(capacity)
            for k in (capacity, capacity // 2, 8, 1):
                slots, mass = rng.integers(0, capacity, k), spread(rng, k) * (rng.random(k) < 0.7)
                sums = index.set(slots, mass)
                oracle.set(slots, self.stored(mass))
                self.assert_equals(index, oracle, sums)
            targets = np.append(rng.random(100) * index.total, rng.choice(boundary_targets(index), 100))
            self.assert_finds(index, oracle, targets)

    def test_slots_are_drawn_in_proportion_to_their_mass(self):
        rng = np.random.default_rng(2)
        mass = rng.exponential(size=300) ** 0.6 + 0.05
        mass[rng.integers(0, 300, 60)] = 0.0
        index, counts = self.filled(mass), np.zeros(300)
        for _ in range(4):
            counts += np.bincount(
                self.assert_drawable(index, rng.random(50_000) * index.total), minlength=300
            )
        self.assert_distribution(index, counts)

    def test_stratified_draws_are_in_proportion_to_the_mass_too(self):
        rng, strata = np.random.default_rng(5), Strata(5)
        index, counts = self.filled(np.where(rng.random(50) < 0.2, 0.0, rng.random(50) + 0.05)), np.zeros(50)
        for _ in range(2000):  # few strata, so that most slots are drawn by chance
            counts += np.bincount(index.draw(strata, 10)[0], minlength=50)
        self.assert_distribution(index, counts)

    def assert_distribution(self, index, counts) -> None:
        """Draws (float64[capacity] counts) follow P(i) = mass_i / total, by a chi-square test."""
        mass = self.oracle_of(index).masses()
        drawn = mass > 0.0
        assert not counts[~drawn].any()
        assert stats.chisquare(counts[drawn], counts.sum() * mass[drawn] / mass.sum()).pvalue > 1e-3

    # Corners

    def test_the_newest_item_can_be_drawn(self):
        index = self.filled([1.0, 1.0], capacity=8)
        targets = np.random.default_rng(3).random(1000) * index.total
        assert set(self.assert_drawable(index, targets)) == {0, 1}

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_a_single_item_is_always_drawn(self, capacity):
        for slot in {0, capacity // 2, capacity - 1}:
            index = self.new_index(capacity)
            index.set(np.array([slot]), np.array([0.37]))
            total = index.total
            targets = [0.0, 0.3 * total, math.nextafter(total, 0), total, 3 * total, math.inf]
            assert set(self.assert_drawable(index, np.array(targets))) == {slot}
            assert set(index.draw(Strata(0), 9)[0]) == {slot}

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_a_target_at_or_beyond_the_total_falls_on_the_last_item(self, capacity):
        # Descending, so that the last slot is the last rank.
        index = self.filled(np.sort(np.random.default_rng(capacity).random(capacity) + 0.1)[::-1])
        total = index.total
        around = np.array([total, math.nextafter(total, 0), math.nextafter(total, math.inf)])
        assert self.assert_drawable(index, around).tolist() == [capacity - 1] * 3

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_every_prefix_boundary_of_any_capacity_falls_on_a_valid_slot(self, capacity):
        rng = np.random.default_rng(capacity)
        mass = spread(rng, capacity)
        mass[rng.random(capacity) < 0.3] = 0.0
        mass[rng.integers(capacity)] = 1.0
        index = self.filled(mass)
        self.assert_drawable(index, boundary_targets(index))

    # Draws

    @pytest.mark.parametrize("k", [1, 2, 5, 512])
    def test_a_draw_finds_the_targets_of_its_strata_to_the_last_bit(self, k):
        index = self.filled(spread(np.random.default_rng(k), 100))
        strata, same = Strata(2**63 + k), Strata(2**63 + k)
        for _ in range(3):
            slots, mass, probability = index.draw(strata, k)
            found, found_mass = index.find_prefix(same.targets(k, index.total))
            assert slots.tolist() == found.tolist()
            assert bits(mass) == bits(found_mass) and bits(probability) == bits(mass / index.total)
            assert (slots.dtype, mass.dtype, probability.dtype) == (np.int64, np.float64, np.float64)
            assert slots.shape == mass.shape == probability.shape == (k,)
            assert strata.state == same.state

    @pytest.mark.parametrize("k", [0, 1, 7])
    def test_a_draw_can_be_written_into_arrays_of_the_caller(self, k):
        index = self.filled(np.arange(1.0, 101.0))
        expected = index.draw(Strata(5), k)
        out = np.zeros(k, np.int64), np.zeros(k), np.zeros(k)
        drawn = index.draw(Strata(5), k, out)
        assert all(one is other for one, other in zip(drawn, out, strict=True))
        assert [array.tobytes() for array in out] == [array.tobytes() for array in expected]

    @pytest.mark.parametrize("at", [0, 1, 2])
    @pytest.mark.parametrize("wrong", UNFIT)
    def test_an_array_of_the_caller_that_does_not_fit_is_refused(self, wrong, at):
        spoil, error, match = UNFIT[wrong]
        out = [np.zeros(7, np.int64), np.zeros(7), np.zeros(7)]
        out[at] = spoil(out[at])
        self.assert_no_draw(7, tuple(out), error, match)

    @pytest.mark.parametrize(("k", "length"), [(7, 6), (7, 8), (7, 0), (0, 1), (1, 2), (2**70, 3)])
    def test_three_arrays_of_one_wrong_length_are_refused(self, k, length):
        out = np.zeros(length, np.int64), np.zeros(length), np.zeros(length)
        self.assert_no_draw(k, out, ValueError, f"must be of length {k}, got shape")

    def test_arrays_of_the_caller_that_share_memory_are_refused(self):
        mass = np.zeros(8)
        self.assert_no_draw(7, (np.zeros(7, np.int64), mass[:7], mass[1:]), ValueError, "share memory")
        self.assert_no_draw(7, (mass[:7].view(np.int64), mass[1:], np.zeros(7)), ValueError, "share memory")
        strata = Strata(5)
        with pytest.raises(ValueError, match="share memory"):
            self.filled(np.ones(9)).draw(strata, 1, (strata.state.view(np.int64), np.zeros(1), np.zeros(1)))
        assert strata.state == Strata(5).state

    def test_fewer_or_more_arrays_than_three_are_refused(self):
        for count in (0, 2, 4):
            out = (np.zeros(7, np.int64), np.zeros(7), np.zeros(7), np.zeros(7))[:count]
            self.assert_no_draw(7, out, ValueError, "three arrays")

    def assert_no_draw(self, k, out, error, match) -> None:
        """The draw is refused; neither the arrays nor the index nor the stream have changed."""
        index, strata = self.filled(np.arange(1.0, 101.0)), Strata(5)
        before = [np.array(array).tobytes() for array in out]
        self.assert_refused(index, match, index.draw, strata, k, out, error=error)
        assert strata.state == Strata(5).state
        assert [np.array(array).tobytes() for array in out] == before

    def test_draws_of_one_strata_go_on_where_the_last_ended(self):
        index = self.filled(np.arange(1.0, 101.0))
        strata, after = Strata(3), Strata(3)
        after.uniforms(64)
        first, second = index.draw(strata, 64)[0], index.draw(strata, 64)[0]
        assert first.tolist() != second.tolist()
        assert second.tolist() == index.draw(after, 64)[0].tolist()

    def test_each_draw_comes_from_its_own_stratum_of_the_total(self):
        index, k = self.filled(np.random.default_rng(6).random(300)), 128
        slots, _, _ = index.draw(Strata(6), k)
        begin, end = (edge[slots] for edge in self.oracle_of(index).spans())
        edges = index.total / k * np.arange(k + 1)
        limit = TOLERANCE * index.total
        assert (begin <= edges[1:] + limit).all() and (end >= edges[:-1] - limit).all()

    def test_no_draws_move_nothing(self):
        for index in (self.new_index(3), self.filled([1.0, 2.0])):
            strata = Strata(7)
            for array, dtype in zip(index.draw(strata, 0), (np.int64, np.float64, np.float64)):
                assert array.shape == (0,) and array.dtype == dtype
            assert strata.state == Strata(7).state

    @pytest.mark.parametrize("k", [-1, -(2**40)])
    def test_fewer_than_no_draws_are_refused_and_the_stream_has_not_moved(self, k):
        for index in (self.new_index(3), self.filled([1.0, 2.0])):
            strata = Strata(8)
            self.assert_refused(index, "number of draws must be >= 0", index.draw, strata, k)
            assert strata.state == Strata(8).state

    def test_an_empty_index_refuses_to_draw_and_the_stream_has_not_moved(self):
        emptied = self.filled([1.0, 2.0], capacity=5)
        assert emptied.set(np.array([0, 1]), np.zeros(2)) == (0.0, math.inf)
        for index in (self.new_index(5), emptied):
            strata = Strata(9)
            assert bits([index.total, index.minimum]) == bits([0.0, math.inf])
            self.assert_refused(index, "empty", index.find_prefix, np.array([0.0]))
            self.assert_refused(index, "empty", index.draw, strata, 4)
            assert strata.state == Strata(9).state

    @pytest.mark.parametrize("bad", [math.nan, -1.0, -TINY, -math.inf])
    def test_a_bad_target_is_refused_by_row(self, bad):
        index = self.filled([1.0, 2.0, 3.0, 4.0])
        self.assert_refused(
            index, r"row 2: target .* must be >= 0", index.find_prefix, np.array([0.0, 1.0, bad, bad])
        )
