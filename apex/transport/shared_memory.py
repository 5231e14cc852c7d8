"""Payloads that stay where they are: memory of one host that its ranks read in place, beside MPI.

A rank has a *control page* and up to two *arenas*, anonymous files in memory (memfd) that other ranks of its
host map through ``/proc``. Large messages are built in an arena; to post one is to write on the control page
where it lies and to raise a count there. The receiver sees the count, reads the payload in the arena, and
raises the count of what it has released on its own page. So a message is complete when the payload is no
longer needed, exactly as if it had been a synchronous message: what bounds messages in flight, and the exact
end of a run, hold unchanged. No system call and no MPI call is made for a message. Nothing has a name, so
nothing can be left behind. A page also has a bell, a pipe: who posts to a rank whose page says that it sleeps
writes a byte there (see ``bell``).

Pages and arenas are plain memory: that a rank which sees a count sees the entry and the payload too, and that
what it reads is read before the sender may write there again, is the processor's keeping of the order of
stores and of loads. x86 keeps both. Others need fences that Python does not have, so there nothing is shared.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import resource
import select
import stat
import sys
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_KEEP_ORDER = ("x86_64", "AMD64")
_NOTHING = np.zeros(0, np.uint8)
_WORD, _LINE = 8, 8  # bytes of a word, words of a cache line
_NONCE, _ARENA = 0, 1  # words in front, the latter of file and bytes of each arena; then a row for each rank:
_ARENAS = 2
# The pipe's writing end; whether its owner waits at the other.
_BELL, _SLEEPS = _ARENA + 2 * _ARENAS, _ARENA + 2 * _ARENAS + 1
# Counts, then the ring of entries: kind, offset and bytes of each message.
_SENT, _RELEASED, _ENTRIES = 0, 1, _LINE
_ENTRY = 3  # words
_PIPE_BYTES = 1 << 16


class ControlPage:
    """What this rank has posted to, and released of, each other rank; ``entries`` at a time."""

    def __init__(self, world_size: int, entries: int, nonce: int = 0):
        self.entries = entries
        self._stride = _ENTRIES + -(-_ENTRY * entries // _LINE) * _LINE
        nbytes = (_LINE + world_size * self._stride) * _WORD
        fd = _memory_file(self, nbytes)
        self.words = _map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE).cast("q")
        self.nonce = self.words[_NONCE] = nonce
        self.address = (os.getpid(), fd, nbytes)
        self._arenas: list[tuple[int, int]] = []  # where each begins, and its bytes
        self.bell = Bell(self.words)

    def row(self, rank: int) -> int:
        """Return the word where the row of a rank begins; the same on every page of the world."""
        return _LINE + rank * self._stride

    def clear(self, rank: int) -> None:
        """Reset the counts of a rank that another process has taken over."""
        row = self.row(rank)
        self.words[row + _SENT] = self.words[row + _RELEASED] = 0

    def make_arena(self, nbytes: int) -> np.ndarray:
        """Return uint8[nbytes] to post payloads from; call it twice at most. Untouched pages cost nothing."""
        if len(self._arenas) == _ARENAS:
            raise RuntimeError(f"a rank has {_ARENAS} arenas")
        fd, word = _memory_file(self, nbytes), _ARENA + 2 * len(self._arenas)
        arena = np.frombuffer(_map(fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE), np.uint8)
        self._arenas.append((_address(arena), nbytes))
        self.words[word], self.words[word + 1] = fd, nbytes
        return arena

    def place(self, message: np.ndarray) -> int | None:
        """Return the offset of uint8 ``message`` in the first arena, ~offset in the second, or None."""
        address = _address(message)
        for number, (start, nbytes) in enumerate(self._arenas):
            if 0 <= address - start <= nbytes - len(message):
                return ~(address - start) if number else address - start
        return None


class Bell:
    """How ranks of its host wake this one; ``words`` are those of its page.

    The owner marks that it sleeps, looks once more for messages, and only then waits. So a sender that has
    not seen the mark has posted its message in time for that look.
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


class SharedPeer:
    """What this rank (``me``) and another of its host post to each other."""

    def __init__(self, page: ControlPage, me: int, rank: int, address: tuple[int, int, int]):
        pid, fd, nbytes = address
        self.rank, self._pid, self._page = rank, pid, page
        self._mine, self._my_row = page.words, page.row(rank)
        self._theirs, self._their_row = _open(pid, fd, nbytes).cast("q"), page.row(me)
        self._bell = _open_bell(self, pid, self._theirs[_BELL])
        self._arenas: dict[int, np.ndarray] = {}
        self._sent = self._seen = self._released = 0
        self.open: deque[tuple[int, int]] = deque()  # (kind, token) of what the other has not released

    def post(self, kind: int, place: int, nbytes: int, token: int = 0) -> None:
        """Post ``nbytes`` at ``place`` of an arena (see :meth:`ControlPage.place`)."""
        if len(self.open) >= self._page.entries:
            raise RuntimeError(
                f"rank {self.rank} has not released {len(self.open)} messages, and there is room for no more"
            )
        entry = self._my_row + _ENTRIES + _ENTRY * (self._sent % self._page.entries)
        self._mine[entry], self._mine[entry + 1], self._mine[entry + 2] = kind, place, nbytes
        self.open.append((kind, token))
        self._sent += 1
        self._mine[self._my_row + _SENT] = self._sent  # last: whoever sees it may look at the entry
        self.wake()

    def reap(self) -> list[tuple[int, int]]:
        """Return ``(kind, token)`` of what the other rank has released since the last call."""
        left = self._sent - self._theirs[self._their_row + _RELEASED]
        if left < 0:  # a peer cannot release more than was sent
            return []
        return [self.open.popleft() for _ in range(len(self.open) - left)]

    def next_kind(self) -> int | None:
        """Return the kind of the next message to :meth:`peek` at, as its sender states it, or None."""
        if self._theirs[self._their_row + _SENT] == self._seen:
            return None
        return self._theirs[self._their_row + _ENTRIES + _ENTRY * (self._seen % self._page.entries)]

    def peek(self) -> np.ndarray:
        """Return the payload (uint8, read-only) of the oldest new message; :meth:`release` it afterwards.

        Raises ValueError, OverflowError or OSError where what the other rank has written lies in none of its
        arenas; that too is to be released.
        """
        sent = self._theirs[self._their_row + _SENT]
        if not (sent - self._seen > 0 and sent - self._released <= self._page.entries):
            self._seen, self._released = sent, sent - 1  # all of it is released at once
            raise ValueError(f"a count of {sent}")
        entry = self._their_row + _ENTRIES + _ENTRY * (self._seen % self._page.entries)
        self._seen += 1
        place, nbytes = self._theirs[entry + 1], self._theirs[entry + 2]
        number, place = (0, place) if place >= 0 else (1, ~place)
        if not nbytes:
            return _NOTHING
        arena = self._arenas.get(number)
        if arena is None:
            fd, size = self._theirs[_ARENA + 2 * number], self._theirs[_ARENA + 2 * number + 1]
            arena = self._arenas[number] = np.frombuffer(_open(self._pid, fd, size), np.uint8)
        if not 0 <= nbytes <= len(arena) - place:
            raise ValueError(f"{nbytes} bytes at {place} of {len(arena)}")
        return arena[place : place + nbytes]

    def release(self) -> None:
        """The oldest message that was peeked at is no longer needed: the other rank may write there again."""
        self._released += 1
        self._mine[self._my_row + _RELEASED] = self._released
        self.wake()

    def wake(self) -> None:
        """Wake the other rank if its page says that it sleeps; one that is awake costs a look at memory."""
        if self._theirs[_SLEEPS]:
            with contextlib.suppress(OSError):  # it has been woken often enough, or is gone
                os.write(self._bell, b"\0")

    def has_nonce(self, nonce: int) -> bool:
        """Whether the page that was opened is the one that this was written on."""
        return self._theirs[_NONCE] == nonce


def identity() -> str:
    """Return what two ranks share if one may open the other's memory: kernel, pid namespace, user."""
    if sys.platform != "linux" or platform.machine() not in _KEEP_ORDER:
        return ""
    if (
        resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    ):  # holds for files in memory too
        return ""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""


def neighbours(
    ranks: list[int], rank: int, page: ControlPage | None, allgather: Callable[[Any], list[Any]]
) -> dict[int, SharedPeer]:
    """Return the other ranks of this host that share memory, by rank. Collective, through ``allgather``.

    ``page`` is this rank's own, None where it has none. Whether they can open each other's memory is tried,
    not guessed: each reads a random number from the page of every other of its host, and where one of a host
    cannot, none there shares.
    """
    mine = identity() if page is not None else ""
    gathered = allgather((mine, *((0, None) if page is None else (page.nonce, page.address))))
    here = {other: theirs for other, (name, *theirs) in zip(ranks, gathered) if name and name == mine}
    peers: dict[int, SharedPeer] = {}
    for other, (number, address) in here.items():
        peer = None if page is None else _reached(page, rank, other, number, address)
        if peer is not None:
            peers[other] = peer
    able = {other for other, good in zip(ranks, allgather(len(peers) == len(here))) if good}
    if not able.issuperset(here):
        return {}
    return {other: peer for other, peer in peers.items() if other != rank}


def make_page(world_size: int, entries: int) -> ControlPage | None:
    """Return a page, or None where ranks cannot share memory."""
    try:
        return ControlPage(world_size, entries, int.from_bytes(os.urandom(7))) if identity() else None
    except OSError:  # not allowed here
        return None


def _reached(
    page: ControlPage, me: int, rank: int, nonce: int, address: tuple[int, int, int]
) -> SharedPeer | None:
    """Return the peer at ``address`` if it can be opened and has the expected nonce."""
    try:
        peer = SharedPeer(page, me, rank, address)
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
    """Return the writing end of another process's pipe, closed with ``owner``; OSError for another file."""
    writes = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    weakref.finalize(owner, os.close, writes)
    if not stat.S_ISFIFO(os.fstat(writes).st_mode):
        raise OSError(f"file {fd} of process {pid} is no pipe")
    return writes


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
