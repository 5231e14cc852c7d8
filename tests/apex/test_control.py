"""What the learner asks of ranks and what they acknowledge, as JSON and back, and what of it is refused."""

import errno

import numpy as np
import pytest

from apex.control import (
    ACKS,
    REQUESTS,
    CheckpointAck,
    CheckpointRequest,
    EpsilonAck,
    EpsilonAssignment,
    NoMoreIntake,
    as_json,
)
from apex.transport.wire import CONTROL_NBYTES, CONTROLS, decode, encode

RNG = np.random.default_rng(3).bit_generator.state["state"] | {"has_uint32": 1, "uinteger": 2**32 - 1}
MESSAGES = [
    CheckpointRequest(3, 2**40, 2), EpsilonAssignment(1, 2), NoMoreIntake(), EpsilonAck(),
    CheckpointAck(
        3, errno.ENOSPC, {"counters": {"episodes": 1.0, "loss": -np.inf}, "rng": RNG, "next_steps": 2**50}
    ),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message):
    text = encode(as_json(message))
    arrived = decode(text)
    kind = arrived.pop("kind")
    assert len(text) < CONTROL_NBYTES / 32 and message.fault() is None
    assert {**REQUESTS, **ACKS}[kind](**arrived) == message


def test_every_message_has_its_line_in_the_table_with_its_fields():
    for kind, cls in {**REQUESTS, **ACKS}.items():
        assert tuple(CONTROLS[kind].fields) == cls._fields


@pytest.mark.parametrize("message", [
    CheckpointRequest(0, 0, 0), CheckpointRequest(3, -1, 0), CheckpointRequest(3, 0, 3),
    CheckpointRequest(3, 0, -1),
    CheckpointRequest(2**63, 0, 0), CheckpointAck(1, -1, {}), CheckpointAck(1, 4096, {}),
    EpsilonAssignment(2, 2), EpsilonAssignment(-1, 2),
])  # fmt: skip
def test_values_that_make_no_sense_are_named(message):
    assert message.fault()


@pytest.mark.parametrize("text", [b"", b"7", b"[]", b"null", b"{", b"[" * 60_000, b"\xff", b"9" * 5000])
def test_what_is_no_object_of_json_is_no_control_message(text):
    assert decode(np.frombuffer(text, np.uint8)) is None
