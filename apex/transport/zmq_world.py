"""The start and the end of a world over ZeroMQ, outside the roles' messages.

``launch.run.spawn`` gives every rank the learner's address (``APEX_ENDPOINT``: a folder of the host,
``ipc:///path``, or ``tcp://host:port``) and the job's secret (``APEX_TOKEN``). The learner binds there, and
all others connect to it. Values travel as JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import json
import math
import os
import socket as sockets
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import numpy as np
import zmq

from apex import variables
from apex.config import ConfigError
from apex.ports import PeerLost
from apex.processes import own_process
from apex.refusals import Refusals
from apex.say import warn
from apex.schema import EnvSpec
from apex.token import check_folder, read_token
from apex.topology import LEARNER_RANK, names_of
from apex.transport.zmq_link import LARGEST_CONTROL_NBYTES, LINGER_MS, Hub, Link, Message

_VALUE, _JOIN, _HERE, _UNMET = 1, 2, 3, 4  # kinds of message
_NAMES_EVERY_S = 1.0  # least time between two words of the learner that another rank has come
_LOOKS_S, _STOOD_STILL_S = 0.1, 5.0  # between two looks: as asked, and after this process was stopped
_LATER_S = 5.0  # ranks that stay silent give up later than the one that reports
_ANSWERS_S = 60.0  # a learner that is there at all


def world(expected_size: int) -> World:
    """Return the world that the environment describes, or raise :class:`ConfigError`."""
    rank, size = int(os.environ[variables.RANK]), int(os.environ[variables.SIZE])
    assert size == expected_size, "the launcher and the ranks read the same variable"
    endpoint = os.environ.get(variables.ENDPOINT, "")
    try:
        _meeting_point(endpoint)
        return World(rank, size, endpoint, read_token(os.environ.get(variables.TOKEN, "")), life())
    except (ValueError, zmq.ZMQError) as error:
        raise ConfigError(
            f"{variables.ENDPOINT}={endpoint}: no place to meet for the ranks of a job: {error}"
        ) from None


def life() -> int:
    """Return how many processes had this one's rank before it, as ``launch.run.spawn`` tells."""
    return variables.number(variables.LIFE)


class _Patience:
    """One wait for other ranks: tells once of it, after ``watchdog_s``, and ends after ``limit_s``."""

    def __init__(self, watchdog_s: float, limit_s: float = math.inf):
        self._watchdog_s, self._limit_s = watchdog_s, limit_s
        self._since = self._looked = time.monotonic()
        self._warned = False

    def has_ended(self, waits: Callable[[], str]) -> bool:
        """Whether the wait has lasted too long; ``waits()`` names who waits for whom."""
        now = time.monotonic()
        if now - self._looked > _STOOD_STILL_S:
            self._since += now - self._looked
        self._looked, waited_s = now, now - self._since
        if waited_s > self._watchdog_s and not self._warned:
            self._warned = True
            warn(f"apex: {self._watchdog_s:g} s without another rank: {waits()}")
        return waited_s > self._limit_s


class World:
    """The ranks of a job. Calls that are collective are made by all ranks, in the same order."""

    handover: dict | None = None
    """The learner's handover, where this process replaces a lost one."""

    def __init__(self, rank: int, size: int, endpoint: str, token: bytes, life: int = 0):
        self.rank, self.size, self.token, self.life = rank, size, token, life
        self._watchdog_s = math.inf  # before they have met
        self.context = zmq.Context()
        atexit.register(
            self.context.destroy, LINGER_MS
        )  # Python itself would not wait for what was sent last
        self.endpoint, self._numbers = endpoint, itertools.count()
        meeting, self.refusals = _meeting_point(endpoint), Refusals(f"rank {rank}")
        self._box: Hub | Link
        if rank == LEARNER_RANK:
            self._box = Hub(
                self.context, meeting, token, range(1, size), self.refusals, LARGEST_CONTROL_NBYTES
            )
        else:
            self._box = Link(self.context, meeting, token, rank, LEARNER_RANK, self.refusals, life)

    def hub(self, peers: Iterable[int], largest_nbytes: int | None) -> Hub:
        """Return a new place for ``peers`` to connect to, on this rank."""
        return Hub(self.context, self._new_endpoint(), self.token, peers, self.refusals, largest_nbytes)

    def link(self, endpoint: str, peer: int) -> Link:
        """Return a connection to the place that ``peer`` has made."""
        return Link(self.context, endpoint, self.token, self.rank, peer, self.refusals, self.life)

    def meet(self, watchdog_s: float, meet_s: float) -> None:
        """Return once all ranks are there. Collective; the first of all.

        After ``watchdog_s`` without another rank, one line names the missing ranks and their meeting point.
        Raises :class:`PeerLost` after ``meet_s`` without one, on the rank that is to tell; the others end
        here, with status 1.
        """
        self._watchdog_s = watchdog_s
        if self.rank == LEARNER_RANK:
            self._gather_the_ranks(meet_s)
        else:
            self._meet_the_learner(meet_s)

    def _gather_the_ranks(self, meet_s: float) -> None:
        here: set[int] = set()
        patience, named_at = _Patience(self._watchdog_s, meet_s), -math.inf
        while len(here) < self.size - 1:
            message = self._waited_for(
                patience, lambda: f"the learner (rank 0) waits for {self._missing(here)}"
            )
            if message is None:
                self._give_up(here)
                raise PeerLost(
                    f"ranks are missing: {self._missing(here)} did not come within {meet_s:g} s (run.meet_s)"
                )
            here.add(message[0])
            patience = _Patience(self._watchdog_s, meet_s)
            names_all = time.monotonic() - named_at > _NAMES_EVERY_S
            named_at = time.monotonic() if names_all else named_at
            self._tell(here if names_all else {message[0]}, _HERE)
        self._tell(here, _VALUE, _encoded(None))

    def _missing(self, here: set[int]) -> str:
        missing = names_of(set(range(1, self.size)) - here, self.size)
        return f"{missing}, expected at {_meeting_point(self.endpoint)}"

    def _tell(
        self, ranks: Iterable[int], kind: int, payload: np.ndarray | None = None, may_lose: bool = False
    ) -> None:
        """On the learner: tell some ranks, of which some may have ended."""
        assert isinstance(self._box, Hub), "the learner tells, and all others ask"
        if may_lose:
            self._box.may_lose = frozenset(ranks)
        for rank in ranks:
            self._box.send(rank, kind, 0, payload)

    def _ask(self, kind: int, value: object) -> None:
        """On all other ranks: tell the learner."""
        assert isinstance(self._box, Link), "the learner tells, and all others ask"
        self._box.send(kind, 0, _encoded(value))

    def _give_up(self, here: set[int]) -> None:
        self._tell(here, _UNMET, may_lose=True)
        self.context.destroy(LINGER_MS)

    def _meet_the_learner(self, meet_s: float) -> None:
        speaks = self.rank == max(1, variables.number(variables.FIRST, self.rank))
        limit_s = meet_s if speaks else meet_s + _LATER_S
        has_met, place = False, _meeting_point(self.endpoint)
        self._ask(_VALUE, None)
        while True:
            patience = _Patience(math.inf if has_met or not speaks else self._watchdog_s, limit_s)
            message = self._waited_for(
                patience, lambda: f"rank {self.rank} waits for the learner, expected at {place}"
            )
            if message is None and speaks:
                raise PeerLost(
                    f"the learner (rank 0) did not come to {place} within {meet_s:g} s (run.meet_s)"
                )
            if message is None or message[1] == _UNMET:
                raise SystemExit(1)
            if message[1] == _VALUE:
                return
            has_met, limit_s = True, meet_s + _LATER_S

    def _waited_for(self, patience: _Patience, waits: Callable[[], str]) -> tuple[int, int, object] | None:
        """Return ``(rank, kind, value)`` of the next message, or None where the patience has ended."""
        while True:
            if self._box.socket.poll(round(1e3 * _LOOKS_S)) and (message := self._next()) is not None:
                return message
            if patience.has_ended(waits):
                return None

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks. Collective; waits in the kernel."""
        if self.rank != LEARNER_RANK:
            self._ask(_VALUE, value)
            patience = _Patience(self._watchdog_s if self.rank == 1 else math.inf)
            while not _has_length(
                gathered := self._value(patience, "ranks wait for the learner (rank 0)")[1], self.size
            ):
                self._box.refuse()
            return list(gathered)
        values = {LEARNER_RANK: value}
        while len(values) < self.size:
            missing = names_of(set(range(self.size)) - set(values), self.size)
            rank, peer_value = self._value(
                _Patience(self._watchdog_s), f"the learner (rank 0) waits for {missing}, which start"
            )
            values.setdefault(rank, peer_value)  # no rank sends its next value before it has all of these
        in_order = [values[rank] for rank in range(self.size)]
        self._tell(range(1, self.size), _VALUE, _encoded(in_order))
        return in_order

    def _value(self, patience: _Patience, waits: str) -> tuple[int, Any]:
        while True:
            message = self._waited_for(patience, lambda: waits)
            if message is not None and message[1] == _VALUE:
                return message[0], message[2]

    def join(self) -> dict | None:
        """Join in the place of a lost process; return the learner's handover, None where the run ends."""
        self._ask(_JOIN, [sockets.gethostname(), *own_process()])
        while self._box.socket.poll(round(1e3 * _ANSWERS_S)):
            message = self._box.receive()
            value = _REFUSED if message is None else _read(self._box, message, _VALUE)
            if value is None or isinstance(value, dict):
                self.handover = value
                return value
        return None

    def joiner(self) -> tuple[int, list] | None:
        """On the learner, during the run: return a rank that wants to join and its process, or None."""
        message = self._box.receive()
        value = _REFUSED if message is None else _read(self._box, message, _JOIN)
        if message is None or value is _REFUSED:
            return None
        if not isinstance(value, list) or [type(part) for part in value] != [str, int, int]:
            self._box.refuse()
            return None
        return message.rank, value

    def answer(self, rank: int, handover: dict | None) -> None:
        """On the learner: tell a rank that has joined."""
        self._tell([rank], _VALUE, _encoded(handover), may_lose=True)

    def _next(self) -> tuple[int, int, object] | None:
        """Return ``(rank, kind, value)`` of a message that has arrived, or None where it has been refused."""
        message = self._box.receive()
        if message is None:
            return None
        if message.kind in (_HERE, _UNMET) and not message.has_payload and message.rank == LEARNER_RANK:
            return message.rank, message.kind, None
        value = _read(self._box, message, _VALUE, _JOIN)
        if value is _REFUSED:
            return None
        if message.kind == _JOIN:
            raise PeerLost(f"rank {message.rank} ended before the ranks of this job had met")
        return message.rank, message.kind, value

    def _new_endpoint(self) -> str:
        parts = urlsplit(self.endpoint)
        if parts.scheme == "ipc":
            return f"{self.endpoint}/{self.rank}-{next(self._numbers)}"
        return f"tcp://{_address_towards(parts.hostname or '', parts.port or 0)}:*"


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


def _read(box: Hub | Link, message: Message, *kinds: int) -> object:
    """Return the value in a message of one of these kinds, or that it has been refused."""
    if message.kind not in kinds or not message.has_payload:
        box.refuse()
        return _REFUSED
    text = box.payload()
    if text is None:
        return _REFUSED
    try:
        return json.loads(text.tobytes(), object_hook=_decoded)
    except (ValueError, TypeError, KeyError, RecursionError):  # not UTF-8, not JSON, or not of our values
        box.refuse()
        return _REFUSED


def _has_length(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


def _encoded(value: object) -> np.ndarray:
    return np.frombuffer(json.dumps(value, default=_as_plain).encode(), np.uint8)


def _as_plain(value: object) -> dict[str, Any]:
    """Return what the JSON of one of our own values holds."""
    if isinstance(value, Path):
        return {"Path": str(value)}
    if isinstance(value, EnvSpec):
        return {"EnvSpec": dataclasses.asdict(value)}
    raise TypeError(f"{type(value).__name__} does not travel between ranks")


def _decoded(table: dict[str, Any]) -> object:
    if set(table) == {"Path"}:
        return Path(table["Path"])
    if set(table) == {"EnvSpec"}:
        fields = table["EnvSpec"]
        spec = EnvSpec(**fields | {"frame_shape": tuple(fields["frame_shape"])})
        if np.dtype(spec.frame_dtype).hasobject or any(
            type(n) is not int for n in (*spec.frame_shape, spec.stack, spec.num_actions)
        ):
            raise ValueError("not the shape of an environment")
        return spec
    return table


def _address_towards(host: str, port: int) -> str:
    """Return this host's address on the way to ``host``: 127.0.0.1 where that is this host's own loopback."""
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def meet(world: World, watchdog_s: float, meet_s: float) -> None:
    """See :meth:`World.meet`; a process that takes a lost one's place does not meet the others here."""
    if not world.life:
        world.meet(watchdog_s, meet_s)


def all_begin(world: World) -> None:
    """Wait for all ranks. Collective; after ``watchdog_s`` the learner names the missing ones."""
    world.allgather(None)


def from_learner(world: World, make: Callable[[], Any]) -> Any:
    """Return what ``make()`` gives on the learner's rank, on every rank. Collective; only for starting up."""
    return world.allgather(make() if world.rank == LEARNER_RANK else None)[LEARNER_RANK]


def first_from_each_host(world: World, make: Callable[[list[int]], Any]) -> Any:
    """Return the first value other than None that ``make(ranks on the host)`` returns on any host.

    Collective; only for starting up. ``make`` is called on one rank of each host.
    """
    hosts = world.allgather(sockets.gethostname())
    here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    made = world.allgather(make(here) if world.rank == here[0] else None)
    return next((value for value in made if value is not None), None)


def check_tolerance() -> None:
    """Raise :class:`ConfigError` where the loss of a rank would end the job."""
    if variables.MAY_LOSE not in os.environ:
        how = "`launch.run.spawn --may-lose RANK --lives N` (RANK: the evaluator's)"
        raise ConfigError(f"run.fault_tolerance = 'actors' over zmq needs {how}; start it so")


def leave(tolerant: bool) -> int:
    """Return the exit status of a rank that has done all."""
    return 0


def abort(tolerant: bool) -> NoReturn:
    """End this rank with status 1, without return; ``launch.run.spawn`` ends all others, or replaces it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)
