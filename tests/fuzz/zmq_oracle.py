"""Which messages over ZeroMQ a rank takes, read off the protocol and not off the code; and a world of four ranks to send them to."""

import os
import threading

import numpy as np
from mutations import HEADER

from apex.metrics import REPORT_FIELDS
from apex.ports import WORDS
from apex.schema import Limits
from apex.topology import Topology
from apex.transport import zmq_port as kinds
from apex.transport.zmq import make_port
from apex.transport.zmq_world import World

LIMITS = Limits(sample_nbytes=4096, priority_nbytes=512, prefetch=3, intake_in_flight=2, intake_nbytes=2048)
TOPOLOGY = Topology(4, 1)
LEARNER, REPLAY, EVALUATOR, ACTOR = range(4)
LARGEST = (1 << 20) + (1 << 20)  # bytes of a frame, over which ZeroMQ cuts the connection


class FourRanks:
    """The real ports of four ranks over real sockets, all in this process; only their making needs threads, as it is collective."""

    def __init__(self, folder):
        self.worlds = self._on_each(lambda rank: World(rank, 4, f"ipc://{folder}", b"t" * 16))
        self.ports = self._on_each(lambda rank: make_port(self.worlds[rank], TOPOLOGY, LIMITS))

    def __getitem__(self, rank):
        return self.ports[rank]

    def close(self):
        """Leave nothing that lingers."""
        for port in self.ports:
            port.close()
        for world in self.worlds:
            world.context.destroy(0)

    @staticmethod
    def _on_each(make) -> list:
        made = [None] * 4

        def on(rank):
            made[rank] = make(rank)

        threads = [threading.Thread(target=on, args=(rank,), daemon=True) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(one is not None for one in made), "the ranks have not met"
        return made


def parsed(frames: list[bytes]):
    """Return ``(kind, arg, payload length or None)`` of a message, None where it is none."""
    if not 1 <= len(frames) <= 2 or len(frames[0]) != HEADER.size:
        return None
    magic, kind, arg = HEADER.unpack(frames[0])
    return None if magic != b"Apex" else (kind, arg, len(frames[1]) if len(frames) == 2 else None)


def learner_takes(frames: list[bytes], rank: int) -> str | None:
    """Return what a learner that has asked for nothing and is not ending takes a message for."""
    kind, arg, nbytes = parsed(frames) or (None, None, None)
    if kind == kinds.WEIGHT_REQUEST and nbytes is None and rank in (EVALUATOR, ACTOR) and arg >= 0:
        return "weight request"
    if kind == kinds.STOP_REQUEST and nbytes is None:
        return "stop request"
    if kind == kinds.REPORT and nbytes == 8 * len(REPORT_FIELDS[TOPOLOGY.role(rank)[0]]):
        return "report"
    return "answer" if kind == kinds.ANSWER and nbytes == 8 * WORDS else None


def replay_takes_of_actor(frames: list[bytes]) -> bool:
    """Whether a replay rank takes a message for an intake batch."""
    kind, _, nbytes = parsed(frames) or (None, None, None)
    return kind == kinds.INTAKE and nbytes is not None and nbytes <= LIMITS.intake_nbytes


def replay_takes_of_learner(frames: list[bytes]) -> str | None:
    """Return what a replay rank with no report on its way, and a free place for a request, takes a message for."""
    kind, _, nbytes = parsed(frames) or (None, None, None)
    exact = {kinds.PRIORITY: ("priorities", LIMITS.priority_nbytes), kinds.ANNOUNCEMENT: ("announcement", 8 * WORDS)}
    exact[kinds.KILL] = ("kill", 16)  # of no process that there is
    plain = {kinds.SAMPLE_REQUEST: "sample request", kinds.STOP: "stop"}
    if nbytes is None:
        return plain.get(kind)
    what, length = exact.get(kind, (None, None))
    return what if nbytes == length else None


def actor_takes_of_learner(frames: list[bytes], weights_nbytes: int | None) -> str | None:
    """Return what an actor takes a message for that waits for weights of so many bytes, or for none."""
    kind, _, nbytes = parsed(frames) or (None, None, None)
    if kind == kinds.WEIGHTS and nbytes is not None and nbytes == weights_nbytes:
        return "weights"
    if kind == kinds.ANNOUNCEMENT and nbytes == 8 * WORDS:
        return "announcement"
    if kind == kinds.KILL and nbytes == 16:
        return "kill"  # of no process that there is
    return "stop" if kind == kinds.STOP and nbytes is None else None


def memory() -> int:
    """Return the bytes that this process has in memory."""
    with open(f"/proc/{os.getpid()}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(rank: int) -> bytes:
    """Return a good report."""
    return np.arange(len(REPORT_FIELDS[TOPOLOGY.role(rank)[0]]), dtype=np.float64).tobytes()
