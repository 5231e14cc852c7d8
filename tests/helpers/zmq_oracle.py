"""Which messages over ZeroMQ a rank takes, read off the protocol and not off the code.

And a world of four ranks to send them to.
"""

import json
import os
import threading

import numpy as np
from mutations import HEADER
from stress_base import zmq_port

from apex.metrics import REPORT_FIELDS
from apex.schema import Limits
from apex.topology import Topology
from apex.transport.wire import CONTROL_NBYTES, Kind
from apex.transport.zmq_world import World

LIMITS = Limits(sample_nbytes=4096, priority_nbytes=512, prefetch=3, intake_in_flight=2, intake_nbytes=2048)
TOPOLOGY = Topology(4, 1)
LEARNER, REPLAY, EVALUATOR, ACTOR = range(4)
LARGEST = (1 << 20) + (1 << 20)  # bytes of a frame, over which ZeroMQ cuts the connection


class FourRanks:
    """The real ports of four ranks over real sockets, all in this process.

    Only their making needs threads, as it is collective.
    """

    def __init__(self, folder):
        self.worlds = self._on_each(lambda rank: World(rank, 4, f"ipc://{folder}", b"t" * 16))
        self.ports = self._on_each(lambda rank: zmq_port(self.worlds[rank], TOPOLOGY, LIMITS))

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


def control(frames: list[bytes]) -> dict | None:
    """Return the JSON object of a control message, None where it is none."""
    kind, _, nbytes = parsed(frames) or (None, None, None)
    if kind != Kind.CONTROL or not nbytes or nbytes > CONTROL_NBYTES:
        return None
    try:
        message = json.loads(frames[1])
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def asks_for_acknowledgement(frames: list[bytes]) -> bool:
    """Whether a control message is acknowledged, whatever it says."""
    kind, arg, nbytes = parsed(frames) or (None, 0, None)
    return kind == Kind.CONTROL and arg != 0 and nbytes is not None and 0 < nbytes <= CONTROL_NBYTES


def is_whole(value) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def is_request(message: dict) -> bool:
    """Whether the learner may ask so for a checkpoint."""
    values = [message.get(name) for name in ("number", "learner_steps", "base")]
    if message.get("kind") != "checkpoint" or any(type(value) is not int for value in values):
        return False
    number, steps, base = values
    return 0 <= base < number < 2**63 and 0 <= steps < 2**63


def is_ack(message: dict) -> bool:
    """Whether a rank may acknowledge a checkpoint so."""
    types = {"number": int, "error": int, "state": dict}
    has_fields = message.get("kind") == "checkpoint written" and all(
        type(message.get(name)) is kind for name, kind in types.items()
    )
    return has_fields and 0 <= message["error"] <= 4095


def learner_takes(frames: list[bytes], rank: int) -> str | None:
    """Return what a learner that has asked for nothing and is not ending takes a message for."""
    kind, _, nbytes = parsed(frames) or (None, None, None)
    if kind == Kind.WEIGHT_REQUEST and nbytes == 8 and rank in (EVALUATOR, ACTOR):
        return "weight request" if int.from_bytes(frames[1], "little", signed=True) >= 0 else None
    message = control(frames) or {}
    if message.get("kind") == "stop request":
        return "stop request"
    if message.get("kind") == "report" and type(values := message.get("values")) is list:
        length = len(REPORT_FIELDS[TOPOLOGY.role(rank)[0]])
        return (
            "report"
            if len(values) == length and all(type(v) is float or is_whole(v) for v in values)
            else None
        )
    if message.get("kind") == "epsilon taken":
        return "acknowledgement" if rank == ACTOR else None
    return "acknowledgement" if is_ack(message) else None


def replay_takes_of_actor(frames: list[bytes]) -> bool:
    """Whether a replay rank takes a message for an intake batch."""
    kind, _, nbytes = parsed(frames) or (None, None, None)
    return kind == Kind.INTAKE and nbytes is not None and 0 < nbytes <= LIMITS.intake_nbytes


def member_takes_of_learner(frames: list[bytes]) -> str | None:
    """Return what any rank but the learner takes a control message of the learner for."""
    message = control(frames) or {}
    if is_request(message):
        return "request"
    if message.get("kind") == "kill" and is_whole(message.get("pid")) and is_whole(message.get("began")):
        return "kill"  # of no process that there is
    return "stop" if message.get("kind") == "stop" else None


def replay_takes_of_learner(frames: list[bytes]) -> str | None:
    """Return what a replay rank with a free place for a request takes a message for."""
    kind, _, nbytes = parsed(frames) or (None, None, None)
    if kind == Kind.PRIORITY and nbytes == LIMITS.priority_nbytes:
        return "priorities"
    return "sample request" if kind == Kind.SAMPLE_REQUEST and not nbytes else member_takes_of_learner(frames)


def actor_takes_of_learner(frames: list[bytes], weights_nbytes: int) -> str | None:
    """Return what an actor takes a message for that waits for weights of so many bytes."""
    kind, _, nbytes = parsed(frames) or (None, None, None)
    if kind == Kind.WEIGHTS and nbytes == weights_nbytes:
        return "weights"
    return "no weights" if kind == Kind.WEIGHTS and not nbytes else member_takes_of_learner(frames)


def memory() -> int:
    """Return the bytes that this process has in memory."""
    with open(f"/proc/{os.getpid()}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(rank: int) -> bytes:
    """Return a good report."""
    return np.arange(len(REPORT_FIELDS[TOPOLOGY.role(rank)[0]]), dtype=np.float64).tobytes()
