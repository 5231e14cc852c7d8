"""The ZeroMQ transport against the conformance suite of ports, in processes of their own, over local sockets
and over TCP.
"""

import contextlib
import pickle
import random
import socket
import sys
import time
from pathlib import Path

import pytest
import zmq
from disturbance import EVENT_S, RANKS, ROLES, Disturbance, EndlessStorm
from places import HELPERS
from port_conformance import SCENARIOS, PortConformance, judge

from apex.topology import Topology

PROGRAM = HELPERS / "stress_zmq_ports.py"
LAUNCHES = {
    "4 ranks, ipc": (4, 1, []),
    "4 ranks, tcp": (4, 1, ["--endpoint", "tcp"]),
    "7 ranks, 2 of replay, tcp": (7, 2, ["--endpoint", "tcp"]),
}


def command(ranks: int, replay_ranks: int, part: str, folder: Path, options=()) -> list:
    """Return the command that plays a part."""
    spawn = [sys.executable, "-m", "launch.run.spawn", "-n", ranks, *options]
    return [*spawn, "--", sys.executable, PROGRAM, replay_ranks, part, folder]


@pytest.fixture(scope="module", params=LAUNCHES.values(), ids=LAUNCHES)
def outcomes(request, run_to_end, tmp_path_factory):
    ranks, replay_ranks, options = request.param
    folder = tmp_path_factory.mktemp("seen")
    ended = run_to_end(command(ranks, replay_ranks, "scenarios", folder, options))
    assert ended.returncode == 0, ended.stderr[-4000:]
    seen = [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(ranks)]
    return judge(
        Topology(ranks, replay_ranks), {name: list(zip(*(rank[name] for rank in seen))) for name in SCENARIOS}
    )


class TestZmq(PortConformance):
    pass


OVER = {"ipc": [], "tcp": ["--endpoint", "tcp"]}


@pytest.fixture(params=OVER.values(), ids=OVER)
def storm(request, start, tmp_path):
    return EndlessStorm(
        start, tmp_path / "storm", lambda folder: command(RANKS, 1, "endless", folder, request.param)
    )


class TestZmqDisturbed(Disturbance):
    pass


def test_garbage_from_strangers_changes_nothing_and_is_counted_where_it_is_heard(storm):
    rng, sent = random.Random(1), 0
    with zmq.Context() as context:
        for rank in (ROLES["learner"], ROLES["replay"]):
            endpoint = (storm.folder / f"endpoint-{rank}").read_text()
            sent = _send_garbage(context, endpoint, rng)
            _send_bytes(endpoint, rng)
        time.sleep(0.5)
    storm.until_traffic()
    storm.ask_to_end()
    assert storm.problems(EVENT_S) == {}
    refused = [storm.left(rank)["refused"] for rank in range(RANKS)]
    assert refused[2:] == [0, 0, 0]
    if endpoint.startswith(
        "ipc"
    ):  # over TCP a stranger has no key of the job, and its connection ends before there is a message
        assert min(refused[:2]) >= sent > 0


def _send_garbage(context: zmq.Context, endpoint: str, rng: random.Random) -> int:
    """Send messages that are well-formed only to ZeroMQ; return how many."""
    names = [None, b"r" + (3).to_bytes(4, "little") + bytes(16), b"r", rng.randbytes(255)]
    header = b"Apex" + (3).to_bytes(4, "little") + bytes(8)  # an intake batch's
    messages = [
        [b""],
        [header, rng.randbytes(100)],
        [header] * 100,
        [rng.randbytes(16), rng.randbytes(1 << 16)],
        [b"", b"", b""],
    ]
    for name in names:
        stranger = context.socket(zmq.DEALER)
        stranger.linger, stranger.sndtimeo = 2000, 2000  # a connection that is refused takes nothing
        if name is not None:
            stranger.routing_id = name
        stranger.connect(endpoint)
        oversized = context.socket(zmq.DEALER)  # its connection is cut, which nobody counts
        oversized.linger, oversized.sndtimeo = 0, 2000
        oversized.connect(endpoint)
        with contextlib.suppress(zmq.Again):
            for message in messages:
                stranger.send_multipart(message)
            oversized.send(bytes(64 << 20))
        time.sleep(0.1)
        stranger.close(), oversized.close()
    return len(names) * len(messages)


def _send_bytes(endpoint: str, rng: random.Random) -> None:
    """Send random bytes. ZeroMQ reads some as messages of its first version, which are counted.

    Others end the connection.
    """
    scheme, _, address = endpoint.partition("://")
    for length in (0, 1, 64, 100_000):
        with socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET) as stranger:
            stranger.connect(address if scheme == "ipc" else ("127.0.0.1", int(address.rpartition(":")[2])))
            try:
                stranger.sendall(rng.randbytes(length))
            except OSError:  # it has cut the connection
                continue
