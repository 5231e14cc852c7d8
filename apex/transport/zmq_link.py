"""Frames on ZeroMQ sockets: a header, then at most one payload, between peers that are known by name.

The rank that binds has a ROUTER (:class:`Hub`), the ranks that connect a DEALER each (:class:`Link`). A
peer's name is the job's secret token, its rank and its life (how many processes had that rank before). So a
socket recognises strangers, and processes that were replaced, before it looks at their messages. It refuses
and counts what strangers send. Over TCP everything is encrypted.

No message is ever dropped on the way: the ports count credits, which bound what is in flight. A peer without
credits can have ``_MOST_UNREAD`` messages here unread; the rest waits on its side.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import zmq
from zmq.backend import Socket
from zmq.utils import z85

from apex.config import ConfigError
from apex.ports import PeerLost
from apex.refusals import Refusals
from apex.schema import aligned_bytes

_HEADER = struct.Struct("<4sIq")  # what this is, kind, argument
_MAGIC = b"Apex"
_get, _send = Socket.get, Socket.send  # what wraps them costs more than the calls themselves
_EVENTS, _RCVMORE, _POLLIN, _SNDMORE = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN), int(zmq.SNDMORE)
_NAME = struct.Struct("<cII")  # then the token
LINGER_MS = 3000  # for the last messages; a reader that is gone holds a rank no longer
_NO_COPY_NBYTES = 1 << 16  # below, copying costs less than telling when a buffer is free
_REFUSALS_PER_RECEIVE = 64
_MOST_UNREAD = 64  # from one peer, whose credits are far fewer
_ALIGNED = 8  # bytes; the widest element of any field
LARGEST_CONTROL_NBYTES = 1 << 20
_ENCRYPTION_NBYTES = 64  # CURVE adds 33 to a frame; ZeroMQ cuts the connection of a larger one


class Message(NamedTuple):
    """A header that has arrived; its payload, if there is one, is to be taken next."""

    rank: int
    kind: int
    arg: int
    has_payload: bool


class _Mailbox:
    """Receiving and sending on one socket."""

    def __init__(self, socket: zmq.Socket, refusals: Refusals, endpoint: str, token: bytes):
        self.socket = socket
        if over_tcp(endpoint):
            encrypt(socket, token)
        self.refusals = refusals
        socket.linger = LINGER_MS
        socket.sndhwm, socket.rcvhwm = 0, _MOST_UNREAD

    def close(self) -> None:
        """Close; what has been sent still leaves, for as long as the linger time."""
        self.socket.close()

    def receive(self) -> Message | None:
        """Return the next message of a known peer, or None. Whoever sends anything else is refused."""
        for _ in range(_REFUSALS_PER_RECEIVE):
            if not has_input(self.socket):
                return None
            message = self._header()
            if message is not None:
                return message
            self._drop() if self._is_late else self.refuse()
        return None

    def payload(self) -> np.ndarray | None:
        """Return the payload, uint8, where it arrived (see :func:`aligned`); None where it is refused."""
        frame = self.socket.recv(copy=False)
        if self._more():
            self.refuse()
            return None
        return np.frombuffer(frame.buffer, np.uint8)

    def refuse(self) -> None:
        """Drop the rest of the message, and count it."""
        self._drop()
        self.refusals.add("other", "a message from outside this run")

    _is_late = False  # the message is from a life of its rank that is over

    def _drop(self) -> None:
        while self._more():
            self.socket.recv_into(bytearray())

    def _header(self) -> Message | None:
        raise NotImplementedError

    def _parse(self, rank: int | None) -> Message | None:
        """Read the header frame, which is next."""
        header = bytearray(_HEADER.size)
        if rank is None or self.socket.recv_into(header) != _HEADER.size:
            return None
        magic, kind, arg = _HEADER.unpack(header)
        return Message(rank, kind, arg, self._more()) if magic == _MAGIC else None

    def _more(self) -> bool:
        return bool(_get(self.socket, _RCVMORE))

    def _send(
        self, kind: int, arg: int, payload: np.ndarray | None, track: bool
    ) -> zmq.MessageTracker | None:
        """Send header and payload; with ``track``, return what tells when the payload's buffer is free."""
        _send(self.socket, _HEADER.pack(_MAGIC, kind, arg), 0 if payload is None else _SNDMORE)
        if payload is None:
            return None
        if len(payload) < _NO_COPY_NBYTES:
            _send(self.socket, payload.data)
            return None
        tracker = _send(self.socket, payload.data, copy=False, track=track)
        return tracker if track else None


class Hub(_Mailbox):
    """Where peers connect to: binds, and knows them by name."""

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        token: bytes,
        peers: Iterable[int],
        refusals: Refusals,
        largest_nbytes: int | None,
    ):
        super().__init__(context.socket(zmq.ROUTER), refusals, endpoint, token)
        self._token, self._life_of = token, dict.fromkeys(peers, 0)
        self.may_lose: frozenset[int] = frozenset()  # to send to one of them once it is gone is no error
        self.socket.router_mandatory = True  # a message lost in silence would be worse than a failure
        # A message a little too long is refused alone; ZeroMQ reads nothing of a larger one, and cuts it off.
        largest = 0 if largest_nbytes is None else max(largest_nbytes, LARGEST_CONTROL_NBYTES)
        self.socket.maxmsgsize = largest + LARGEST_CONTROL_NBYTES + _ENCRYPTION_NBYTES if largest else -1
        self._broken = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def count_cuts(self) -> None:
        """Count the connections that ended since the last call; ranks end theirs at the end of the run."""
        while has_input(self._broken):
            self._broken.recv_multipart()
            if not self.may_lose:  # else the sender was most likely lost
                self.refusals.add("other", "a message that is too large, or its sender has gone")

    def close(self) -> None:
        """Close, and stop watching."""
        self.socket.disable_monitor()
        super().close()

    def send(
        self, rank: int, kind: int, arg: int = 0, payload: np.ndarray | None = None, track: bool = False
    ) -> zmq.MessageTracker | None:
        """Send to a peer (see ``_Mailbox._send``)."""
        try:
            _send(self.socket, self.name_of(rank), _SNDMORE)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if rank not in self.may_lose:
                raise PeerLost(f"rank {rank} was lost, and the run needs it") from None
            return None
        return self._send(kind, arg, payload, track)

    def name_of(self, rank: int) -> bytes:
        """Return what the process calls itself that has this rank now."""
        return name(self._token, rank, self._life_of[rank])

    def _header(self) -> Message | None:
        rank, life = _read_name(self.socket.recv(), self._token)
        current = self._life_of.get(rank) if rank is not None else None
        self._is_late = current is not None and life < current
        if rank is None or current is None or self._is_late:
            return None
        self._life_of[rank] = life
        return self._parse(rank if self._more() else None)


class Link(_Mailbox):
    """The way to a peer that binds."""

    def __init__(
        self,
        context: zmq.Context,
        endpoint: str,
        token: bytes,
        rank: int,
        peer: int,
        refusals: Refusals,
        life: int = 0,
    ):
        super().__init__(context.socket(zmq.DEALER), refusals, endpoint, token)
        self._peer = peer
        self.socket.routing_id = name(token, rank, life)
        self.socket.reconnect_ivl = 10  # ms; the peer may bind a little later
        self._watch = (
            self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) if endpoint.startswith("tcp:") else None
        )
        self.socket.connect(endpoint)

    def is_lost(self) -> bool:
        """Whether the connection to another host has broken; what arrived before can still be received."""
        return self._watch is not None and has_input(self._watch)

    def close(self) -> None:
        """Close, and stop watching."""
        if self._watch is not None:
            self.socket.disable_monitor()
        super().close()

    def send(
        self, kind: int, arg: int = 0, payload: np.ndarray | None = None, track: bool = False
    ) -> zmq.MessageTracker | None:
        """Send (see ``_Mailbox._send``)."""
        return self._send(kind, arg, payload, track)

    def _header(self) -> Message | None:
        return self._parse(self._peer)


def aligned(message: np.ndarray) -> np.ndarray:
    """Return uint8 ``message`` so that every field of it is aligned: itself where it is, else a copy."""
    if not len(message) or message.ctypes.data % _ALIGNED == 0:
        return message
    copy = aligned_bytes(len(message))
    copy[:] = message
    return copy


def has_input(socket: zmq.Socket) -> bool:
    """Whether a message can be received from a socket without waiting."""
    return bool(int(_get(socket, _EVENTS)) & _POLLIN)


def name(token: bytes, rank: int, life: int = 0) -> bytes:
    """Return the name of a rank's socket. ZeroMQ makes up names too, but those begin with a zero byte."""
    return _NAME.pack(b"r", rank, life) + token


def _read_name(called: bytes, token: bytes) -> tuple[int | None, int]:
    """Return the rank and the life in a name, or (None, 0) where it is none of this job's."""
    if not hmac.compare_digest(called[_NAME.size :], token):
        return None, 0
    prefix, rank, life = _NAME.unpack(called[: _NAME.size])
    return (rank, life) if prefix == b"r" else (None, 0)


def over_tcp(endpoint: str) -> bool:
    """Whether other hosts, or other users of this one, can connect there or bind in its place."""
    return urlsplit(endpoint).scheme == "tcp"


def encrypt(socket: zmq.Socket, token: bytes) -> None:
    """Encrypt a ROUTER or DEALER by CURVE (RFC 26), with the job's key pair, derived from its secret token.

    Who does not know the token neither gets a connection nor can read what others send.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            "this ZeroMQ has no CURVE, without which nothing is sent over TCP; install the pyzmq wheel"
        )
    secret = z85.encode(hashlib.sha256(b"apex-mpi key of a job" + token).digest())
    public = zmq.curve_public(secret)
    socket.curve_secretkey, socket.curve_publickey = secret, public
    if socket.type == zmq.ROUTER:
        socket.curve_server = True
    else:
        socket.curve_serverkey = public


def wait_on(boxes: Iterable[Hub | Link]) -> Callable[[float], None]:
    """Return ``wait(seconds)``: sleep until a box has a message, at most so long, to the millisecond."""
    inputs = [(box.socket, zmq.POLLIN) for box in boxes]

    def wait(seconds: float) -> None:
        zmq.zmq_poll(inputs, max(1, round(1e3 * seconds)))

    return wait
