"""Updating a priority index of either rule.

`set`, `set_range`, `save` and `load`, and the arguments they take.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from index_oracles import FLOAT32_MAX, FLOAT32_TINY
from index_suite import BAD_MASSES, CAPACITIES, TINY, IndexSuite, bits, filled, held, snapshot, spread

import replay_rank.index
from replay_rank.strata import Strata

OWN = Path(replay_rank.index.__file__).resolve().parents[1]


class Updating(IndexSuite):
    """Tests of what changes an index, and of what is refused."""

    def test_a_million_updates_over_twelve_orders_leave_no_drift(self):
        rng = np.random.default_rng(1)
        index, expected = self.new_index(3000), np.zeros(3000)
        for _ in range(245):
            slots, mass = rng.integers(0, 3000, 4096), spread(rng, 4096)
            index.set(slots, mass)
            expected[slots] = mass
        assert bits(held(index)) == bits(self.stored(expected))
        assert snapshot(index) == snapshot(self.filled(held(index)))
        assert index.total == pytest.approx(math.fsum(self.oracle_of(index).masses()), rel=1e-12)
        index.check()

    def test_an_update_that_is_interrupted_anywhere_is_made_or_not_made_and_the_index_is_whole(self):
        slots, mass = np.array([0, 9, 3, 9]), np.array([5.0, 0.25, 0.0, 3.0])
        before, after = self.filled(np.arange(1.0, 11.0)), self.filled(np.arange(1.0, 11.0))
        after.set(slots, mass)
        expected, interrupted, at = {snapshot(before), snapshot(after)}, True, 0
        while interrupted:
            index = self.filled(np.arange(1.0, 11.0))
            index.draw(Strata(0), 4)
            interrupted, at = interrupt(at, index.set, slots, mass), at + 1
            drawn = index.find_prefix(np.linspace(0.0, index.total, 20))[0]
            assert snapshot(index) in expected
            index.check()
            same = before if snapshot(index) == snapshot(before) else after
            assert (drawn == same.find_prefix(np.linspace(0.0, same.total, 20))[0]).all()
            index.set(slots, mass)
            assert snapshot(index) == snapshot(after)
            index.check()
        assert at > 10 and snapshot(index) == snapshot(after)

    def test_one_nan_among_512_is_refused_by_row_and_changes_nothing(self):
        rng = np.random.default_rng(4)
        index = self.filled(rng.random(4096))
        slots, mass = rng.integers(0, 4096, 512), rng.random(512)
        mass[37] = math.nan
        self.assert_refused(index, rf"row 37: mass nan for slot {slots[37]} .*finite", index.set, slots, mass)

    @pytest.mark.parametrize("bad", BAD_MASSES)
    def test_a_negative_or_infinite_mass_is_refused_at_insert_and_at_update(self, bad):
        for index in (self.new_index(3), self.filled([1.0, 2.0, 3.0])):
            message = r"row 1: mass .* for slot 2 .*finite and >= 0"
            self.assert_refused(index, message, index.set, np.array([0, 2]), np.array([4.0, bad]))
            self.assert_refused(index, message, index.set_range, 1, np.array([4.0, bad]))
            self.assert_refused(index, r"row 1: mass .* for slot 1 .*", index.load, np.array([4.0, bad, 1.0]))

    @pytest.mark.parametrize("mass", [0.0, -0.0, TINY, 1e-310, 1e-60, 0.1, 1.0 + 2.0**-24, 1e300])
    def test_zero_denormal_and_huge_masses_are_kept_at_insert_and_at_update(self, mass):
        if not self.fits(mass):
            return
        for index in (self.new_index(3), self.filled([0.0, 2.0], capacity=3)):
            sums = index.set(np.array([1]), np.array([mass]))
            assert bits(index.get(np.array([1]))) == bits(self.stored([mass]))
            self.assert_equals(index, self.oracle_of(index), sums)
            assert (index.total > 0.0) == (mass > 0.0)

    def test_a_mass_beyond_the_largest_leaf_is_refused_by_row(self):
        index = self.filled([1.0, 2.0, 3.0])
        if index.leaf_dtype == np.float64:
            return
        for mass in (math.nextafter(FLOAT32_MAX, math.inf), 1e39, 1e300):
            message = r"row 1: mass .* for slot 2 .*finite and >= 0 and <= 3.40282347e\+38"
            self.assert_refused(index, message, index.set, np.array([0, 2]), np.array([4.0, mass]))
            self.assert_refused(index, message, index.set_range, 1, np.array([4.0, mass]))
        index.set(np.array([0, 1]), np.array([FLOAT32_MAX, TINY]))
        assert held(index).tolist() == [FLOAT32_MAX, FLOAT32_TINY, 3.0]

    @pytest.mark.parametrize("slot", [-1, 6, 7, 8, 2**62, -(2**63)])
    def test_a_slot_out_of_range_is_refused_by_row(self, slot):
        index, slots = self.filled(np.arange(6.0)), np.array([0, slot])
        message = f"row 1: slot {slot} is out of range; a slot must be >= 0 and < 6"
        self.assert_refused(index, message, index.set, slots, np.ones(2))
        self.assert_refused(index, message, index.get, slots)

    def test_of_duplicate_slots_the_last_wins_in_sum_and_minimum(self):
        index = self.new_index(8)
        for slots, mass, expected in [
            ([5, 5], [1.0, 9.0], [0, 0, 0, 0, 0, 9, 0, 0]),
            ([5, 2, 5, 2], [1.0, 7.0, 3.0, 0.0], [0, 0, 0, 0, 0, 3, 0, 0]),
            ([2, 2, 2, 7], [0.0, 0.0, 6.0, 1.0], [0, 0, 6, 0, 0, 3, 0, 1]),
        ]:
            sums = index.set(np.array(slots), np.array(mass))
            assert held(index).tolist() == expected
            self.assert_equals(index, self.oracle_of(index), sums)

    def test_the_minimum_is_of_the_filled_slots_only(self):
        index = self.filled([3.0, 2.0, 5.0], capacity=8)
        self.assert_sums(index, self.oracle_of(index))
        before = index.minimum
        index.set(np.array([1]), np.array([0.0]))
        self.assert_sums(index, self.oracle_of(index))
        assert before != index.minimum > 0.0

    # Ranges, saving and loading

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_a_range_equals_its_slots_wherever_it_wraps_around(self, capacity):
        rng = np.random.default_rng(capacity)
        start = spread(rng, capacity)
        for k in {0, 1, capacity // 2, capacity - 1, capacity}:
            for first in {0, capacity // 2, capacity - 1}:
                index, same = self.filled(start), self.filled(start)
                mass = spread(rng, k) * (rng.random(k) < 0.7)
                sums = index.set_range(first, mass)
                assert sums == same.set((first + np.arange(k)) % capacity, mass)
                assert sums == (index.total, index.minimum)
                assert snapshot(index) == snapshot(same)
                index.check()

    def test_a_bad_mass_of_a_range_is_named_by_its_row_and_the_slot_after_wrapping(self):
        index = self.filled(np.arange(1.0, 7.0))
        mass = np.array([1.0, 2.0, 3.0, math.nan, -1.0])
        self.assert_refused(index, "row 3: mass nan for slot 1 ", index.set_range, 4, mass)

    @pytest.mark.parametrize("first", [-1, 6, 7, 2**62, -(2**63), 2**70])
    def test_a_range_that_starts_out_of_range_is_refused(self, first):
        index = self.filled(np.arange(6.0))
        message = f"first slot {first} is out of range; it must be >= 0 and < 6"
        for mass in (np.ones(2), np.ones(0)):
            self.assert_refused(index, message, index.set_range, first, mass)

    def test_a_range_longer_than_the_index_is_refused(self):
        index = self.filled(np.arange(6.0))
        self.assert_refused(index, "7 masses are too many for 6 slots", index.set_range, 2, np.ones(7))

    def test_a_range_takes_the_arguments_that_set_takes(self):
        index, expected = self.new_index(8), self.filled([0.5, 1.5, 2.5], capacity=8)
        mass = np.arange(0.5, 3.5, 0.5, np.float32)[::2]
        mass.flags.writeable = False
        index.set_range(np.int32(0), mass)
        assert snapshot(index) == snapshot(expected)
        self.assert_refused(index, "integer", index.set_range, 0.0, mass, error=TypeError)
        self.assert_refused(
            index, "mass must be float64", index.set_range, 0, np.array(["1"]), error=TypeError
        )
        for wrong in (1.0, 1, np.float64(1.0), np.array(1.0), np.ones((1, 1))):
            self.assert_refused(index, "one-dimensional", index.set_range, 0, wrong)
        index.set_range(0, [0.5, 1.5, 2.5])
        assert snapshot(index) == snapshot(expected)

    @pytest.mark.parametrize("capacity", CAPACITIES)
    def test_what_is_saved_loads_to_the_last_bit(self, capacity):
        rng = np.random.default_rng(capacity)
        mass = np.where(
            rng.random(capacity) < 0.3, rng.choice([0.0, TINY, 1e-310], capacity), spread(rng, capacity)
        )
        index, other = self.filled(mass), self.filled(spread(rng, capacity))
        saved = index.save()
        assert saved.dtype == np.float64 and bits(saved) == bits(self.stored(mass))
        assert other.load(saved) == (index.total, index.minimum)
        assert snapshot(other) == snapshot(index)
        other.check()
        saved[:] = 0.0
        assert snapshot(other) == snapshot(index)

    @pytest.mark.parametrize("size", [0, 1, 5, 7, 12])
    def test_masses_for_another_number_of_slots_are_not_loaded(self, size):
        index = self.filled(np.arange(6.0))
        self.assert_refused(index, f"each of 6 slots, got {size}", index.load, np.ones(size))


class Arguments(IndexSuite):
    """Tests of shapes, dtypes and options."""

    def test_an_empty_batch_does_nothing(self):
        index = self.filled([1.0, 2.0], capacity=4)
        before = snapshot(index)
        for empty in (np.array([], np.int64), []):
            assert index.set(empty, np.array([])) == (index.total, index.minimum)
            assert index.set_range(3, empty) == (index.total, index.minimum)
            assert index.get(empty).shape == (0,)
            slots, mass = index.find_prefix(np.array([]))
            assert (slots.shape, slots.dtype, mass.shape) == ((0,), np.int64, (0,))
        assert snapshot(index) == before
        assert self.new_index(4).find_prefix(np.array([]))[0].shape == (0,)

    def test_an_empty_array_may_lie_anywhere(self):
        index = self.filled([1.0, 2.0], capacity=4)
        slots, mass = (np.empty(9, np.uint8)[1:].view(dtype)[:0] for dtype in (np.int64, np.float64))
        assert index.set(slots, mass) == index.set_range(3, mass) == (index.total, index.minimum)
        assert index.get(slots).shape == index.find_prefix(mass)[0].shape == (0,)
        index.draw(Strata(0), 0, (slots, mass, mass.copy()))

    def test_strided_read_only_and_narrower_arrays_are_converted(self):
        index, expected = self.new_index(8), self.filled([0.5, 0.0, 1.5, 0.0, 2.5], capacity=8)
        slots, mass = np.arange(6, dtype=np.int32)[::2], np.arange(0.5, 3.5, 0.5, np.float32)[::2]
        slots.flags.writeable = False
        index.set(slots, mass)
        assert snapshot(index) == snapshot(expected)
        assert index.get(slots.astype(">i2")).tolist() == mass.tolist()
        targets = np.array([0.0, 9.0, 1.2, 9.0, 4.0])[::2]
        targets.flags.writeable = False
        found = [self.oracle_of(index).find(target) for target in targets]
        assert len(set(found)) > 1
        assert index.find_prefix(targets)[0].tolist() == found
        assert index.find_prefix([0, 4])[0].tolist() == [found[0], found[2]]

    def test_arguments_and_results_are_not_shared_with_the_index(self):
        index, slots, mass = self.new_index(2), np.array([0, 1]), np.array([1.0, 2.0])
        index.set(slots, mass)
        index.set_range(0, mass)
        before = snapshot(index)
        found = index.find_prefix(np.array([0.0, 1.0]))
        for array in (slots, mass, index.get(slots), index.save(), *found):
            array[:] = 0
        assert snapshot(index) == before

    @pytest.mark.parametrize("slots", [[0.0], [True], ["0"], [2**63], [None]])
    def test_slots_that_are_not_int64_are_refused(self, slots):
        index = self.new_index(4)
        self.assert_refused(
            index, "slots must be int64", index.set, np.array(slots), np.ones(1), error=TypeError
        )
        self.assert_refused(index, "slots must be int64", index.get, np.array(slots), error=TypeError)

    @pytest.mark.parametrize("values", [[1j], [True], ["1"], [None]])
    def test_masses_and_targets_that_are_not_float64_are_refused(self, values):
        index = self.filled([1.0], capacity=4)
        self.assert_refused(
            index, "mass must be float64", index.set, np.array([0]), np.array(values), error=TypeError
        )
        self.assert_refused(index, "mass must be float64", index.load, np.array(values), error=TypeError)
        self.assert_refused(
            index, "targets must be float64", index.find_prefix, np.array(values), error=TypeError
        )

    def test_arrays_of_the_wrong_shape_or_length_are_refused(self):
        index = self.filled([1.0], capacity=4)
        for wrong in (0, np.int64(0), np.array(0), np.zeros((1, 1), np.int64)):
            for call in (index.get, index.find_prefix, index.load, lambda a: index.set(a, np.ones(1))):
                self.assert_refused(index, "one-dimensional", call, wrong)
        self.assert_refused(index, "one length, got 2 and 3", index.set, np.array([0, 1]), np.ones(3))

    def test_an_impossible_capacity_is_refused(self):
        for capacity in (0, -1, 2**62, 2**70):
            with pytest.raises(ValueError, match="capacity must be from 1"):
                self.new_index(capacity)
        with pytest.raises(TypeError):
            self.new_index(2.5)

    @pytest.mark.parametrize("alpha", [math.nan, -1.0, -TINY, math.inf, -math.inf])
    def test_an_impossible_alpha_is_refused(self, alpha):
        with pytest.raises(ValueError, match=f"alpha must be from 0 to 10, got {alpha}"):
            self.new_index(3, alpha=alpha)

    def test_a_device_it_cannot_live_on_is_refused_in_one_line(self):
        limited = not self.new_index(1).on_any_device
        for device in ["cuda:9999", "gpu", "meta"] + ["cuda"] * limited:
            message = f"lives on the cpu, got device '{device}'" if limited else f"device '{device}'"
            with pytest.raises(ValueError, match=message) as refusal:
                self.new_index(3, device=device)
            assert "\n" not in str(refusal.value)

    def test_an_index_says_what_it_is(self):
        index = self.filled([1.0], capacity=5)
        assert index.capacity == 5 and index.device == self.device and index.backend
        assert index.rule in ("proportional", "rank") and index.leaf_dtype in (np.float64, np.float32)
        assert index.nbytes >= 5 * index.leaf_dtype.itemsize
        assert filled(self.new_index(500), [1.0]).nbytes > index.nbytes


def interrupt(at: int, call, *args) -> bool:
    """Call, with Ctrl-C before the ``at``-th instruction of the index's own Python code.

    Return whether there are so many.
    """
    left, outer = at, sys.gettrace()

    def trace(frame, event, _):
        nonlocal left
        if OWN not in Path(frame.f_code.co_filename).parents:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call(*args)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(outer)
    return False
