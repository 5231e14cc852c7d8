"""States: arrays and plain values part and join again, and what does not fit is named."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex import seeds
from apex.metrics import Counters
from apex.state import Unfit, fill, is_count, join, list_of, require, split
from learner.importance import ImportanceWeights

NUMBERS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
PLAIN = NUMBERS | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
ARRAYS = st.integers(0, 5).map(np.arange)
NAMES = st.text("abc_", min_size=1, max_size=4)
FLAT = st.dictionaries(NAMES, PLAIN | ARRAYS, max_size=4)
STATES = st.recursive(
    FLAT, lambda inner: st.dictionaries(NAMES, PLAIN | ARRAYS | inner, max_size=3), max_leaves=8
)


def same(one, other):
    if isinstance(one, dict):
        both = isinstance(other, dict) and one.keys() == other.keys()
        return both and all(same(one[name], other[name]) for name in one)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


@given(STATES)
def test_what_is_split_is_joined_again_through_json(state):
    values, arrays = split(state)
    assert all(isinstance(array, np.ndarray) for array in arrays.values())
    assert same(join(json.loads(json.dumps(values)), arrays), state)


@pytest.mark.parametrize(
    "held", [None, 3, [1.0, 2.0], np.zeros(3), np.zeros(2, np.float32), np.zeros((1, 2))]
)
def test_an_array_of_another_kind_or_shape_is_refused_and_nothing_is_filled(held):
    array = np.ones(2)
    with pytest.raises(Unfit, match=r"no usable 'x', float64\[2\]"):
        fill(array, {} if held is None else {"x": held}, "x")
    assert (array == 1).all()
    fill(array, {"x": np.array([2.0, 3.0])}, "x")
    assert array.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    "state, named",
    [
        ([], "values"), ({}, "a"), ({"a": -1, "b": {}}, "a"), ({"a": 1}, "b"),
        ({"a": 1, "b": {"c": [True]}}, "b/c"), ({"a": 1, "b": 3}, "b"),
    ],
)  # fmt: skip
def test_the_first_value_that_does_not_fit_is_named_by_its_path(state, named):
    checks = {"a": is_count, "b": {"c": list_of(is_count)}}
    with pytest.raises(Unfit, match=f"no usable '{named}'"):
        require(state, checks)
    require({"a": 1, "b": {"c": [2]}, "more": None}, checks)


def test_generators_and_counters_go_on_from_their_states():
    rng, other = seeds.generator(1, "actor"), seeds.generator(2, "actor")
    rng.integers(5, dtype=np.int32)  # leaves half a word behind
    seeds.load_state_dict(other, json.loads(json.dumps(seeds.state_dict(rng))))
    assert rng.random(3).tolist() == other.random(3).tolist()
    assert rng.integers(5, dtype=np.int32) == other.integers(5, dtype=np.int32)
    counters, again = Counters("actor"), Counters("actor")
    counters.add("episodes", 3)
    again.load_state_dict(counters.state_dict())
    assert again["episodes"] == 3
    right = counters.state_dict()
    for wrong in ({"episodes": 1.0}, right | {"episodes": -1.0}, right | {"episodes": "x"}):
        with pytest.raises((KeyError, ValueError)):
            again.load_state_dict(wrong)
    assert again["episodes"] == 3, "nothing of it was taken"


def test_smallest_probabilities_are_those_of_as_many_replay_ranks():
    weights = ImportanceWeights(0.4, "global", 2)
    weights.load_state_dict({"smallest": [0.5, 0.25]})
    assert weights.state_dict() == {"smallest": [0.5, 0.25]}
    weights.load_state_dict({"smallest": [0.125]})
    assert weights.state_dict() == {"smallest": [0.5, 0.25]}
