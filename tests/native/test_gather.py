"""gather_rows against the obvious loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import native


def gather(base: np.ndarray, offset: np.ndarray, row_bytes: int) -> np.ndarray:
    out = np.full(len(offset) * row_bytes + 8, 0xEE, np.uint8)
    native.gather_rows(base, offset, row_bytes, out)
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


def test_frames_of_any_shape_are_rows():
    base, out = np.arange(24, dtype=np.uint8).reshape(4, 3, 2), np.empty((2, 3, 2), np.uint8)
    native.gather_rows(base, np.array([18, 6]), 6, out)
    assert (out == base[[3, 1]]).all()


@pytest.mark.parametrize(
    ("offsets", "row_bytes", "row"),
    [
        ([0, 7, 6], 4, 1), ([0, 6, 7], 4, 2), ([2**63 - 1], 4, 0), ([0], 11, 0), ([0], 2**62, 1),
        ([0] * 5, 4, 5), ([-1] * 5, 4, 5), ([0], -1, 1), ([0], -(2**62), 1), ([10], 1, 0),
    ],
)  # fmt: skip
def test_a_row_outside_of_base_or_out_is_refused_and_nothing_is_written(offsets, row_bytes, row):
    base, out = np.ones(10, np.uint8), np.full(16, 7, np.uint8)
    with pytest.raises(native.Refused) as refused:
        native.gather_rows(base, np.array(offsets, np.int64), row_bytes, out)
    assert refused.value.args == (row,)
    assert (out == 7).all()


def test_the_edges_are_inside():
    assert gather(np.arange(10, dtype=np.uint8), np.array([0, 6, -(2**63)]), 4).tolist() == [
        0,
        1,
        2,
        3,
        6,
        7,
        8,
        9,
        0,
        0,
        0,
        0,
    ]
    assert gather(np.empty(0, np.uint8), np.array([], np.int64), 4).size == 0
    assert gather(np.empty(0, np.uint8), np.array([-1]), 4).tolist() == [0] * 4


def test_unfit_arrays_are_told():
    base, offset, out = np.ones(20, np.uint8), np.zeros(2, np.int64), np.zeros(8, np.uint8)
    sealed = np.zeros(8, np.uint8)
    sealed.flags.writeable = False
    for arguments in (
        (base[::2], offset, 4, out), (base, offset.astype(np.int32), 4, out),
        (base, offset.reshape(1, 2), 4, out),
        (base, offset.astype(">i8"), 4, out), (base, [0, 0], 4, out), (base, offset, 4, sealed),
        (base, offset, 4, out[::-1]),
        (None, offset, 4, out),
    ):  # fmt: skip
        with pytest.raises(native.Unfit):
            native.gather_rows(*arguments)
    with pytest.raises(TypeError):
        native.gather_rows(base, offset, "4", out)
    assert (out == 0).all()


def test_an_output_that_shares_memory_with_the_offsets_or_the_base_is_unfit():
    base, offsets = np.full(4096, 0x41, np.uint8), np.zeros(1024, np.int64)
    with pytest.raises(native.Unfit, match="share memory"):
        native.gather_rows(base, offsets[:512], 8, offsets[1:513].view(np.uint8))
    with pytest.raises(native.Unfit, match="share memory"):
        native.gather_rows(base, offsets[:2], 8, base[:16])
