"""Over TCP: nobody without the job's token is heard, and nobody on the way can read."""

import socket
import threading

import numpy as np
import pytest
import zmq

from apex.refusals import Refusals
from apex.transport import zmq_link
from apex.transport.zmq_link import Hub, Link, name, over_tcp

TOKEN, SECRET = bytes(range(16)), b"nobody on the way is to read this; "


@pytest.mark.parametrize(
    "endpoint, open_to_others",
    [
        ("ipc:///tmp/x", False), ("tcp://127.0.0.1:5", True), ("tcp://127.9.9.9:*", True),
        ("tcp://localhost:5", True),
        ("tcp://10.0.0.1:5", True), ("tcp://node7:*", True), ("tcp://0.0.0.0:5", True),
    ],
)  # fmt: skip
def test_what_others_can_reach_is_over_tcp(endpoint, open_to_others):
    assert over_tcp(endpoint) == open_to_others


class Eavesdropper:
    """Passes on what two ends say to each other, and keeps it."""

    def __init__(self, port: int):
        self.heard, self._port = bytearray(), port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        near, _ = self._listening.accept()
        far = socket.create_connection(("127.0.0.1", self._port))
        for origin, to in ((near, far), (far, near)):
            threading.Thread(target=self._pass_on, args=(origin, to), daemon=True).start()

    def _pass_on(self, origin, to):
        while data := origin.recv(1 << 16):
            self.heard += data
            to.sendall(data)


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture(params=[True, False], ids=["over TCP", "in a folder"])
def tapped(request, context, monkeypatch):
    """A hub, a link to it through a third, and whether it is as over TCP."""
    monkeypatch.setattr(zmq_link, "over_tcp", lambda endpoint: request.param)
    hub = Hub(context, "tcp://127.0.0.1:*", TOKEN, [3], Refusals("the hub"), 1 << 20)
    eavesdropper = Eavesdropper(int(hub.endpoint.rpartition(":")[2]))
    link = Link(context, f"tcp://127.0.0.1:{eavesdropper.port}", TOKEN, 3, 0, Refusals("the link"))
    yield hub, link, eavesdropper, request.param
    hub.close(), link.close()


def test_messages_and_token_can_be_read_on_the_way_only_in_a_folder_which_nobody_else_enters(tapped):
    hub, link, eavesdropper, between = tapped
    payload = np.frombuffer(SECRET * 1000, np.uint8)
    link.send(1, 2, payload)
    assert hub.socket.poll(5000) and hub.receive() == (3, 1, 2, True)
    assert np.array_equal(hub.payload(), payload)
    hub.send(3, 4, 5, payload)
    assert link.socket.poll(5000) and link.receive() == (0, 4, 5, True)
    assert np.array_equal(link.payload(), payload)
    assert len(eavesdropper.heard) > 2 * len(payload)
    assert [part in eavesdropper.heard for part in (SECRET, TOKEN, b"Apex")] == [not between] * 3


def test_the_largest_message_that_is_allowed_arrives_encrypted_or_not(tapped):
    hub, link, _, _ = tapped
    payload = np.random.default_rng(0).integers(256, size=1 << 20, dtype=np.uint8)
    for _ in range(2):
        link.send(1, 2, payload)
        assert hub.socket.poll(5000) and hub.receive() == (3, 1, 2, True)
        assert np.array_equal(hub.payload(), payload)
    assert not link.is_lost()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_who_takes_the_port_of_this_host_first_does_not_learn_the_token(context, host):
    impostor = context.socket(zmq.ROUTER)
    failures = impostor.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    )
    impostor.bind("tcp://127.0.0.1:*")
    link = Link(
        context, impostor.last_endpoint.decode().replace("127.0.0.1", host), TOKEN, 3, 0, Refusals("the link")
    )
    link.send(1, 2, np.frombuffer(SECRET, np.uint8))
    seen = dict(zmq.zmq_poll([(impostor, zmq.POLLIN), (failures, zmq.POLLIN)], 60_000))
    assert failures in seen and impostor not in seen
    impostor.disable_monitor()
    impostor.close(0), link.close()


@pytest.mark.parametrize("stranger", ["without a key", "with the key of another job"])
def test_a_stranger_is_not_heard_and_the_ranks_of_the_job_are(context, monkeypatch, stranger):
    monkeypatch.setattr(zmq_link, "over_tcp", lambda endpoint: True)
    hub = Hub(context, "tcp://127.0.0.1:*", TOKEN, [3], Refusals("the hub"), 1 << 20)
    outside = context.socket(zmq.DEALER)
    outside.linger, outside.routing_id = 0, name(TOKEN, 3)
    if stranger != "without a key":
        zmq_link.encrypt(outside, TOKEN[::-1])
    outside.connect(hub.endpoint)
    outside.send_multipart([b"Apex" + bytes(12)])
    assert not hub.socket.poll(500)
    link = Link(context, hub.endpoint, TOKEN, 3, 0, Refusals("the link"))
    link.send(1)
    assert hub.socket.poll(5000) and hub.receive() == (3, 1, 0, False)
    assert hub.refusals.count == 0 and not hub.socket.poll(200)
    hub.close(), link.close(), outside.close()
