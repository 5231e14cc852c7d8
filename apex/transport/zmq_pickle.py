"""``zmq-pickle``: the form in which Ape-X is usually written over ZeroMQ. Only for comparison, and on one host.

Lists of transitions are pickled and sent through ROUTER/DEALER proxies to asyncio workers in the replay rank,
which live in a thread beside its main one. What bounds messages in flight is that each is answered when it
has been taken. Reports, weights and the end go through a ROUTER of the learner.

Unpickling runs what the sender wishes. So the sockets lie in the job's own folder, which only its user can enter,
and every message comes with the badge of its sender, as the name of a DEALER or in a frame from a ROUTER. It is
checked before anything is unpickled. What comes without one is refused and counted.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections import deque
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from apex.config import ConfigError
from apex.refusals import Refusals
from apex.schema import Limits
from apex.topology import ACTOR, LEARNER, LEARNER_RANK, REPLAY, Topology
from apex.transport.pickled import Kind, PickledPort
from apex.transport.pickled import make_port as make_pickled_port
from apex.transport.pickled_form import Form, dumps
from apex.transport.private import Badges, check_folder

_TAKEN, _HELLO = 0, -1  # kinds of the wire's own
_WORKERS = 4  # of each proxy
_LINGER_MS, _ALL_HERE_MS = 2_000, 60_000


def make_port(world, topology: Topology, limits: Limits, form: Form) -> PickledPort:
    """Return this rank's port in a world of ``apex.transport.zmq_world``, whose ranks meet in a folder.

    Raises :class:`ConfigError` where they do not, or where others than their user may enter it.
    """
    wire = ZmqWire(_folder(world.endpoint), world.token, world.rank, topology)
    port = make_pickled_port(wire, world.rank, topology, limits, form)
    port.refusals = wire.refusals  # one count for both
    return port


def _folder(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme != "ipc":
        raise ConfigError(f"zmq-pickle needs all ranks on one host and ipc:///folder as endpoint, not {endpoint}")
    try:
        check_folder(parts.path)
    except ValueError as error:
        raise ConfigError(f"zmq-pickle: {error}") from None
    return parts.path


def _socket(context: zmq.Context, kind: int, identity: bytes | None = None):
    socket = context.socket(kind)
    socket.sndhwm = socket.rcvhwm = 0  # credits bound what is in flight
    socket.linger = _LINGER_MS
    if identity is not None:
        socket.identity = identity
    return socket


class ZmqWire:
    """Sends and receives pickled objects; ``done`` is called when the receiver's answer says that it has taken one."""

    def __init__(self, folder: str, token: bytes, rank: int, topology: Topology):
        self.rank, self.topology, self._folder = rank, topology, folder
        self.refusals = Refusals(topology.name(rank))
        self._badges = Badges(token, range(topology.size))
        self._context = zmq.Context()
        self._numbers, self._open = itertools.count(), {}
        self._inbox: deque[tuple] = deque()
        self._dealers: dict[int, zmq.Socket] = {}  # to the proxies of replay ranks
        self._servers: dict[str, _Server] = {}
        role = topology.role(rank)[0]
        if role in (LEARNER, ACTOR):
            name = "learner" if role == LEARNER else "intake"
            self._dealers = {replay: self._connect(replay, name) for replay in topology.replay_ranks_range}
        if role == REPLAY:
            self._servers = {name: self._server(name) for name in ("intake", "learner")}
        self._control = self._meet()

    def send(self, dest: int, kind: Kind, content, done=None) -> None:
        """Send ``content`` pickled."""
        number = next(self._numbers)
        self._open[number] = f"{self.topology.name(dest)} to take {kind.name.lower()}", done
        message = kind, number, content
        if kind == Kind.SAMPLE:
            self._servers["learner"].send(dest, message)
        elif kind in (Kind.INTAKE, Kind.REQUEST, Kind.PRIORITIES):
            self._dealers[dest].send(dumps(message), copy=False)
        else:
            self._send_control(dest, message)

    def receive(self, intake: bool) -> tuple | None:
        """Return ``(source, kind, content)`` of a message that has arrived, or None."""
        server = self._servers.get("intake" if intake else "learner")
        arrived = None if server is None else server.take()
        if arrived is None and not intake and self._inbox:
            return self._inbox.popleft()
        return arrived

    def open_sends(self) -> list[str]:
        """Name the sends that have not been taken."""
        return [what for what, _ in self._open.values()]

    def progress(self) -> None:
        """Read all sockets of this thread, and complete the sends that have been taken."""
        while (parts := _read(self._control)) is not None:
            self._hear(parts, None if self.rank == LEARNER_RANK else LEARNER_RANK, self._send_control)
        for replay, dealer in self._dealers.items():
            while (parts := _read(dealer)) is not None:
                self._hear(parts, replay, lambda _, answer, dealer=dealer: dealer.send(dumps(answer)))
        for server in self._servers.values():
            while server.taken:
                self._complete(server.taken.popleft())

    def close(self) -> None:
        """End threads and close all sockets, after what was sent has left."""
        for server in self._servers.values():
            server.close()
        for socket in (self._control, *self._dealers.values()):
            socket.close()
        self._context.term()
        for server in self._servers.values():
            server.join()

    def _server(self, name: str) -> _Server:
        return _Server(self._context, self._address(self.rank, name), self.rank, self._badges, self.refusals)

    def _address(self, rank: int, name: str) -> str:
        return f"ipc://{self._folder}/pickle-{rank}-{name}"

    def _connect(self, rank: int, name: str) -> zmq.Socket:
        dealer = _socket(self._context, zmq.DEALER, self._badges.of(self.rank))
        dealer.connect(self._address(rank, name))
        return dealer

    def _meet(self) -> zmq.Socket:
        """Return the socket to the learner, or the learner's to all others once these are here."""
        if self.rank != LEARNER_RANK:
            dealer = self._connect(LEARNER_RANK, "control")
            dealer.send(dumps((_HELLO, 0, None)))
            if not dealer.poll(_ALL_HERE_MS):
                raise TimeoutError(f"no answer from the learner within {_ALL_HERE_MS / 1000:g} s")
            dealer.recv_multipart()
            return dealer
        router = _socket(self._context, zmq.ROUTER)
        router.router_mandatory = True
        router.bind(self._address(LEARNER_RANK, "control"))
        self._await_all(router)
        for rank in range(1, self.topology.size):  # nobody sends anything else before
            router.send_multipart([self._badges.of(rank), self._badges.of(self.rank), dumps((_HELLO, 0, None))])
        return router

    def _await_all(self, router: zmq.Socket) -> None:
        """Hear once of every other rank."""
        missing = set(range(1, self.topology.size))
        while missing:
            if not router.poll(_ALL_HERE_MS):
                raise TimeoutError(f"not all of {self.topology.size} ranks were here within {_ALL_HERE_MS / 1000:g} s")
            missing.discard(_sender(router.recv_multipart(copy=False), self._badges, self.refusals))

    def _send_control(self, dest: int, message: tuple) -> None:
        to = [self._badges.of(dest), self._badges.of(self.rank)] if self.rank == LEARNER_RANK else []
        self._control.send_multipart([*to, dumps(message)], copy=False)

    def _hear(self, parts: list[zmq.Frame], expected: int | None, answer) -> None:
        """Take a message of the rank that is ``expected``, None for any of the job's; refuse all others."""
        source = _sender(parts, self._badges, self.refusals, expected)
        if source is None:
            return
        kind, number, content = pickle.loads(parts[-1].buffer)
        if kind == _TAKEN:
            self._complete(number)
        else:
            self._inbox.append((source, kind, content))
            answer(source, (_TAKEN, number, None))

    def _complete(self, number: int) -> None:
        _, done = self._open.pop(number)
        if done is not None:
            done()


def _sender(parts: list[zmq.Frame], badges: Badges, refusals: Refusals, expected: int | None = None) -> int | None:
    """Return the rank from which a message comes: a badge and one frame more; None, and count it, where it is a stranger."""
    rank = badges.rank(parts[0].bytes) if len(parts) == 2 else None
    if rank is None or expected not in (None, rank):
        refusals.add("a message from outside this run")
        return None
    return rank


def _read(socket: zmq.Socket) -> list[zmq.Frame] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


class _Server:
    """A ROUTER, a proxy, and workers behind its DEALER: a thread for the proxy and one for the workers.

    Attributes:
        taken: numbers of this rank's messages that their receivers have taken.
    """

    def __init__(self, context: zmq.Context, address: str, rank: int, badges: Badges, refusals: Refusals):
        self._context, self._address = context, address
        self._own_badge, self._badges, self._refusals = badges.of(rank), badges, refusals
        self._arrived: deque[tuple] = deque()
        self.taken: deque[int] = deque()
        self._loop = asyncio.new_event_loop()
        front, back = _socket(context, zmq.ROUTER), _socket(context, zmq.DEALER)
        front.router_mandatory = True
        front.bind(address)
        back.bind(self._inside())
        self._threads = [
            threading.Thread(target=self._proxy, args=(front, back), daemon=True),
            threading.Thread(target=self._loop.run_until_complete, args=(self._work(),), daemon=True),
        ]
        self._stop, self._ready = asyncio.Event(), threading.Event()
        for thread in self._threads:
            thread.start()
        self._ready.wait()

    def take(self) -> tuple | None:
        """Return the oldest message and let its worker answer."""
        if not self._arrived:
            return None
        source, kind, content, taken = self._arrived.popleft()
        self._loop.call_soon_threadsafe(taken.set_result, None)
        return source, kind, content

    def send(self, dest: int, message: tuple) -> None:
        """Have a worker pickle and send ``message`` to a rank that has sent here before."""
        asyncio.run_coroutine_threadsafe(self._send(self._sockets[message[1] % _WORKERS], self._badges.of(dest), message), self._loop)

    def close(self) -> None:
        """End the workers; the proxy ends with the context."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._threads[1].join()

    def join(self) -> None:
        """Wait for the proxy's end."""
        self._threads[0].join()

    def _inside(self) -> str:
        return f"inproc://{self._address}"

    def _proxy(self, front: zmq.Socket, back: zmq.Socket) -> None:
        try:
            zmq.proxy(front, back)
        except zmq.ContextTerminated:
            front.close()
            back.close()

    async def _work(self) -> None:
        context = zmq.asyncio.Context(shadow=self._context)
        self._sockets = [_socket(context, zmq.DEALER) for _ in range(_WORKERS)]
        for socket in self._sockets:
            socket.connect(self._inside())
        workers = [asyncio.create_task(self._worker(socket)) for socket in self._sockets]
        self._ready.set()
        await self._stop.wait()
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for socket in self._sockets:
            socket.close()

    async def _worker(self, socket: zmq.asyncio.Socket) -> None:
        """Unpickle one message of a rank at a time; hold it until the main thread has taken it, then answer."""
        while True:
            parts = await socket.recv_multipart(copy=False)
            source = _sender(parts, self._badges, self._refusals)
            if source is None:
                continue
            kind, number, content = pickle.loads(parts[-1].buffer)
            if kind == _TAKEN:
                self.taken.append(number)
                continue
            taken = self._loop.create_future()
            self._arrived.append((source, kind, content, taken))
            await taken
            await self._send(socket, self._badges.of(source), (_TAKEN, number, None))

    async def _send(self, socket: zmq.asyncio.Socket, identity: bytes, message: tuple) -> None:
        await socket.send_multipart([identity, self._own_badge, dumps(message)], copy=False)
