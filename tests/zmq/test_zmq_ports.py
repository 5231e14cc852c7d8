"""The ZeroMQ transport against the conformance suite of ports, in processes of their own, over local sockets and over TCP."""

import ast
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import zmq
from ledger import INTAKE, Ledger
from port_conformance import SCENARIOS, PortConformance, judge

from apex.topology import Topology

PROGRAM = Path(__file__).with_name("port_storm.py")
LAUNCHES = {
    "4 ranks, ipc": (4, 1, []),
    "4 ranks, tcp": (4, 1, ["--endpoint", "tcp"]),
    "7 ranks, 2 of replay, ipc": (7, 2, []),
    "7 ranks, 2 of replay, tcp": (7, 2, ["--endpoint", "tcp"]),
}


def command(ranks: int, replay_ranks: int, part: str, folder: Path, options=()) -> list:
    """Return the command that plays a part."""
    spawn = [sys.executable, "-m", "launch.spawn", "-n", ranks, *options]
    return [*spawn, "--", sys.executable, PROGRAM, replay_ranks, part, folder]


def seen_by(folder: Path, ranks: int) -> list:
    """Return what each rank has written."""
    return [ast.literal_eval((folder / f"rank-{rank}").read_text()) for rank in range(ranks)]


def ledger(values: dict) -> Ledger:
    """Return a ledger that a rank has written."""
    whole = Ledger(values["rank"])
    vars(whole).update(values)
    whole.sent, whole.received = (type(Ledger(0).sent)(list, values[side]) for side in ("sent", "received"))
    return whole


@pytest.fixture(scope="module", params=LAUNCHES.values(), ids=LAUNCHES)
def outcomes(request, run_to_end, tmp_path_factory):
    ranks, replay_ranks, options = request.param
    folder = tmp_path_factory.mktemp("seen")
    ended = run_to_end(command(ranks, replay_ranks, "scenarios", folder, options))
    assert ended.returncode == 0, ended.stderr[-4000:]
    seen = seen_by(folder, ranks)
    rounds = {name: [[ledger(values) for values in of_round] for of_round in zip(*(rank[name] for rank in seen))] for name in seen[0]}
    return judge(Topology(ranks, replay_ranks), rounds)


class TestZmq(PortConformance):
    pass


# --- a storm that is disturbed ------------------------------------------------------------------------

RANKS, ENDS_S, STALL_S = 5, 5.0, 2.0
ROLES = {"learner": 0, "replay": 1, "evaluator": 2, "actor": 3}
LARGEST_RISE = 24 << 20  # bytes; in two seconds a sender without credits would queue up a gigabyte


class Storm:
    """A job in which all ranks send until told to end."""

    def __init__(self, start, folder: Path, options=()):
        self.folder = folder
        self.job = start(command(RANKS, 1, "pump", folder, options))
        for rank in range(RANKS):
            if rank != ROLES["evaluator"]:  # it receives nothing that is counted
                self.until_more_arrive(rank)

    def counts(self, rank: int) -> tuple[int, int]:
        """Return how many messages a rank has received, and how many reports it has sent."""
        path = self.folder / f"counts-{rank}"
        return tuple(map(int, path.read_text().split())) if path.exists() else (0, 0)

    def until_more_arrive(self, rank: int) -> None:
        """Wait until a rank has received something; an actor receives nothing but weights, so its intake counts."""
        rank = 1 if rank >= 2 else rank
        before = self.counts(rank)[0]
        self.job.wait_until(lambda: self.counts(rank)[0] > before, 20, f"messages to rank {rank}")

    def memory(self) -> dict[int, int]:
        """Return rank -> resident bytes."""
        pages = {rank: (Path("/proc") / str(self.job.rank(rank)) / "statm").read_text().split()[1] for rank in range(RANKS)}
        return {rank: int(n) * os.sysconf("SC_PAGE_SIZE") for rank, n in pages.items()}

    def end(self) -> tuple[dict, list[int]]:
        """End it with everything on its way; return what the suite finds wrong, and what each rank has refused."""
        (self.folder / "end").touch()
        asked = time.monotonic()
        ended = self.job.wait(30)
        assert time.monotonic() - asked < ENDS_S
        assert ended.returncode == 0, ended.stderr[-4000:]
        seen = seen_by(self.folder, RANKS)
        refused = [rank.pop("refused") for rank in seen]
        SCENARIOS["pump"] = SCENARIOS["storm"]
        outcome = judge(Topology(RANKS, 1), {"pump": [[ledger(rank) for rank in seen]]})["pump"]
        del SCENARIOS["pump"]
        assert outcome["counts"][INTAKE] > 100
        return {kind: texts for kind, texts in outcome["problems"].items() if texts}, refused


@pytest.fixture
def storm(start, tmp_path):
    """Return ``storm(options)``: one that has begun."""
    folder = tmp_path / "seen"
    folder.mkdir()
    return lambda options=(): Storm(start, folder, options)


def test_a_stopped_rank_makes_no_other_grow_and_then_goes_on_with_nothing_lost(storm):
    storm = storm()
    time.sleep(1.0)  # buffers of all kinds have been used
    for role, rank in ROLES.items():
        os.kill(storm.job.rank(rank), signal.SIGSTOP)
        time.sleep(0.5)
        before, reports = storm.memory(), [storm.counts(other)[1] for other in range(RANKS)]
        time.sleep(STALL_S - 0.5)
        rise = {other: after - before[other] for other, after in storm.memory().items()}
        more_reports = [storm.counts(other)[1] - earlier for other, earlier in enumerate(reports)]
        os.kill(storm.job.rank(rank), signal.SIGCONT)
        assert max(rise.values()) < LARGEST_RISE, (role, rise)
        assert role != "learner" or max(more_reports[1:]) == 0, "a report was sent before the last one was taken"
        storm.until_more_arrive(rank)
    assert storm.end() == ({}, [0] * RANKS)


@pytest.mark.parametrize("options", [[], ["--endpoint", "tcp"]], ids=["ipc", "tcp"])
def test_garbage_from_strangers_changes_nothing_and_is_counted(storm, options):
    storm, rng, sent = storm(options), random.Random(1), 0
    with zmq.Context() as context:
        for rank in (ROLES["learner"], ROLES["replay"]):
            endpoint = (storm.folder / f"endpoint-{rank}").read_text()
            sent = _send_garbage(context, endpoint, rng)
            _send_bytes(endpoint, rng)
        time.sleep(0.5)
    storm.until_more_arrive(1)
    problems, refused = storm.end()
    assert problems == {} and refused[2:] == [0, 0, 0]
    assert min(refused[:2]) >= sent > 0


def _send_garbage(context: zmq.Context, endpoint: str, rng: random.Random) -> int:
    """Send messages that are well-formed only to ZeroMQ; return how many."""
    names = [None, b"r" + (3).to_bytes(4, "little") + bytes(16), b"r", rng.randbytes(255)]
    header = b"Apex" + (3).to_bytes(4, "little") + bytes(8)  # an intake batch's
    messages = [[b""], [header, rng.randbytes(100)], [header] * 100, [rng.randbytes(16), rng.randbytes(1 << 16)], [b"", b"", b""]]
    for name in names:
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 2000
        if name is not None:
            stranger.routing_id = name
        stranger.connect(endpoint)
        for message in messages:
            stranger.send_multipart(message)
        oversized = context.socket(zmq.DEALER)  # its connection is cut, which nobody counts
        oversized.linger = 0
        oversized.connect(endpoint)
        oversized.send(bytes(64 << 20))
        time.sleep(0.1)
        stranger.close(), oversized.close()
    return len(names) * len(messages)


def _send_bytes(endpoint: str, rng: random.Random) -> None:
    """Send random bytes. ZeroMQ reads some as messages of its first version, which are counted; others end the connection."""
    scheme, _, address = endpoint.partition("://")
    for length in (0, 1, 64, 100_000):
        with socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET) as stranger:
            stranger.connect(address if scheme == "ipc" else ("127.0.0.1", int(address.rpartition(":")[2])))
            try:
                stranger.sendall(rng.randbytes(length))
            except OSError:  # it has cut the connection
                continue
