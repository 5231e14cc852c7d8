"""What every priority index must do: a mixin of tests, and the naive oracle they compare with.

A new implementation is tested by:

    from index_conformance import IndexConformance

    class TestMyIndex(IndexConformance):
        def new_index(self, capacity):
            return make_index("mine", capacity)

One that adds in another order also sets `oracle_type` to an oracle that adds in that order.
"""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from scipy import stats

CAPACITIES = [1, 2, 3, 4, 5, 7, 8, 1000, 4096]
SMALL_CAPACITIES = [1, 2, 3, 4, 5, 7, 8, 13]
TINY = 5e-324
EPS = 2.0**-52
BAD_MASSES = [math.nan, math.inf, -math.inf, -1.0, -TINY]

# Below 1e300, so that no sum of a test overflows.
masses = st.one_of(
    st.sampled_from([0.0, -0.0, TINY, 3 * TINY, 1e-310, 0.1, 1.0, 1e12]),
    st.floats(min_value=0.0, max_value=1e300),
    st.floats(min_value=1e-6, max_value=1e6),
)
# Sums of these end halfway between two float64, where a target can be rounded beyond its slot.
ties = st.sampled_from([0.5 * EPS, 1.5 * EPS, 2.5 * EPS, 1.0 + 2 * EPS, 1.0 + 4 * EPS])
sparse_masses = st.one_of(st.just(0.0), ties, masses)

# The same inherited test runs in each subclass; each has its own index, so no state is shared.
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


class BinaryOracle:
    """Masses in a list, padded with zeros to a power of two, and sums of halves by recursion."""

    def __init__(self, capacity: int):
        self.mass = [0.0] * (1 << (capacity - 1).bit_length())

    def set(self, slots, mass) -> None:
        """Store the masses, row by row."""
        for slot, value in zip(slots, mass, strict=True):
            self.mass[int(slot)] = abs(float(value))

    def total(self) -> float:
        """The sum of all masses."""
        return self._sum(self.mass)

    def minimum(self) -> float:
        """The smallest mass above zero, or infinity."""
        return min((value for value in self.mass if value > 0.0), default=math.inf)

    def find(self, target: float) -> int:
        """The slot on which a target falls."""
        lowered = min(target, math.nextafter(self.total(), 0.0))
        return self._find(self.mass, float(lowered))

    def _sum(self, mass) -> float:
        if len(mass) == 1:
            return mass[0]
        half = len(mass) // 2
        return self._sum(mass[:half]) + self._sum(mass[half:])

    def _find(self, mass, target) -> int:
        if len(mass) == 1:
            return 0
        half = len(mass) // 2
        left, right = self._sum(mass[:half]), self._sum(mass[half:])
        if right > 0.0 and target >= left:
            return half + self._find(mass[half:], target - left)
        return self._find(mass[:half], target)


def bits(values) -> bytes:
    """The bytes of float64 values: equal only when equal to the last bit, signs of zero included."""
    return np.asarray(values, np.float64).tobytes()


def snapshot(index) -> bytes:
    """Everything an index says about its content, as bytes."""
    return bits([index.total, index.minimum]) + bits(index.get(np.arange(index.capacity)))


def filled(index, mass):
    """`index` after giving its first slots the masses."""
    index.set(np.arange(len(mass)), np.asarray(mass, np.float64))
    return index


def boundary_targets(index) -> np.ndarray:
    """Targets at, just below and just above every prefix sum, the ends and beyond included."""
    prefix = np.cumsum(index.get(np.arange(index.capacity)))
    at = np.concatenate([[0.0, index.total, math.inf], prefix])
    return np.concatenate([at, np.nextafter(at, 0.0), np.nextafter(at, math.inf)])


def assert_drawable(index, targets) -> np.ndarray:
    """The slots found: each in range, above zero mass, and returned with its own mass."""
    slots, mass = index.find_prefix(targets)
    assert slots.dtype == np.int64 and mass.dtype == np.float64
    assert ((slots >= 0) & (slots < index.capacity)).all()
    assert (mass > 0.0).all()
    assert bits(mass) == bits(index.get(slots))
    return slots


class IndexMachine(RuleBasedStateMachine):
    """Random operations on an index and on the oracle; the two factories are set by the test."""

    new_index = None
    oracle_type = None

    @initialize(capacity=st.sampled_from(SMALL_CAPACITIES))
    def start_empty(self, capacity):
        self.index = type(self).new_index(capacity)
        self.oracle = type(self).oracle_type(capacity)

    @rule(rows=st.lists(st.tuples(st.integers(0, 10**6), masses), max_size=20))
    def set_masses(self, rows):
        slots = np.array([slot % self.index.capacity for slot, _ in rows], np.int64)
        mass = np.array([value for _, value in rows], np.float64)
        self.index.set(slots, mass)
        self.oracle.set(slots, mass)

    @rule(bad=st.sampled_from(BAD_MASSES), good=masses)
    def refuse_a_bad_mass(self, bad, good):
        with pytest.raises(ValueError, match="row 1"):
            self.index.set(np.array([0, 0]), np.array([good, bad]))

    @rule(fractions=st.lists(st.floats(0.0, 1.0), max_size=20))
    def find_what_the_oracle_finds(self, fractions):
        if self.index.total == 0.0:
            return
        targets = np.append(np.array(fractions) * self.index.total, boundary_targets(self.index))
        slots = assert_drawable(self.index, targets)
        assert slots.tolist() == [self.oracle.find(target) for target in targets]

    @invariant()
    def equals_the_oracle(self):
        self.index.check()
        assert bits(self.index.total) == bits(self.oracle.total())
        assert bits(self.index.minimum) == bits(self.oracle.minimum())
        held = self.index.get(np.arange(self.index.capacity))
        assert bits(held) == bits(self.oracle.mass[: self.index.capacity])


class IndexConformance:
    """Tests of the `PriorityIndex` contract for the implementation that `new_index` makes."""

    oracle_type = BinaryOracle

    def new_index(self, capacity: int):
        """A new, empty index of the implementation under test."""
        raise NotImplementedError

    # Agreement with the naive oracle

    def test_random_operations_agree_with_the_oracle_to_the_last_bit(self):
        factories = {"new_index": staticmethod(self.new_index), "oracle_type": self.oracle_type}
        machine = type("Machine", (IndexMachine,), factories)
        run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=25, deadline=None))

    @given(st.lists(sparse_masses, min_size=1, max_size=40))
    @quick
    def test_a_slot_of_zero_mass_is_never_returned(self, mass):
        index = filled(self.new_index(len(mass)), mass)
        if index.total > 0.0:
            assert_drawable(index, boundary_targets(index))

    @given(st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any))
    @quick
    def test_with_whole_numbers_the_slot_follows_the_prefix_sums_exactly(self, mass):
        index = filled(self.new_index(len(mass)), mass)
        targets = np.arange(0.0, sum(mass), 0.5)
        expected = np.searchsorted(np.cumsum(mass), targets, side="right")
        assert assert_drawable(index, targets).tolist() == expected.tolist()

    def test_a_hundred_thousand_updates_over_twelve_orders_leave_no_drift(self):
        rng = np.random.default_rng(1)
        index = self.new_index(3000)
        for _ in range(200):
            index.set(rng.integers(0, 3000, 512), 10.0 ** rng.uniform(-6, 6, 512))
        fresh = filled(self.new_index(3000), index.get(np.arange(3000)))
        assert snapshot(index) == snapshot(fresh)
        assert index.total == pytest.approx(math.fsum(index.get(np.arange(3000))), rel=1e-12)
        index.check()

    def test_slots_are_drawn_in_proportion_to_their_mass(self):
        rng = np.random.default_rng(2)
        mass = rng.exponential(size=300) ** 0.6 + 0.05
        mass[rng.integers(0, 300, 60)] = 0.0
        index = filled(self.new_index(300), mass)
        counts = np.zeros(300)
        for _ in range(10):
            targets = rng.random(100_000) * index.total
            counts += np.bincount(assert_drawable(index, targets), minlength=300)
        drawn = mass > 0.0
        expected = 1e6 * mass[drawn] / mass.sum()
        assert stats.chisquare(counts[drawn], expected).pvalue > 1e-3

    # Corners of drawing

    def test_the_newest_item_can_be_drawn(self):
        index = filled(self.new_index(8), [1.0, 1.0])
        targets = np.random.default_rng(3).random(1000) * index.total
        assert set(assert_drawable(index, targets)) == {0, 1}

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_a_single_item_is_always_drawn(self, capacity):
        for slot in {0, capacity // 2, capacity - 1}:
            index = self.new_index(capacity)
            index.set(np.array([slot]), np.array([0.37]))
            targets = [0.0, 0.1, math.nextafter(0.37, 0), 0.37, 1.0, math.inf]
            assert set(assert_drawable(index, np.array(targets))) == {slot}

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_a_target_at_or_beyond_the_total_falls_on_the_last_item(self, capacity):
        rng = np.random.default_rng(capacity)
        index = filled(self.new_index(capacity), rng.random(capacity) + 0.1)
        total = index.total
        around = np.array([total, math.nextafter(total, 0), math.nextafter(total, math.inf)])
        assert assert_drawable(index, around).tolist() == [capacity - 1] * 3

    @pytest.mark.parametrize("capacity", [3, 4, 8])
    def test_a_target_rounded_beyond_its_slot_does_not_fall_on_the_empty_one_after_it(self, capacity):
        # The total is rounded up to 1 + 4 eps. Less the first mass, the target just below it is
        # rounded up as well, to the whole of slot 2.
        index = filled(self.new_index(capacity), [1.5 * EPS, 0.0, 1.0 + 2 * EPS])
        assert index.total == 1.0 + 4 * EPS
        assert assert_drawable(index, np.array([1.0 + 3 * EPS])).tolist() == [2]

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_every_prefix_boundary_of_any_capacity_falls_on_a_valid_slot(self, capacity):
        rng = np.random.default_rng(capacity)
        mass = 10.0 ** rng.uniform(-6, 6, capacity)
        mass[rng.random(capacity) < 0.3] = 0.0
        mass[rng.integers(capacity)] = 1.0
        index = filled(self.new_index(capacity), mass)
        assert_drawable(index, boundary_targets(index))

    def test_an_empty_index_refuses_to_draw(self):
        index = self.new_index(5)
        assert bits([index.total, index.minimum]) == bits([0.0, math.inf])
        with pytest.raises(ValueError, match="empty"):
            index.find_prefix(np.array([0.0]))
        filled(index, [1.0, 2.0]).set(np.array([0, 1]), np.zeros(2))
        assert bits([index.total, index.minimum]) == bits([0.0, math.inf])
        with pytest.raises(ValueError, match="empty"):
            index.find_prefix(np.array([0.0]))

    @pytest.mark.parametrize("bad", [math.nan, -1.0, -TINY, -math.inf])
    def test_a_bad_target_is_refused_by_row(self, bad):
        index = filled(self.new_index(4), [1.0, 2.0, 3.0, 4.0])
        with pytest.raises(ValueError, match=r"row 2: target .* must be >= 0"):
            index.find_prefix(np.array([0.0, 1.0, bad, bad]))

    # Corners of updating

    def test_one_nan_among_512_is_refused_by_row_and_changes_nothing(self):
        rng = np.random.default_rng(4)
        index = filled(self.new_index(4096), rng.random(4096))
        before = snapshot(index)
        slots, mass = rng.integers(0, 4096, 512), rng.random(512)
        mass[37] = math.nan
        with pytest.raises(ValueError, match=rf"row 37: mass nan for slot {slots[37]} .*finite"):
            index.set(slots, mass)
        assert snapshot(index) == before
        index.check()

    @pytest.mark.parametrize("bad", BAD_MASSES)
    def test_a_negative_or_infinite_mass_is_refused_at_insert_and_at_update(self, bad):
        for index in (self.new_index(3), filled(self.new_index(3), [1.0, 2.0, 3.0])):
            before = snapshot(index)
            with pytest.raises(ValueError, match=r"row 1: mass .* for slot 2 .*finite and >= 0"):
                index.set(np.array([0, 2]), np.array([4.0, bad]))
            assert snapshot(index) == before

    @pytest.mark.parametrize("mass", [0.0, -0.0, TINY, 1e-310, 1e300])
    def test_zero_and_denormal_masses_are_kept_at_insert_and_at_update(self, mass):
        for index in (self.new_index(3), filled(self.new_index(3), [0.0, 2.0])):
            index.set(np.array([1]), np.array([mass]))
            assert bits(index.get(np.array([1]))) == bits([abs(mass)])
            assert bits(index.total) == bits(abs(mass))
            assert index.minimum == (mass if mass > 0.0 else math.inf)
            index.check()

    @pytest.mark.parametrize("slot", [-1, 6, 7, 8, 2**62, -(2**63)])
    def test_a_slot_out_of_range_is_refused_by_row(self, slot):
        index = filled(self.new_index(6), np.arange(6.0))
        before = snapshot(index)
        slots = np.array([0, slot])
        message = f"row 1: slot {slot} is out of range; a slot must be >= 0 and < 6"
        with pytest.raises(ValueError, match=message):
            index.set(slots, np.ones(2))
        with pytest.raises(ValueError, match=message):
            index.get(slots)
        assert snapshot(index) == before

    def test_of_duplicate_slots_the_last_wins_in_sum_and_minimum(self):
        index = self.new_index(8)
        index.set(np.array([5, 5]), np.array([1.0, 9.0]))
        assert index.total == index.minimum == index.get(np.array([5]))[0] == 9.0
        index.set(np.array([5, 2, 5, 2]), np.array([1.0, 7.0, 3.0, 0.0]))
        assert index.total == index.minimum == 3.0

    def test_the_minimum_is_of_the_filled_slots_only(self):
        index = filled(self.new_index(8), [3.0, 2.0, 5.0])
        assert index.minimum == 2.0
        index.set(np.array([1]), np.array([0.0]))
        assert index.minimum == 3.0

    # Arguments

    def test_an_empty_batch_does_nothing(self):
        index = filled(self.new_index(4), [1.0, 2.0])
        before = snapshot(index)
        for empty in (np.array([], np.int64), []):
            index.set(empty, np.array([]))
            assert index.get(empty).shape == (0,)
            slots, mass = index.find_prefix(np.array([]))
            assert (slots.shape, slots.dtype, mass.shape) == ((0,), np.int64, (0,))
        assert snapshot(index) == before

    def test_strided_read_only_and_narrower_arrays_are_converted(self):
        index, expected = self.new_index(8), filled(self.new_index(8), [0.5, 0.0, 1.5, 0.0, 2.5])
        slots, mass = np.arange(6, dtype=np.int32)[::2], np.arange(0.5, 3.5, 0.5, np.float32)[::2]
        slots.flags.writeable = False
        index.set(slots, mass)
        assert snapshot(index) == snapshot(expected)
        assert index.get(slots.astype(">i2")).tolist() == mass.tolist()
        targets = np.array([0.0, 9.0, 1.0, 9.0, 4.0])[::2]
        targets.flags.writeable = False
        assert index.find_prefix(targets)[0].tolist() == [0, 2, 4]
        assert index.find_prefix([0, 1, 4])[0].tolist() == [0, 2, 4]

    def test_arguments_and_results_are_not_shared_with_the_index(self):
        index, slots, mass = self.new_index(2), np.array([0, 1]), np.array([1.0, 2.0])
        index.set(slots, mass)
        before = snapshot(index)
        found = index.find_prefix(np.array([0.0, 1.0]))
        for array in (slots, mass, index.get(slots), *found):
            array[:] = 0
        assert snapshot(index) == before

    @pytest.mark.parametrize("slots", [[0.0], [True], ["0"], [2**63], [None]])
    def test_slots_that_are_not_int64_are_refused(self, slots):
        index = self.new_index(4)
        with pytest.raises(TypeError, match="slots must be int64"):
            index.set(np.array(slots), np.ones(1))
        with pytest.raises(TypeError, match="slots must be int64"):
            index.get(np.array(slots))

    @pytest.mark.parametrize("values", [[1j], [True], ["1"], [None]])
    def test_masses_and_targets_that_are_not_float64_are_refused(self, values):
        index = filled(self.new_index(4), [1.0])
        with pytest.raises(TypeError, match="mass must be float64"):
            index.set(np.array([0]), np.array(values))
        with pytest.raises(TypeError, match="targets must be float64"):
            index.find_prefix(np.array(values))

    def test_arrays_of_the_wrong_shape_or_length_are_refused(self):
        index = filled(self.new_index(4), [1.0])
        for wrong in (np.int64(0), np.zeros((1, 1), np.int64)):
            for call in (index.get, index.find_prefix, lambda a: index.set(a, np.ones(1))):
                with pytest.raises(ValueError, match="one-dimensional"):
                    call(wrong)
        with pytest.raises(ValueError, match="one length, got 2 and 3"):
            index.set(np.array([0, 1]), np.ones(3))

    def test_an_impossible_capacity_is_refused(self):
        for capacity in (0, -1, 2**62, 2**70):
            with pytest.raises(ValueError, match="capacity must be from 1"):
                self.new_index(capacity)
        with pytest.raises(TypeError):
            self.new_index(2.5)
