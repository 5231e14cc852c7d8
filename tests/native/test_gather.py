"""gather_rows against the obvious loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import native


def gather(base: np.ndarray, offset: np.ndarray, row_bytes: int) -> np.ndarray:
    out = np.full(len(offset) * row_bytes + 8, 0xEE, np.uint8)
    native.library().gather_rows(base.ctypes.data, offset.ctypes.data, len(offset), row_bytes, out.ctypes.data)
    assert (out[len(offset) * row_bytes :] == 0xEE).all(), "wrote past the end"
    return out[: len(offset) * row_bytes]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 70), st.lists(st.integers(-1, 30), max_size=40), st.integers(0, 2**32 - 1))
def test_rows_are_copied_in_order_and_negative_offsets_give_zeros(row_bytes, offsets, seed):
    base = np.random.default_rng(seed).integers(1, 256, 30 + row_bytes, dtype=np.uint8)
    expected = [bytes(row_bytes) if o < 0 else base[o : o + row_bytes].tobytes() for o in offsets]
    assert gather(base, np.array(offsets, np.int64), row_bytes).tobytes() == b"".join(expected)


def test_offsets_beyond_four_gigabytes_are_reached():
    try:
        base = np.zeros(2**32 + 4096, np.uint8)
    except MemoryError:
        pytest.skip("needs 4 GiB of address space")
    base[-4:] = (1, 2, 3, 4)
    assert gather(base, np.array([len(base) - 4], np.int64), 4).tolist() == [1, 2, 3, 4]
