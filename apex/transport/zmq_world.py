"""Starting and ending a world over ZeroMQ: what happens once, outside the roles' messages.

``launch.spawn`` tells every rank where the learner's rank is to be found (``APEX_ENDPOINT``: a folder of
the host, ``ipc:///path``, or ``tcp://host:port``) and what the ranks of this job call themselves
(``APEX_TOKEN``). The learner's rank binds there, and all others meet at it. Values travel as JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import socket as sockets
import sys
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import zmq

from apex.config import ConfigError
from apex.ports import PeerLost
from apex.schema import EnvSpec
from apex.topology import LEARNER_RANK
from apex.transport.private import TOKEN_VARIABLE, check_folder, read_token
from apex.transport.process import own_process
from apex.transport.zmq_link import LARGEST_CONTROL_NBYTES, LINGER_MS, Hub, Link

ENDPOINT_VARIABLE = "APEX_ENDPOINT"
RANK_VARIABLE, SIZE_VARIABLE, LIFE_VARIABLE = "APEX_RANK", "APEX_SIZE", "APEX_LIFE"
MAY_LOSE_VARIABLE = "APEX_MAY_LOSE"  # set where ranks that are lost are started again
_VALUE, _JOIN = 1, 2  # kinds of message
_ANSWERS_S = 60.0  # a learner that is there at all


def world(expected_size: int) -> World:
    """Return the world that the environment describes; raises :class:`ConfigError` where it describes none."""
    rank, size = int(os.environ[RANK_VARIABLE]), int(os.environ[SIZE_VARIABLE])
    assert size == expected_size, "the launcher and the ranks read the same variable"
    endpoint = os.environ.get(ENDPOINT_VARIABLE, "")
    try:
        _meeting_point(endpoint)
        return World(rank, size, endpoint, read_token(os.environ.get(TOKEN_VARIABLE, "")), life())
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError(f"{ENDPOINT_VARIABLE}={endpoint}: no place to meet for the ranks of a job: {error}") from None


def life() -> int:
    """Return how many processes had this one's rank before it, as ``launch.spawn`` tells."""
    return int(os.environ.get(LIFE_VARIABLE, "0"))


class World:
    """The ranks of a job. Calls that are collective are made by all ranks, in the same order."""

    about: dict | None = None
    """What the learner told this process, where it takes a lost one's place."""

    def __init__(self, rank: int, size: int, endpoint: str, token: bytes, life: int = 0):
        self.rank, self.size, self.token, self.life = rank, size, token, life
        self.context = zmq.Context()
        atexit.register(self.context.destroy, LINGER_MS)  # Python itself would not wait for what was sent last
        self.endpoint, self._numbers = endpoint, itertools.count()
        meeting, owner = _meeting_point(endpoint), f"rank {rank}"
        if rank == LEARNER_RANK:
            self._box = Hub(self.context, meeting, token, range(1, size), owner, LARGEST_CONTROL_NBYTES)
        else:
            self._box = Link(self.context, meeting, token, rank, LEARNER_RANK, owner, life)

    @property
    def refused(self) -> int:
        """Messages refused here so far."""
        return self._box.refused

    def hub(self, peers, owner: str, largest_nbytes: int | None) -> Hub:
        """Return a new place for ``peers`` to connect to, on this rank."""
        return Hub(self.context, self._new_endpoint(), self.token, peers, owner, largest_nbytes)

    def link(self, endpoint: str, peer: int, owner: str) -> Link:
        """Return a connection to the place that ``peer`` has made."""
        return Link(self.context, endpoint, self.token, self.rank, peer, owner, self.life)

    def allgather(self, value) -> list:
        """Return every rank's value, in the order of ranks. Collective; waits in the kernel."""
        if self.rank != LEARNER_RANK:
            self._box.send(_VALUE, 0, _encoded(value))
            while not _has_length(values := self._next()[1], self.size):
                self._box.refuse()
            return values
        values = {LEARNER_RANK: value}
        while len(values) < self.size:
            rank, peer_value = self._next()
            values.setdefault(rank, peer_value)  # no rank sends its next value before it has all of these
        in_order = [values[rank] for rank in range(self.size)]
        for rank in range(1, self.size):
            self._box.send(rank, _VALUE, 0, _encoded(in_order))
        return in_order

    def join(self) -> dict | None:
        """Take the place of the process that had this rank; return what the learner tells, None where the run ends already."""
        self._box.send(_JOIN, 0, _encoded([sockets.gethostname(), *own_process()]))
        while self._box.socket.poll(1e3 * _ANSWERS_S):
            message = self._box.receive()
            value = _REFUSED if message is None else _read(self._box, message, _VALUE)
            if value is not _REFUSED:
                self.about = value
                return value
        return None

    def joiner(self) -> tuple[int, list] | None:
        """On the learner, once the run has begun: return a rank that wants to join, and its process, or None."""
        message = self._box.receive()
        value = _REFUSED if message is None else _read(self._box, message, _JOIN)
        if value is _REFUSED:
            return None
        if not isinstance(value, list) or [type(part) for part in value] != [str, int, int]:
            return self._box.refuse()
        return message.rank, value

    def answer(self, rank: int, about: dict | None) -> None:
        """On the learner: tell a rank that has joined."""
        self._box.may_lose = frozenset([rank])
        self._box.send(rank, _VALUE, 0, _encoded(about))

    def _next(self) -> tuple[int, object]:
        while True:
            self._box.socket.poll()
            message = self._box.receive()
            value = _REFUSED if message is None else _read(self._box, message, _VALUE, _JOIN)
            if value is not _REFUSED:
                if message.kind == _JOIN:
                    raise PeerLost(f"rank {message.rank} ended before the ranks of this job had met")
                return message.rank, value

    def _new_endpoint(self) -> str:
        parts = urlsplit(self.endpoint)
        if parts.scheme == "ipc":
            return f"{self.endpoint}/{self.rank}-{next(self._numbers)}"
        return f"tcp://{_address_towards(parts.hostname, parts.port)}:*"


def _meeting_point(endpoint: str) -> str:
    """Return where the learner's rank binds; raises ValueError where ranks cannot meet, or not safely."""
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc" and parts.path:
        check_folder(parts.path)
        return f"{endpoint}/world"
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        return endpoint
    raise ValueError("write ipc:///folder or tcp://host:port")


_REFUSED = object()


def _read(box, message, *kinds: int) -> object:
    """Return the value in a message of one of these kinds, or that it has been refused."""
    if message.kind not in kinds or not message.has_payload:
        box.refuse()
        return _REFUSED
    buffer = bytearray(LARGEST_CONTROL_NBYTES)
    nbytes = box.take_into(np.frombuffer(buffer, np.uint8))
    if nbytes is None:
        return _REFUSED
    try:
        return json.loads(buffer[:nbytes], object_hook=_decoded)
    except (ValueError, TypeError, KeyError, RecursionError):  # not UTF-8, not JSON, or not of our values
        box.refuse()
        return _REFUSED


def _has_length(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _encoded(value) -> np.ndarray:
    return np.frombuffer(json.dumps(value, default=_as_plain).encode(), np.uint8)


def _as_plain(value):
    """Return what the JSON of one of our own values holds."""
    if isinstance(value, Path):
        return {"Path": str(value)}
    if isinstance(value, EnvSpec):
        return {"EnvSpec": dataclasses.asdict(value)}
    raise TypeError(f"{type(value).__name__} does not travel between ranks")


def _decoded(table: dict):
    if set(table) == {"Path"}:
        return Path(table["Path"])
    if set(table) == {"EnvSpec"}:
        fields = table["EnvSpec"]
        spec = EnvSpec(**fields | {"frame_shape": tuple(fields["frame_shape"])})
        if np.dtype(spec.frame_dtype).hasobject or any(type(n) is not int for n in (*spec.frame_shape, spec.stack, spec.num_actions)):
            raise ValueError("not the shape of an environment")
        return spec
    return table


def _address_towards(host: str, port: int) -> str:
    """Return this host's address on the way to ``host``: 127.0.0.1 where that is this host's own loopback."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]


def from_learner(world: World, make):
    """Return what ``make()`` gives on the learner's rank, on every rank. Collective; only for starting up."""
    return world.allgather(make() if world.rank == LEARNER_RANK else None)[LEARNER_RANK]


def first_from_each_host(world: World, make):
    """Return the first value other than None that ``make(ranks on the host)`` gives on any host, on every rank.

    Collective; only for starting up. ``make`` is called on one rank of each host.
    """
    hosts = world.allgather(sockets.gethostname())
    here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    made = world.allgather(make(here) if world.rank == here[0] else None)
    return next((value for value in made if value is not None), None)


def check_tolerance() -> None:
    """Raise :class:`ConfigError` where the loss of a rank would end the job."""
    if MAY_LOSE_VARIABLE not in os.environ:
        how = "`launch.spawn --may-lose RANK --lives N` (RANK: the evaluator's)"
        raise ConfigError(f"run.tolerate = 'actors' over zmq needs {how}; start it so")


def leave(tolerant: bool) -> int:
    """Return the exit status of a rank that has done all."""
    return 0


def abort(tolerant: bool) -> None:
    """End this rank at once with status 1, upon which ``launch.spawn`` ends all others, or starts it anew; does not return."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
