"""Strangers, messages that are too large, floods, and values that are none, over real sockets of ZeroMQ."""

import random

import pytest
import zmq
from mutations import header, mutate, mutate_frames
from zmq_goes_on import goes_on, heard_all, settle
from zmq_oracle import ACTOR, LARGEST, LEARNER, LIMITS, REPLAY, memory

from apex.refusals import Refusals
from apex.schema import aligned_bytes
from apex.transport.wire import Kind
from apex.transport.zmq_link import Hub, Link, name
from apex.transport.zmq_world import _encoded, _read

INPUTS = 16_000
ROUND = 50  # messages sent before they are read; fewer than a socket takes in unread


def test_strangers_are_refused_whatever_they_call_themselves(ranks, tried):
    tried.least = INPUTS
    rng = random.Random(5)
    with zmq.Context() as context:
        for rank in (LEARNER, REPLAY):
            port = ranks[rank]
            for wrong in [
                None,
                b"r",
                name(b"x" * 16, 3),
                name(b"t" * 15, 3),
                name(b"t" * 16, 77),
                rng.randbytes(255),
            ]:
                stranger = context.socket(zmq.DEALER)
                if wrong is not None:
                    stranger.routing_id = wrong
                stranger.connect(port.wire._hub.endpoint)
                count = INPUTS // 12 + 1
                throw_and_leave(rng, stranger, port, count)
                tried(count)
    goes_on(ranks)


def throw_and_leave(rng: random.Random, stranger, port, count: int) -> None:
    """Send so many messages, each of which is refused; then end the connection, which is counted too."""
    before, sent = port.refused, 0
    while sent < count:
        few = min(ROUND, count - sent)
        for _ in range(few):
            stranger.send_multipart(
                mutate_frames(rng, [header(rng.randrange(1, 20)), rng.randbytes(rng.randint(0, 500))])
            )
        sent += few
        settle(port.wire._hub.receive, lambda sent=sent: heard_all(port, before, sent))
    stranger.close(0)
    settle(port.wire._hub.count_cuts, lambda: heard_all(port, before, count + 1))


@pytest.mark.parametrize("nbytes", [LARGEST + 1000, 16 << 20, 256 << 20], ids=lambda n: f"{n} bytes")
def test_an_oversized_message_costs_its_sender_the_connection_is_counted_and_takes_no_memory(
    ranks, tried, nbytes
):
    tried.least = 4
    before = memory()
    with zmq.Context() as context:
        for rank in (LEARNER, REPLAY):
            port, refused = ranks[rank], ranks[rank].refused
            for frames in ([bytes(nbytes)], [header(Kind.INTAKE), bytes(nbytes)]):
                stranger = context.socket(zmq.DEALER)
                stranger.linger = 0
                stranger.connect(port.wire._hub.endpoint)
                stranger.send_multipart(frames, copy=False)
                tried()
                settle(port.wire._hub.count_cuts, lambda port=port, refused=refused: port.refused > refused)
                refused = port.refused
                stranger.close(0)
    assert memory() - before < nbytes // 2 + (64 << 20)
    goes_on(ranks)


def test_one_that_is_only_a_little_too_large_is_refused_and_keeps_its_connection(ranks, tried):
    tried.least = 3
    replay, sender = ranks[REPLAY], ranks[ACTOR].wire._links[REPLAY].socket
    landing, before = aligned_bytes(LIMITS.intake_nbytes), ranks[REPLAY].refused
    for nbytes in (LIMITS.intake_nbytes + 1, 1 << 20, LARGEST):
        sender.send_multipart([header(Kind.INTAKE), bytes(nbytes)])
        tried()
    settle(lambda: (replay.progress(), replay.poll(landing)), lambda: heard_all(replay, before, 3))
    goes_on(ranks)


def test_a_rank_that_sends_without_end_makes_one_that_does_not_read_take_in_a_bounded_part(tmp_path, tried):
    tried.least = 2000
    context, there = (
        zmq.Context(),
        zmq.Context(),
    )  # as in two processes: what waits at the sender is the sender's
    hub = Hub(context, f"ipc://{tmp_path}/hub", b"t" * 16, [3], Refusals("the hub"), 1 << 20)
    flood = there.socket(zmq.DEALER)
    flood.routing_id, flood.sndhwm, flood.linger = name(b"t" * 16, 3), 1, 0
    flood.connect(hub.endpoint)
    payload, sent = bytes(1 << 19), 0
    while sent < 2000 and flood.poll(500, zmq.POLLOUT):
        flood.send_multipart([header(Kind.INTAKE), payload])
        sent += 1
    tried(2000)
    got = 0
    while hub.socket.poll(500):
        message = hub.receive()
        got += message is not None and hub.payload() is not None
    flood.close(0), hub.close()
    context.destroy(0), there.destroy(0)
    assert sent < 200, "a socket that nobody reads takes in without end"
    assert got == sent, "something was lost"


def test_values_that_are_none_are_refused_while_a_world_starts(tmp_path, tried):
    tried.least = 20_000
    rng = random.Random(6)
    good = [bytes(_encoded(value)) for value in ({"a": [1, 2.5, None, "x"]}, ["ipc:///x/1-0", None, "é"], 17)]
    good += [
        b'{"Path": "/a"}',
        b'{"EnvSpec": {"frame_shape": [4], "frame_dtype": "float32", "stack": 1, "num_actions": 2}}',
    ]
    odd = [
        b"[" * 100_000,
        b"9" * 5000,
        b"NaN",
        b'{"Path": 5}',
        b'{"EnvSpec": 5}',
        b'{"EnvSpec": {"frame_shape": 3}}',
        b'"\xff"',
        b"1e999",
    ]
    with zmq.Context() as context:
        hub = Hub(context, f"ipc://{tmp_path}/hub", b"t" * 16, [1], Refusals("the hub"), 1 << 20)
        link = Link(context, hub.endpoint, b"t" * 16, 1, 0, Refusals("the link"))
        for number in range(20_000):
            payload = rng.choice(odd) if number % 20 == 0 else mutate(rng, rng.choice(good))
            before = hub.refusals.count
            link.socket.send_multipart([header(rng.choice([1, 1, 1, 2])), payload])
            hub.socket.poll(10_000)
            message = hub.receive()
            value = _read(hub, message, 1)
            assert (type(value) is object) == (
                hub.refusals.count == before + 1
            ) and hub.refusals.count - before <= 1
            tried()
        link.send(1, 0, _encoded({"still": "here"}))
        hub.socket.poll(10_000)
        assert _read(hub, hub.receive(), 1) == {"still": "here"}
        hub.close(), link.close()
