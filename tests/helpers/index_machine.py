"""Random operations on a priority index and on its oracle, side by side."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from index_oracles import stored
from index_suite import BAD_MASSES, bits, boundary_targets, fitting, masses

from replay_rank.strata import Strata

few_masses = st.lists(masses, max_size=20)


class IndexMachine(RuleBasedStateMachine):
    """`suite`, set by the test, makes the index and the oracle and compares them."""

    suite = None

    @initialize(data=st.data())
    def start_empty(self, data):
        capacity = data.draw(st.sampled_from(self.suite.small_capacities))
        self.index, self.oracle = self.suite.new_index(capacity), self.suite.new_oracle(capacity)
        self.sums = None

    @rule(rows=st.lists(st.tuples(st.integers(0, 10**6), masses), max_size=20))
    def set_masses(self, rows):
        slots = np.array([slot % self.index.capacity for slot, _ in rows], np.int64)
        mass = fitting(self.index, [value for _, value in rows])
        self.sums = self.index.set(slots, mass)
        self.expect(slots, mass)

    @rule(first=st.integers(0, 10**6), mass=few_masses)
    def set_a_range(self, first, mass):
        first, mass = first % self.index.capacity, fitting(self.index, mass)[: self.index.capacity]
        self.sums = self.index.set_range(first, mass)
        self.expect((first + np.arange(mass.size)) % self.index.capacity, mass)

    @rule()
    def save_and_load_into_a_new_index(self):
        saved = self.index.save()
        self.index = self.suite.new_index(self.index.capacity)
        self.sums = self.index.load(saved)
        assert bits(self.index.save()) == bits(saved)

    @rule(mass=few_masses)
    def load_other_masses(self, mass):
        whole = np.zeros(self.index.capacity)
        whole[: len(mass)] = fitting(self.index, mass)[: whole.size]
        self.sums = self.index.load(whole)
        self.expect(np.arange(whole.size), whole)

    @rule(bad=st.sampled_from(BAD_MASSES), good=masses, slot=st.integers(0, 10**6))
    def refuse_a_bad_mass(self, bad, good, slot):
        slot, pair = slot % self.index.capacity, np.append(fitting(self.index, [good]), bad)
        with pytest.raises(ValueError, match="row 1"):
            self.index.set(np.array([slot, slot]), pair)
        if self.index.capacity > 1:
            with pytest.raises(ValueError, match="row 1"):
                self.index.set_range(slot, pair)

    @rule(fractions=st.lists(st.floats(0.0, 1.0), max_size=20))
    def find_what_the_oracle_finds(self, fractions):
        if self.index.total > 0.0:
            targets = np.append(np.array(fractions) * self.index.total, boundary_targets(self.index))
            self.suite.assert_finds(self.index, self.oracle, targets)

    @rule(k=st.integers(1, 40), seed=st.integers(0, 2**64 - 1))
    def draw_what_is_found(self, k, seed):
        if self.index.total > 0.0:
            slots, mass, _ = self.index.draw(Strata(seed), k)
            found, found_mass = self.index.find_prefix(Strata(seed).targets(k, self.index.total))
            assert slots.tolist() == found.tolist() and bits(mass) == bits(found_mass)

    @invariant()
    def equals_the_oracle(self):
        self.suite.assert_equals(self.index, self.oracle, self.sums)

    def expect(self, slots, mass):
        """Let the oracle hold what the leaves of the index must hold."""
        self.oracle.set(slots, stored(mass, self.index.leaf_dtype))
