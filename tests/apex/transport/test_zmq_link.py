"""Messages between two ranks in one process.

What is refused is dropped whole and counted, and changes nothing.
"""

import numpy as np
import pytest
import zmq

from apex.ports import PeerLost
from apex.refusals import Refusals
from apex.transport import zmq_link
from apex.transport.zmq_link import Hub, Link, aligned

TOKEN = bytes(range(16))
HEADER = b"Apex" + (7).to_bytes(4, "little") + (5).to_bytes(8, "little")


@pytest.fixture
def pair(tmp_path):
    """A hub and the link of rank 3 to it, which have met."""
    with zmq.Context() as context:
        hub = Hub(context, f"ipc://{tmp_path}/hub", TOKEN, [3], Refusals("the hub"), 1 << 16)
        link = Link(context, hub.endpoint, TOKEN, 3, 0, Refusals("the link"))
        link.send(1)
        assert hub.socket.poll(5000) and hub.receive() == (3, 1, 0, False)
        yield hub, link
        hub.close(), link.close()


def receive(box, timeout_ms: int = 5000):
    """Wait for something to arrive; return it, None where it was refused."""
    assert box.socket.poll(timeout_ms)
    return box.receive()


@pytest.mark.parametrize("nbytes", [1, 1000, 1 << 16, 10_000_000], ids=lambda nbytes: f"{nbytes} bytes")
def test_a_payload_arrives_unchanged_and_aligned(pair, nbytes):
    hub, link = pair
    sent = np.random.default_rng(0).integers(256, size=nbytes, dtype=np.uint8)
    tracker = hub.send(3, 9, -2, sent, track=True)
    assert receive(link) == (0, 9, -2, True)
    arrived = aligned(link.payload())
    assert np.array_equal(arrived, sent) and arrived.ctypes.data % 8 == 0
    assert (tracker is None) == (nbytes < 1 << 16)
    if tracker is not None:
        tracker.wait(5)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [HEADER[:-1]],
        [HEADER + b"x"],
        [b"Xpex" + HEADER[4:]],
        [b"", HEADER],
        [b"x", HEADER, b"payload"],
    ],
    ids=["nothing", "short", "long", "another magic word", "nothing first", "something first"],
)
def test_a_header_that_is_none_is_refused_whole(pair, capfd, frames):
    hub, link = pair
    link.socket.send_multipart(frames)
    assert receive(hub) is None
    link.send(2)
    assert receive(hub) == (3, 2, 0, False)
    assert hub.refusals.count == 1
    assert (
        capfd.readouterr().err
        == "apex: the hub refused a message from outside this run; more of this kind are only counted\n"
    )


@pytest.mark.parametrize("payload", [[bytes(100), b"more"], [bytes(10)] * 3], ids=["two", "three"])
def test_a_payload_of_several_frames_is_refused_whole(pair, payload):
    hub, link = pair
    link.socket.send_multipart([HEADER, *payload])
    assert receive(hub) == (3, 7, 5, True)
    assert hub.payload() is None
    link.send(2)
    assert receive(hub) == (3, 2, 0, False)
    assert hub.refusals.count == 1


def test_one_call_drops_only_so_many_messages_of_strangers(pair, tmp_path):
    hub, _ = pair
    with zmq.Context() as context:
        stranger = Link(context, hub.endpoint, b"another job's", 3, 0, Refusals("a stranger"))
        for _ in range(100):
            stranger.send(2)
        while hub.refusals.count < 100:
            before = hub.refusals.count
            assert receive(hub) is None
            assert hub.refusals.count - before <= zmq_link._REFUSALS_PER_RECEIVE
        stranger.close()


def test_a_message_to_a_rank_that_is_gone_is_an_error_and_not_lost_in_silence(pair):
    hub, link = pair
    link.socket.close(0)
    with pytest.raises(PeerLost, match="rank 3 was lost"):
        for _ in range(1000):
            hub.send(3, 1)
            hub.socket.poll(10)
