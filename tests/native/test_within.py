"""`native.within` against NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import native

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(max_examples=300, deadline=None)
@given(
    arrays.arrays(st.sampled_from([np.int16, np.int32]), st.integers(0, 70)),
    st.integers(-40_000, 40_000),
    st.integers(-40_000, 40_000),
)
def test_whole_numbers_are_within_their_bounds_as_numpy_says(array, low, high):
    assert native.within(array, low, high) == bool(((array >= low) & (array <= high)).all())


@settings(max_examples=300, deadline=None)
@given(arrays.arrays(np.float32, st.integers(0, 70), elements=FLOATS), FLOATS, FLOATS)
def test_numbers_are_within_their_bounds_as_numpy_says_and_nan_never_is(array, low, high):
    wide = array.astype(np.float64)
    assert native.within(array, low, high) == bool(((wide >= low) & (wide <= high)).all())


def test_an_array_of_any_shape_is_looked_at_whole():
    array = np.zeros((50, 4), np.int16)
    assert native.within(array, 0, 0)
    array[-1, -1] = 1
    assert not native.within(array, 0, 0)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4), np.zeros(4, np.int64), np.zeros(4, np.uint32), np.zeros(4, np.uint16),
        np.zeros(8, np.float32)[::2], [1, 2],
        np.zeros(9, np.uint8)[1:].view(np.float32),
    ],
    ids=["float64", "int64", "uint32", "uint16", "strided", "list", "not aligned"],
)  # fmt: skip
def test_what_c_cannot_read_is_refused(array):
    with pytest.raises(native.Unfit):
        native.within(array, 0.0, 1.0)
