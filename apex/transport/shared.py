"""Payloads that stay where they are: memory that ranks of one host lend each other beside MPI.

A rank has a *desk* and *outboxes*, anonymous files in memory (memfd) that others on its host map through
``/proc``. Large messages are built in an outbox; to send one is to write on the desk where it lies and to
raise a count there. The receiver sees the count, takes the payload out of the outbox, and raises the count of
what it has taken on its own desk. So a send is complete when the payload is no longer needed, exactly as
if it had been a synchronous message: what bounds messages in flight, and the exact end of a run, hold unchanged.
No system call and no MPI call is made for a message. Nothing has a name, so nothing can be left behind.
A desk also has a bell, a pipe: who sends to a rank whose desk says that it sleeps writes a byte there (see ``bell``).

Desk and payload are plain memory: that a rank which sees a count sees the entry and the payload too, and that
what it reads is read before the sender may write there again, is the processor's keeping of the order of
stores and of loads. x86 keeps both. Others need fences that Python does not have, so there nothing is lent.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import resource
import select
import stat
import weakref
from collections import deque
from pathlib import Path

import numpy as np

from apex.refusals import Refusals

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_KEEP_ORDER = ("x86_64", "AMD64")
_WORD, _LINE = 8, 8  # bytes of a word, words of a cache line
_NONCE, _BOX = 0, 1  # words in front, the latter of file and bytes of each outbox; then a row for each rank:
_BOXES = 2
_BELL, _SLEEPS = _BOX + 2 * _BOXES, _BOX + 2 * _BOXES + 1  # the pipe's writing end; whether its owner waits at the other
_SENT, _TAKEN, _ENTRIES = 0, 1, _LINE  # counts, then the ring of entries: offset and bytes of each message
_PIPE_BYTES = 1 << 16
_REFUSAL = -1  # in place of the bytes: an answer with nothing


class Desk:
    """Where this rank writes what it lends to and has taken from each other rank, in a world of so many, ``entries`` at a time."""

    def __init__(self, world_size: int, entries: int, nonce: int = 0):
        self.entries = entries
        self._stride = _ENTRIES + -(-2 * entries // _LINE) * _LINE
        nbytes = (_LINE + world_size * self._stride) * _WORD
        fd = _memory_file(self, nbytes)
        self.words = _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE).cast("q")
        self.nonce = self.words[_NONCE] = nonce
        self.address = (os.getpid(), fd, nbytes)
        self._boxes: list[tuple[int, int]] = []  # where each begins, and its bytes
        self.bell = Bell(self.words)

    def row(self, rank: int) -> int:
        """Return the word where the row of a rank begins; the same on every desk of the world."""
        return _LINE + rank * self._stride

    def clear(self, rank: int) -> None:
        """Begin anew with a rank: another process has its number now."""
        row = self.row(rank)
        self.words[row + _SENT] = self.words[row + _TAKEN] = 0

    def make_outbox(self, nbytes: int) -> np.ndarray:
        """Return uint8[nbytes] from which payloads can be lent; asked for twice at most. Memory is taken when it is first touched."""
        if len(self._boxes) == _BOXES:
            raise RuntimeError(f"a rank has {_BOXES} outboxes")
        fd, word = _memory_file(self, nbytes), _BOX + 2 * len(self._boxes)
        box = np.frombuffer(_map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)
        self._boxes.append((_address(box), nbytes))
        self.words[word], self.words[word + 1] = fd, nbytes
        return box

    def place(self, message: np.ndarray) -> int | None:
        """Return where ``message`` (uint8, contiguous) lies: an offset in the first outbox, ~offset in the second, None in neither."""
        address = _address(message)
        for number, (start, nbytes) in enumerate(self._boxes):
            if 0 <= address - start <= nbytes - len(message):
                return ~(address - start) if number else address - start
        return None


class Bell:
    """How ranks of its host wake this one; ``words`` are those of its desk.

    The owner says that it sleeps, looks once more for messages, and only then waits: a sender that has not seen
    the word has put its message where that look finds it.
    """

    def __init__(self, words: memoryview):
        self._words = words
        self._reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for fd in (self._reads, writes):
            weakref.finalize(self, os.close, fd)
        self._poll = select.poll()
        self._poll.register(self._reads, select.POLLIN)
        words[_BELL] = writes

    def listen(self, whether: bool) -> None:
        """Say whether this rank sleeps, so that others wake it."""
        self._words[_SLEEPS] = whether

    def wait(self, seconds: float) -> bool:
        """Sleep at most this long (to the millisecond); return whether somebody has woken this rank."""
        woken = bool(self._poll.poll(max(1, round(1e3 * seconds))))
        if woken:
            os.read(self._reads, _PIPE_BYTES)
        return woken


class Peer:
    """What this rank (``me``) and another of its host lend each other."""

    def __init__(self, desk: Desk, me: int, rank: int, address: tuple[int, int, int]):
        pid, fd, nbytes = address
        self.rank, self._pid, self._desk = rank, pid, desk
        self._mine, self._my_row = desk.words, desk.row(rank)
        self._theirs, self._their_row = _open(pid, fd, nbytes).cast("q"), desk.row(me)
        self._bell = _open_bell(self, pid, self._theirs[_BELL])
        self._boxes: dict[int, np.ndarray] = {}
        self._sent = self._taken = 0
        self.open: deque[tuple[str, object]] = deque()  # (what, done) of what the other has not yet taken

    def lend(self, place: int, nbytes: int, what: str, done=None) -> None:
        """Lend ``nbytes`` at ``place`` of the outbox; ``done()`` is called by :meth:`settle` once they are taken."""
        if len(self.open) >= self._desk.entries:
            raise RuntimeError(f"rank {self.rank} has not taken {len(self.open)} messages, and there is room for no more")
        entry = self._my_row + _ENTRIES + 2 * (self._sent % self._desk.entries)
        self._mine[entry], self._mine[entry + 1] = place, nbytes
        self.open.append((what, done))
        self._sent += 1
        self._mine[self._my_row + _SENT] = self._sent  # last: whoever sees it may look at the entry
        self.wake()

    def refuse(self, what: str) -> None:
        """Answer with nothing, in order with what is lent."""
        self.lend(0, _REFUSAL, what)

    def settle(self) -> None:
        """Notice what the other rank has taken."""
        left = self._sent - self._theirs[self._their_row + _TAKEN]
        while left >= 0 and len(self.open) > left:  # nobody has taken more than was sent
            _, done = self.open.popleft()
            if done is not None:
                done()

    def has_sent(self) -> bool:
        """Whether a message of the other rank is here that has not been given back."""
        return self._theirs[self._their_row + _SENT] != self._taken

    def borrow(self) -> np.ndarray | None:
        """Return the payload (uint8, read-only) of the oldest message that is here, None for a refusal.

        Raises ValueError, OverflowError or OSError where what the other rank has written lies in none of its outboxes; it
        is to be given back all the same.
        """
        sent = self._theirs[self._their_row + _SENT]
        if not 0 < sent - self._taken <= self._desk.entries:
            self._taken = sent - 1  # all of it is given back at once
            raise ValueError(f"a count of {sent}")
        entry = self._their_row + _ENTRIES + 2 * (self._taken % self._desk.entries)
        place, nbytes = self._theirs[entry], self._theirs[entry + 1]
        if nbytes == _REFUSAL:
            return None
        number, place = (0, place) if place >= 0 else (1, ~place)
        box = self._boxes.get(number)
        if box is None:
            fd, size = self._theirs[_BOX + 2 * number], self._theirs[_BOX + 2 * number + 1]
            box = self._boxes[number] = np.frombuffer(_open(self._pid, fd, size), np.uint8)
        if not 0 <= nbytes <= len(box) - place:
            raise ValueError(f"{nbytes} bytes at {place} of {len(box)}")
        return box[place : place + nbytes]

    def give_back(self) -> None:
        """The oldest message is no longer needed: the other rank may write there again."""
        self._taken += 1
        self._mine[self._my_row + _TAKEN] = self._taken
        self.wake()

    def wake(self) -> None:
        """Wake the other rank if its desk says that it sleeps; one that is awake costs a look at memory."""
        if self._theirs[_SLEEPS]:
            with contextlib.suppress(OSError):  # it has been woken often enough, or is gone
                os.write(self._bell, b"\0")

    def has_nonce(self, nonce: int) -> bool:
        """Whether the desk that was opened is the one that this was written on."""
        return self._theirs[_NONCE] == nonce


REFUSED = object()


def borrow(peer: Peer, fits, refusals: Refusals):
    """Return the oldest payload that a peer lends, None for its refusal, or ``REFUSED`` where it is not one that ``fits(nbytes)``.

    What is refused has been given back.
    """
    try:
        message = peer.borrow()
        if message is None or fits(len(message)):
            return message
        why = f"{len(message)} bytes lent by rank {peer.rank}"
    except (ValueError, OverflowError, OSError) as error:
        why = f"what rank {peer.rank} lends: {error}"
    refusals.add(why)
    peer.give_back()
    return REFUSED


def identity() -> str:
    """Return what two ranks have in common when one may open the other's memory: kernel, processes, user; "" if none can."""
    if not hasattr(os, "memfd_create") or platform.machine() not in _KEEP_ORDER:
        return ""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:  # holds for files in memory too
        return ""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def neighbours(ranks: list[int], rank: int, desk: Desk | None, allgather) -> dict[int, Peer]:
    """Return the other ranks of this one's host, by rank. Collective, by ``allgather(object)`` in the order of the ``ranks`` that meet.

    ``desk`` is this rank's own, None where it has none. Whether they can open each other's memory is tried, not
    guessed: each reads a random number from the desk of every other of its host, and where one of a host cannot,
    none there shares.
    """
    mine = identity() if desk is not None else ""
    told = allgather((mine, *((0, None) if desk is None else (desk.nonce, desk.address))))
    here = {other: theirs for other, (name, *theirs) in zip(ranks, told) if name and name == mine}
    peers = {other: peer for other, (number, address) in here.items() if (peer := _reached(desk, rank, other, number, address))}
    able = {other for other, good in zip(ranks, allgather(len(peers) == len(here))) if good}
    if not able.issuperset(here):
        return {}
    return {other: peer for other, peer in peers.items() if other != rank}


def make_desk(world_size: int, entries: int) -> Desk | None:
    """Return a desk, or None where ranks cannot lend each other anything."""
    try:
        return Desk(world_size, entries, int.from_bytes(os.urandom(7))) if identity() else None
    except OSError:  # not allowed here
        return None


def _reached(desk: Desk, me: int, rank: int, nonce: int, address: tuple[int, int, int]) -> Peer | None:
    """Return the peer at ``address`` if it can be opened and is the one that was told of."""
    try:
        peer = Peer(desk, me, rank, address)
    except (OSError, ValueError):
        return None
    return peer if peer.has_nonce(nonce) else None


def _memory_file(owner: object, nbytes: int) -> int:
    """Return a file in memory that is closed when ``owner`` is no more."""
    fd = os.memfd_create("apex", os.MFD_CLOEXEC)
    weakref.finalize(owner, os.close, fd)
    os.ftruncate(fd, nbytes)
    return fd


def _map(fd: int, nbytes: int, protection: int) -> memoryview:
    return memoryview(mmap.mmap(fd, nbytes, prot=protection))


def _open(pid: int, fd: int, nbytes: int) -> memoryview:
    """Return the memory (read-only) of another process's file."""
    with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
        return _map(file.fileno(), nbytes, mmap.PROT_READ)


def _open_bell(owner: object, pid: int, fd: int) -> int:
    """Return the writing end of another process's pipe, closed when ``owner`` is no more. Raises OSError where it is no pipe."""
    writes = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    weakref.finalize(owner, os.close, writes)
    if not stat.S_ISFIFO(os.fstat(writes).st_mode):
        raise OSError(f"file {fd} of process {pid} is no pipe")
    return writes


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
