"""The byte layout of messages: aligned, apart from each other, and read without a copy."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex.config import from_tables
from apex.schema import (
    EnvSpec,
    Layout,
    aligned_bytes,
    frame_rows,
    intake_layout,
    intake_nbytes,
    limits,
    priority_layout,
    sample_layout,
    weight_header,
    weight_layout,
)

PONG = EnvSpec((84, 84), "uint8", 4, 6, 4)
CARTPOLE = EnvSpec((4,), "float32", 1, 2)
LAYOUTS = {
    "intake": intake_layout(PONG, 50, 3),
    "intake of vectors": intake_layout(CARTPOLE, 7, 1),
    "sample": sample_layout(PONG, 32),
    "priorities": priority_layout(33),
    "weights": weight_layout(1001),
}

fields = st.lists(
    st.tuples(st.sampled_from(["u1", "i2", "i4", "f4", "i8", "f8"]), st.lists(st.integers(1, 5), max_size=3)),
    min_size=1,
    max_size=8,
)


def check_layout(layout):
    """Fields start on cache lines, in order, do not overlap and end inside the message."""
    end = 0
    for field in layout.fields.values():
        assert field.offset % 64 == 0 and field.offset >= end
        assert field.nbytes == math.prod(field.shape) * field.dtype.itemsize
        end = field.offset + field.nbytes
    assert end <= layout.nbytes < end + 64


@settings(max_examples=60, deadline=None)
@given(given_fields=fields, lead=st.sampled_from([(), (1,), (3,)]))
def test_what_is_written_through_views_is_read_through_other_views_and_overlaps_nothing(given_fields, lead):
    layout = Layout(*((f"f{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(given_fields)))
    check_layout(layout)
    buffer = aligned_bytes(*lead, layout.nbytes)
    for value, view in enumerate(layout.views(buffer).values(), start=1):
        view[...] = value
    copied = np.frombuffer(buffer.tobytes(), np.uint8).reshape(buffer.shape)
    for value, ((name, view), field) in enumerate(
        zip(layout.views(copied).items(), layout.fields.values()), start=1
    ):
        assert view.shape == lead + field.shape and view.dtype == field.dtype, name
        assert (view == value).all(), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_message_is_aligned_and_its_fields_are_apart(name):
    check_layout(LAYOUTS[name])


def test_rows_of_a_ring_are_the_messages_received_into_them():
    layout = LAYOUTS["intake"]
    ring = aligned_bytes(3, layout.nbytes)
    message = layout.views(ring[1])
    message["action"][:] = np.arange(50)
    message["frames"][7] = 9
    views = layout.views(ring)
    assert views["action"][1].tolist() == list(range(50)) and not views["action"][[0, 2]].any()
    assert (views["frames"][1, 7] == 9).all() and views["frames"].sum() == 9 * 84 * 84


@pytest.mark.parametrize(
    "change", [lambda b: b[:-1], lambda b: b.view(np.int8), lambda b: np.zeros((len(b), 2), np.uint8)[:, 0]]
)
def test_a_buffer_of_another_length_or_type_or_with_gaps_is_refused(change):
    layout = LAYOUTS["priorities"]
    with pytest.raises(ValueError, match=f"contiguous uint8.*{layout.nbytes}"):
        layout.views(change(aligned_bytes(layout.nbytes)))


@pytest.mark.parametrize("shape", [(1,), (63,), (5, 64), (2, 7)])
def test_buffers_start_on_a_cache_line_and_are_zero(shape):
    buffer = aligned_bytes(*shape)
    assert buffer.shape == shape and buffer.__array_interface__["data"][0] % 64 == 0 and not buffer.any()


def test_an_observation_is_a_stack_of_frames():
    assert PONG.observation_shape == (4, 84, 84) and PONG.frame_nbytes == 7056
    assert CARTPOLE.observation_shape == (1, 4) and CARTPOLE.frame_nbytes == 16


def test_an_intake_batch_carries_only_the_frames_used():
    layout = LAYOUTS["intake"]
    lengths = [intake_nbytes(layout, PONG, used) for used in (0, 1, frame_rows(PONG, 50, 3))]
    assert lengths[0] == layout.fields["frames"].offset and lengths[1] - lengths[0] == 7056
    assert layout.nbytes - 64 < lengths[2] <= layout.nbytes
    assert list(layout.fields)[-1] == "frames"


def test_a_batch_of_fifty_atari_transitions_is_a_seventh_of_its_plain_size():
    layout = LAYOUTS["intake"]
    assert intake_nbytes(layout, PONG, 50 + 3 + 4 - 1) < 50 * 2 * 4 * 7056 / 7


def test_the_frame_rows_always_fit_a_carried_window_a_reset_and_one_step():
    for n, stack, batch in itertools.product((1, 3, 64), (1, 4, 8), (1, 2, 50, 4096)):
        rows = frame_rows(EnvSpec((1,), "uint8", stack, 2), batch, n)
        assert rows >= batch + n + stack - 1 and rows >= (n - 1 + stack) + stack + 1


def test_a_batch_with_more_frame_rows_than_a_pointer_can_say_is_refused():
    with pytest.raises(ValueError, match="the most is 32767"):
        intake_layout(PONG, 30_000, 3)
    assert intake_layout(PONG, 29_000, 3).fields["obs_frames"].dtype == np.int16


def test_a_weight_message_tells_its_version_and_learner_steps():
    layout = weight_layout(5)
    message = aligned_bytes(layout.nbytes)
    layout.views(message)["header"][:] = 7, 2**40
    assert weight_header(message) == (7, 2**40)


def test_limits_are_the_sizes_of_the_configured_messages():
    tables = {"learner": {"batch_size": 64, "prefetch": 3}, "actor": {"in_flight": 5}}
    found = limits(from_tables([("test", tables)]), CARTPOLE)
    assert (found.prefetch, found.intake_in_flight) == (3, 5)
    assert found.sample_nbytes == sample_layout(CARTPOLE, 64).nbytes
    assert found.priority_nbytes == priority_layout(64).nbytes
