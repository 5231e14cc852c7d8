"""What every priority index must do: mixins of tests, one for each rule.

A new implementation is tested by:

    from index_conformance import IndexConformance

    class TestMyIndex(IndexConformance):
        def new_index(self, capacity, **options):
            return make_index("mine", capacity, **options)

One that adds in another order also sets `oracle_type` to an oracle that adds in that order (a
function of the capacity will do), and one that adds in no fixed order sets `exact = False`. One of
rule "rank" subclasses `RankConformance`. `small_capacities` and `large_capacities` choose sizes at
which a tree gets more levels.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

pytest.register_assert_rewrite(
    "index_oracles", "index_suite", "index_machine", "index_drawing", "index_updating"
)

from index_drawing import Drawing  # noqa: E402
from index_machine import IndexMachine  # noqa: E402
from index_oracles import BinaryOracle, RankOracle  # noqa: E402
from index_suite import CAPACITIES, EPS, TINY, bits, boundary_targets, filled, held, quick, snapshot  # noqa: E402
from index_updating import Arguments, Updating  # noqa: E402

__all__ = [
    "CAPACITIES",
    "IndexConformance",
    "RankConformance",
    "bits",
    "boundary_targets",
    "filled",
    "held",
    "snapshot",
]


class _Conformance(Drawing, Updating, Arguments):
    """What both rules share."""

    def test_random_operations_agree_with_the_oracle_to_the_last_bit(self):
        machine = type("Machine", (IndexMachine,), {"suite": self})
        run_state_machine_as_test(
            machine, settings=settings(max_examples=self.examples, stateful_step_count=25, deadline=None)
        )


class IndexConformance(_Conformance):
    """Tests of the `PriorityIndex` contract for the implementation of rule "proportional" that `new_index`
    makes.
    """

    oracle_type = BinaryOracle

    def new_oracle(self, capacity):
        return type(self).oracle_type(capacity)

    def test_its_rule_is_proportional(self):
        assert self.new_index(3).rule == "proportional"

    @given(st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any))
    @quick
    def test_with_whole_numbers_the_slot_follows_the_prefix_sums_exactly(self, mass):
        index = self.filled(mass)
        targets = np.arange(0.0, sum(mass), 0.5)
        expected = np.searchsorted(np.cumsum(mass), targets, side="right")
        assert index.total == sum(mass)
        assert self.assert_drawable(index, targets).tolist() == expected.tolist()

    @pytest.mark.parametrize("capacity", [3, 4, 8])
    def test_a_target_rounded_beyond_its_slot_does_not_fall_on_the_empty_one_after_it(self, capacity):
        # The total is rounded up to 1 + 4 eps. Less the first mass, the target just below it is
        # rounded up as well, to the whole of slot 2. (A narrower leaf holds 1, and has no such tie.)
        index = self.filled([1.5 * EPS, 0.0, 1.0 + 2 * EPS], capacity)
        assert index.total == (1.0 + 4 * EPS if index.leaf_dtype == np.float64 else 1.0 + 2 * EPS)
        assert self.assert_drawable(index, np.array([math.nextafter(index.total, 0.0)])).tolist() == [2]

    def test_the_mass_of_a_find_is_what_was_set(self):
        index = self.filled([0.1, 0.2, 0.3])
        assert bits(index.find_prefix(np.array([0.0, 0.2, 0.5]))[1]) == bits(self.stored([0.1, 0.2, 0.3]))


class RankConformance(_Conformance):
    """The same for rule "rank": `set` takes priorities, and rank r (1: the largest) has the mass r^-alpha."""

    alpha = 0.6  # what `new_index` is made with unless a test chooses another

    def new_oracle(self, capacity):
        return RankOracle(capacity, self.alpha)

    def with_alpha(self, alpha, priorities):
        """An index of this alpha that holds the priorities, and an oracle that does."""
        index, oracle = self.new_index(len(priorities), alpha=alpha), RankOracle(len(priorities), alpha)
        sums = filled(index, priorities).set(np.array([], np.int64), np.array([]))
        oracle.set(range(len(priorities)), self.stored(priorities))
        self.assert_sums(index, oracle, sums)
        return index, oracle

    def test_its_rule_is_rank(self):
        assert self.new_index(3).rule == "rank"

    def test_the_default_alpha_is_that_of_the_oracle(self):
        assert self.new_index(3).alpha == self.alpha

    @pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 1.0, 2.0])
    def test_finds_agree_with_the_oracle_for_any_alpha(self, alpha):
        priorities = np.random.default_rng(11).choice([0.0, 0.5, 1.0, 1.0 + EPS, 7.0, TINY, 1e30], 200)
        index, oracle = self.with_alpha(alpha, priorities)
        targets = np.append(
            np.random.default_rng(12).random(200) * index.total, boundary_targets(index)[:200]
        )
        slots, mass = index.find_prefix(targets)
        self.assert_close(mass, oracle.masses()[slots])
        begin, end = (edge[slots] for edge in oracle.spans())
        lowered, limit = np.minimum(targets, math.nextafter(oracle.total(), 0.0)), 1e-12 * oracle.total()
        assert ((begin - limit <= lowered) & (lowered <= end + limit)).all()
        if self.exact:
            assert slots.tolist() == [oracle.find(target) for target in targets]

    def test_with_alpha_zero_every_filled_slot_is_as_likely(self):
        index, _ = self.with_alpha(0.0, [5.0, 0.0, 1e30, 1e-30, 5.0])
        assert (index.total, index.minimum) == (4.0, 1.0)
        assert index.find_prefix(np.arange(0.0, 4.0, 0.5))[0].tolist() == [2, 2, 0, 0, 4, 4, 3, 3]

    def test_the_size_of_a_priority_does_not_matter_only_its_rank(self):
        one, other = self.filled([3.0, 1.0, 2.0]), self.filled([1e30, 1e-30, 1.0])
        targets = boundary_targets(one)
        assert bits([one.total, one.minimum]) == bits([other.total, other.minimum])
        assert one.find_prefix(targets)[0].tolist() == other.find_prefix(targets)[0].tolist()

    def test_of_equal_priorities_the_lower_slot_comes_first(self):
        index, _ = self.with_alpha(1.0, [2.0, 7.0, 2.0, 7.0, 2.0])
        middles = np.cumsum(1.0 / np.arange(1, 6)) - 0.5 / np.arange(1, 6)
        assert index.find_prefix(middles)[0].tolist() == [1, 3, 0, 2, 4]
        index.set(np.array([4, 1]), np.array([7.0, 2.0]))
        assert index.find_prefix(middles)[0].tolist() == [3, 4, 0, 1, 2]

    def test_a_priority_of_zero_gives_its_rank_to_those_after_it(self):
        index, _ = self.with_alpha(1.0, [4.0, 3.0, 2.0])
        index.set(np.array([0]), np.array([0.0]))
        self.assert_close([index.total, index.minimum], [1.5, 0.5])
        slots, mass = index.find_prefix(np.array([0.5, 1.2]))
        assert slots.tolist() == [1, 2]
        self.assert_close(mass, [1.0, 0.5])

    def test_what_was_set_is_returned_and_not_the_mass(self):
        index = self.filled([0.1, 0.0, 3.0])
        assert bits(held(index)) == bits(self.stored([0.1, 0.0, 3.0]))
        assert bits(index.save()) == bits(held(index))
