"""Payloads that stay where they are: memory that ranks of one host lend each other beside MPI.

A rank puts large messages into an *outbox*, an anonymous file in memory (memfd) that others on its host
map through ``/proc``, and sends only an empty synchronous MPI message. The receiver looks (a probe), takes
the payload out of the outbox, and receives the empty message *after* that. So the send completes when
the payload is no longer needed, exactly as if it had been in the message: what bounds messages in
flight, and the exact end of a run, hold unchanged. Nothing has a name, so nothing can be left behind.

Where the payload of the next message lies is written into a ledger at the front of the outbox, one ring of
entries for each receiver, before the message is sent; MPI delivers messages between two ranks in order.

Payload and ledger are plain memory: that a rank which has seen the message sees them too, and that what it
reads is read before the sender hears that it may write again, is the processor's keeping of the order of
stores and of loads. x86 keeps both. Others need fences that MPI promises only for its own windows, so there
nothing is lent.
"""

from __future__ import annotations

import mmap
import os
import platform
import resource
import weakref
from pathlib import Path

import numpy as np

from apex.schema import ALIGNMENT

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_KEEP_ORDER = ("x86_64", "AMD64")
_PROBE_NBYTES = 16


class Outbox:
    """Memory of this rank that ranks on its host can read.

    Attributes:
        data: uint8[nbytes], where payloads are written; memory is taken when it is first touched.
        address: int64[3], what a receiver needs to open it.
    """

    def __init__(self, world_size: int, entries: int, nbytes: int):
        ledger = world_size * entries * 2 * 8
        self._first = -(-ledger // ALIGNMENT) * ALIGNMENT
        fd = os.memfd_create("apex-outbox", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, self._first + nbytes)
        memory = np.frombuffer(mmap.mmap(fd, self._first + nbytes), np.uint8)
        self._ledger = memory[:ledger].view(np.int64).reshape(world_size, entries, 2)
        self._sent = [0] * world_size
        self.data = memory[self._first :]
        self.address = np.array([os.getpid(), fd, self._first + nbytes], np.int64)

    def holds(self, message: np.ndarray) -> bool:
        """Whether ``message`` (uint8, contiguous) lies in the outbox."""
        offset = _address(message) - _address(self.data)
        return 0 <= offset <= self.data.size - message.size

    def enter(self, dest: int, message: np.ndarray) -> None:
        """Note where the next message to rank ``dest`` lies; it must lie in ``data``."""
        entry = self._ledger[dest, self._sent[dest] % self._ledger.shape[1]]
        entry[:] = self._first + _address(message) - _address(self.data), message.size
        self._sent[dest] += 1


class Inbox:
    """The outbox of another rank of this host, as rank ``me`` reads it."""

    def __init__(self, address: np.ndarray, world_size: int, entries: int, me: int):
        pid, fd, nbytes = (int(x) for x in address)
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            self._memory = np.frombuffer(mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ), np.uint8)
        ledger = self._memory[: world_size * entries * 2 * 8].view(np.int64).reshape(world_size, entries, 2)
        self._mine, self._received = ledger[me], 0

    def next(self) -> np.ndarray:
        """Return the payload (uint8, read-only) of the oldest message that this has not returned yet."""
        offset, nbytes = (int(x) for x in self._mine[self._received % len(self._mine)])
        self._received += 1
        return self._memory[offset : offset + nbytes]


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


def neighbours(rank: int, allgather) -> set[int]:
    """Return the other ranks whose outboxes this rank can open, and they its own. Collective, by ``allgather(object)``.

    It is tried, not guessed: each rank reads random bytes from the memory of every other of its host, and
    where one of a host cannot, none there shares.
    """
    mine, nonce = identity(), os.urandom(_PROBE_NBYTES)
    probe = _make_probe(nonce) if mine else None
    mine = mine if probe is not None else ""
    told = allgather((mine, nonce, None if probe is None else probe.address))
    here = [other for other, (theirs, _, _) in enumerate(told) if theirs and theirs == mine]
    able = {other for other, good in enumerate(allgather(all(_reads(*told[other]) for other in here))) if good}
    return set(here) - {rank} if able.issuperset(here) else set()


def _make_probe(nonce: bytes) -> Outbox | None:
    try:
        probe = Outbox(1, 1, len(nonce))
    except OSError:  # not allowed here
        return None
    probe.data[:] = np.frombuffer(nonce, np.uint8)
    probe.enter(0, probe.data)
    return probe


def _reads(_identity: str, nonce: bytes, address: np.ndarray) -> bool:
    """Whether the probe at ``address`` can be opened and is the one that was told of."""
    try:
        return Inbox(address, 1, 1, 0).next().tobytes() == nonce
    except (OSError, ValueError):
        return False


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
