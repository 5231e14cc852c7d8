"""``zmq-pickle`` is no door.

Another user finds no socket to connect to, and nothing without a badge is unpickled.
"""

import json
import os
import pickle
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apex.ports import IntakeEvent
from apex.schema import aligned_bytes, limits
from apex.topology import Topology
from apex.transport.wire import Kind
from apex.transport.zmq import make_wire
from apex.transport.zmq_world import World
from launch.bench import synthetic
from launch.bench.pickled import PICKLED_NBYTES, Form, PickledWire
from launch.run.world import make_port

NOBODY, PATIENCE_S = 65534, 120.0
TOPOLOGY, TOKEN, CONFIG = Topology(4, 1), bytes(range(16)), synthetic.config(1)
LIMITS, FORM = limits(CONFIG, synthetic.SPEC), Form(CONFIG, synthetic.SPEC)
LEARNER, REPLAY, ACTOR = 0, 1, 3
COMPARE = [
    "-m",
    "launch.cli.main",
    "compare",
    "--transports",
    "zmq-pickle",
    "--workloads",
    "mixed",
    "--actors",
    "1",
]

# Becomes the user that it is told, tries every socket whose name /proc/net/unix tells, and sends to those
# that it reaches.
ATTACK = """
import json, os, socket, sys, zmq
user, names = int(sys.argv[1]), sys.argv[2:-1]
frames = [bytes.fromhex(text) for text in json.loads(sys.argv[-1])]
os.setgroups([]), os.setgid(user), os.setuid(user)
reached = []
context = zmq.Context()
seen = {line.split()[-1] for line in open("/proc/net/unix").read().splitlines()}
for name in names:
    path = chr(0) + name[1:] if name.startswith("@") else name
    try:
        socket.socket(socket.AF_UNIX).connect(path)
    except OSError:
        continue
    reached.append(name)
    for identity in (None, b"3", b"r" * 33):
        sender = context.socket(zmq.DEALER)
        sender.linger = 5000
        if identity:
            sender.routing_id = identity
        sender.connect("ipc://" + name)
        for message in ([frames[0]], [frames[1], frames[0]], [frames[0], frames[0]]):
            sender.send_multipart(message)
        sender.close()
context.term()
print(json.dumps({"visible": [name for name in names if name in seen], "reached": reached}))
"""


class Evil:
    """Makes a folder where it is unpickled."""

    def __init__(self, made: Path):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


def attack(user: int, names: list[str], made: Path) -> dict:
    frames = [pickle.dumps(Evil(made)).hex(), struct.pack("<4sIq", b"Apex", Kind.INTAKE, 1).hex()]
    command = [sys.executable, "-c", ATTACK, str(user), *names, json.dumps(frames)]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    )


def listening(job) -> list[str]:
    """Return the names of the sockets of UNIX that processes of a job have bound."""
    inodes = set()
    for pid in job.processes():
        try:
            inodes |= {os.readlink(path).strip("socket:[]") for path in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:  # it has just ended
            continue
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({row[7] for row in rows if len(row) > 7 and row[6] in inodes})


# --- two users ----------------------------------------------------------------------------------------


@pytest.fixture
def comparing(start):
    """An `apex compare` whose ranks have met and go on for long."""
    job = start([sys.executable, *COMPARE, "--repetitions", "1", "--regimes", "free", "--seconds", "300"])
    # Where the ranks meet, the learner's socket and the replay rank's.
    job.wait_until(
        lambda: len([name for name in listening(job) if name.endswith(("world", "0-0", "1-0"))]) == 3,
        60,
        "sockets",
    )
    return job


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_no_socket_of_a_running_comparison(comparing, tmp_path):
    tmp_path.chmod(0o755)
    names, made = listening(comparing), tmp_path / "made"
    seen = attack(NOBODY, names, made)
    assert seen["visible"] == names, "their names are no secret"
    assert seen["reached"] == []
    alive = comparing.processes()
    seen = attack(0, names, made)
    assert seen["reached"] == names, "who may enter the folder reaches them"
    assert not made.exists() and comparing.processes().keys() == alive.keys(), (
        "nothing was unpickled, and nobody has ended"
    )


# --- who has no badge ---------------------------------------------------------------------------------


def wait_until(holds) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def ranks(tmp_path):
    """The ports of four ranks whose bulk messages are pickled, over real sockets.

    All are closed at the end.
    """
    worlds = _on_each(lambda rank: World(rank, 4, f"ipc://{tmp_path}", TOKEN))
    plain = replace(LIMITS, sample_nbytes=PICKLED_NBYTES, intake_nbytes=PICKLED_NBYTES)
    form = Form(CONFIG, synthetic.SPEC)
    wires = _on_each(lambda rank: PickledWire(make_wire(worlds[rank], TOPOLOGY, plain), form))
    ports = [make_port(wire, TOPOLOGY, LIMITS) for wire in wires]
    yield ports
    for port, world in zip(ports, worlds):
        port.close()
        world.context.destroy(0)


def _on_each(make) -> list:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(make, range(4)))


def test_what_strangers_send_is_refused_and_counted_and_the_ranks_go_on(ranks, tmp_path):
    made, landing = tmp_path / "made", aligned_bytes(FORM.intake.nbytes)
    names = [f"{tmp_path}/{end}" for end in ("0-0", "1-0")]
    assert attack(os.geteuid(), names, made)["reached"] == names
    each = 9  # messages that the attack sends to a socket

    def refused() -> list[int]:
        for port in ranks:
            port.progress()
        ranks[REPLAY].poll(landing)
        return [ranks[LEARNER].refused, ranks[REPLAY].refused]

    wait_until(lambda: min(refused()) >= each)
    assert not made.exists()
    message = synthetic.Batches(CONFIG, 0, 1).stamped(0, 0)
    ranks[ACTOR].send_intake(7, message)
    wait_until(lambda: ranks[REPLAY].progress() or isinstance(ranks[REPLAY].poll(landing), IntakeEvent))
    wait_until(lambda: ranks[ACTOR].progress() or ranks[ACTOR].completed_intake() == [7])
    assert np.array_equal(
        landing[: FORM.intake.fields["frames"].offset], message[: FORM.intake.fields["frames"].offset]
    )
