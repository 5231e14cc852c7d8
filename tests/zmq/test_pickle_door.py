"""``zmq-pickle`` is no door: another user finds no socket to connect to, and nothing without a badge is unpickled."""

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq

from apex.topology import Topology
from apex.transport.pickled import Kind
from apex.transport.pickled_form import dumps

NOBODY, PATIENCE_S = 65534, 120.0
TOPOLOGY, TOKEN = Topology(4, 1), bytes(range(16))
LEARNER, REPLAY, ACTOR = 0, 1, 3
COMPARE = ["-m", "launch.main", "compare", "--transports", "zmq-pickle", "--workloads", "mixed", "--actors", "1"]

# Becomes the user that it is told, tries every socket whose name /proc/net/unix tells, and sends to those that it reaches.
ATTACK = """
import json, os, socket, sys, zmq
user, names, frames = int(sys.argv[1]), sys.argv[2:-1], [bytes.fromhex(text) for text in json.loads(sys.argv[-1])]
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
    frames = [pickle.dumps((int(Kind.INTAKE), 1, Evil(made))).hex(), os.urandom(33).hex()]
    command = [sys.executable, "-c", ATTACK, str(user), *names, json.dumps(frames)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout)


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
    # The learner's control socket, and two of the replay rank; each process has further ones of its world.
    job.wait_until(lambda: len([name for name in listening(job) if name.endswith(("control", "intake", "learner"))]) == 3, 60, "sockets")
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
    assert not made.exists() and comparing.processes().keys() == alive.keys(), "nothing was unpickled, and nobody has ended"


# --- who has no badge ---------------------------------------------------------------------------------


def wait_until(holds) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def wires(tmp_path):
    """Return ``wires(ranks) -> dict`` of the wires of these ranks, which have met; all are closed at the end."""
    from apex.transport.zmq_pickle import ZmqWire

    made: dict[int, ZmqWire] = {}

    def of(ranks) -> dict[int, ZmqWire]:
        def make(rank: int) -> None:
            made[rank] = ZmqWire(str(tmp_path), TOKEN, rank, TOPOLOGY)

        threads = [threading.Thread(target=make, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return made

    yield of
    threads = [threading.Thread(target=wire.close) for wire in made.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_strangers_send_is_refused_and_counted_and_the_ranks_go_on(wires, tmp_path):
    ranks, made = wires(range(4)), tmp_path / "made"
    names = [f"{tmp_path}/pickle-{end}" for end in ("0-control", "1-intake", "1-learner")]
    assert attack(os.geteuid(), names, made)["reached"] == names
    each = 9  # messages that the attack sends to a socket

    def refused() -> list[int]:
        for wire in ranks.values():
            wire.progress()
        return [wire.refusals.count for wire in ranks.values()]

    wait_until(lambda: sum(refused()) == 3 * each)
    assert [ranks[LEARNER].refusals.count, ranks[REPLAY].refusals.count] == [each, 2 * each]
    assert not made.exists()
    taken = []
    ranks[ACTOR].send(REPLAY, Kind.INTAKE, "a batch", lambda: taken.append("a batch"))
    wait_until(lambda: (arrived := ranks[REPLAY].receive(True)) is not None and arrived == (ACTOR, Kind.INTAKE, "a batch"))
    ranks[ACTOR].send(LEARNER, Kind.REPORT, "a report", lambda: taken.append("a report"))
    wait_until(lambda: refused() and len(taken) == 2 and ranks[LEARNER].receive(False) == (ACTOR, Kind.REPORT, "a report"))


def test_an_actor_unpickles_nothing_of_a_replay_rank_that_has_no_badge(wires, tmp_path):
    from apex.transport.private import Badges

    made, badges = tmp_path / "made", Badges(TOKEN, range(4))
    with zmq.Context() as context:
        replay, hello = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        replay.bind(f"ipc://{tmp_path}/pickle-1-intake")
        hello.routing_id = badges.of(REPLAY)
        hello.connect(f"ipc://{tmp_path}/pickle-0-control")
        hello.send(dumps((-1, 0, None)))
        actor = wires([0, 2, 3])[ACTOR]
        actor.send(REPLAY, Kind.INTAKE, "a batch")
        caller, _ = replay.recv_multipart()
        evil = dumps((int(Kind.WEIGHTS), 1, Evil(made)))
        for frames in ([evil], [os.urandom(33), evil], [badges.of(2), evil], [caller, evil]):
            replay.send_multipart([caller, *frames])
        wait_until(lambda: actor.progress() or actor.refusals.count == 4)
        assert not made.exists() and actor.receive(False) is None
        replay.send_multipart([caller, badges.of(REPLAY), dumps((int(Kind.WEIGHTS), 1, "good"))])
        wait_until(lambda: actor.progress() or actor.receive(False) == (REPLAY, Kind.WEIGHTS, "good"))
        actor.progress()
        replay.close(0), hello.close(0)
