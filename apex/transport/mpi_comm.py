"""How ranks over MPI reach each other, also after a new process has replaced a lost one.

The ranks of the start share one communicator. A process spawned later has its own communicator with the
learner and the replay ranks; there they have their usual numbers, and it comes after them. Fault-tolerant MPI
(ULFM, Bland et al. 2013) reports a lost process as an error of a call that needs it.

Every message is matched first (MPI_Improbe) and received only where its sender, kind and length are right. A
receive into a short buffer would not refuse a long message: Open MPI 5.0.11 reports MPI_ERR_TRUNCATE, but has
written the whole message by then, beyond the end of the buffer (over TCP, and with single copies).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

T = TypeVar("T")
MESSAGES, CONTROL, HELD = range(3)
"""Each channel has its own communicator: control is probed rarely, a held message waits for a free place."""
_LOOKS_EVERY_S = 0.02
_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"  # set by mpirun
# Error classes of Open MPI that not every version of mpi4py names.
_PROC_FAILED, _PROC_FAILED_PENDING, _REVOKED = 75, 76, 77


class MatchedMessage:
    """A message that has been matched; it is to be received once."""

    def __init__(self, message: MPI.Message, status: MPI.Status):
        self._message = message
        self.source, self.tag, self.nbytes = status.source, status.tag, status.Get_count(MPI.BYTE)

    def into(self, buffer: np.ndarray) -> MPI.Request:
        """Begin to receive into the front of ``buffer``, uint8, which must have room."""
        if self.nbytes > len(buffer):
            raise ValueError(f"a message of {self.nbytes} bytes was let into a buffer of {len(buffer)}")
        return self._message.Irecv([buffer[: self.nbytes], MPI.BYTE])

    def payload(self) -> np.ndarray:
        """Receive a small message; return its payload (uint8)."""
        payload = np.empty(self.nbytes, np.uint8)
        self._message.Recv([payload, MPI.BYTE])
        return payload


def probe(comm: MPI.Comm, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> MatchedMessage | None:
    """Match a message if there is one."""
    status = MPI.Status()
    message = comm.Improbe(source, tag, status)
    return None if message is None else MatchedMessage(message, status)


class DiscardQueue:
    """Receives unwanted messages without waiting, which frees their senders."""

    def __init__(self, guarded: Callable):
        """``guarded(call)``: see :meth:`CommTable.guarded`."""
        self._guarded = guarded
        self._going: list[tuple[MPI.Request, np.ndarray]] = []

    def add(self, message: MatchedMessage) -> None:
        """Receive a message only to discard it."""
        buffer = np.empty(message.nbytes, np.uint8)
        self._going.append((message.into(buffer), buffer))

    def reap(self) -> None:
        """Free what has been received."""
        if self._going:
            self._going = [entry for entry in self._going if self._guarded(entry[0].Test) is False]

    @property
    def is_empty(self) -> bool:
        """Whether all has been received."""
        return not self._going


class Membership(NamedTuple):
    """The communicators of a rank's wire, its rank, and the size of the world."""

    comms: tuple[MPI.Comm, ...]
    rank: int
    size: int
    survives: bool  # an actor that is lost is no error
    handover: dict | None = None  # of a process that replaces a lost one

    @classmethod
    def of(cls, comm: MPI.Comm, survives: bool) -> Membership:
        """Return the membership of a rank of the start. Collective over ``comm``."""
        return cls(private(comm), comm.rank, comm.size, survives)


class CommTable:
    """The communicators of this rank's wire, by the rank that they lead to."""

    def __init__(self, membership: Membership):
        self._first, self.survives = membership.comms, membership.survives
        self._later: dict[int, tuple[MPI.Comm, ...]] = {}
        self._gone: set[int] = set()
        self._looks_at = 0.0

    def to(self, rank: int, channel: int) -> tuple[MPI.Comm, int]:
        """Return the communicator that leads to a rank, and the rank's number there."""
        later = self._later.get(rank)
        return (self._first[channel], rank) if later is None else (later[channel], later[channel].size - 1)

    def is_gone(self, rank: int) -> bool:
        """Whether a rank is lost, and not replaced."""
        return rank in self._gone

    def probe(self, channel: int) -> MatchedMessage | None:
        """Match a message of any rank, if there is one."""
        matched = self.guarded(probe, self._first[channel])
        if matched is not None or not self._later:
            return matched
        for rank, comms in self._later.items():
            matched = self.guarded(probe, comms[channel])
            if matched is not None:
                matched.source = rank
                return matched
        return None

    def join(self, rank: int, comms: tuple[MPI.Comm, ...]) -> None:
        """A new process is ``rank`` from now on."""
        self._later[rank] = comms
        self._gone.discard(rank)

    def leave(self, rank: int) -> None:
        """A rank is lost."""
        self._later.pop(rank, None)
        self._gone.add(rank)

    def guarded(self, call: Callable[..., T], *args: object) -> T | None:
        """Return the result of an MPI call, or None where a rank was lost (see :meth:`failed`)."""
        try:
            return call(*args)
        except MPI.Exception as error:
            if self.survives and error.Get_error_class() == _REVOKED:
                raise RuntimeError("this process came too late: the run continues without it") from None
            if not self.survives or error.Get_error_class() not in (_PROC_FAILED, _PROC_FAILED_PENDING):
                raise
            self._looks_at = 0.0
            return None

    def failed(self) -> list[int]:
        """Return the ranks lost since the last call; looks every ``_LOOKS_EVERY_S`` or after a failure."""
        if not self.survives or time.monotonic() < self._looks_at:
            return []
        self._looks_at = time.monotonic() + _LOOKS_EVERY_S
        found = (
            {rank for comm in self._first for rank in self._failed(comm)} - self._gone - self._later.keys()
        )
        return sorted(found) + [
            rank for rank, comms in self._later.items() if any([self._failed(comm) for comm in comms])
        ]

    @staticmethod
    def _failed(comm: MPI.Comm) -> list[int]:
        """Return the failed ranks of a communicator, and let receives from any source work again."""
        failed = comm.Get_failed()
        if failed.size:
            comm.Ack_failed(failed.size)
        ranks = MPI.Group.Translate_ranks(failed, None, comm.group) if failed.size else []
        failed.Free()
        return list(ranks)


def private(comm: MPI.Comm) -> tuple[MPI.Comm, ...]:
    """Return a copy of ``comm`` for each channel, whose errors are exceptions. Collective."""
    copies = tuple(comm.Dup() for _ in (MESSAGES, CONTROL, HELD))
    for copy in copies:
        copy.Set_errhandler(MPI.ERRORS_RETURN)
    return copies


def can_survive() -> bool:
    """Whether a run survives a lost rank: Open MPI with ``--with-ft ulfm`` and MPI_THREAD_MULTIPLE."""
    goes_on = hasattr(MPI.Comm, "Get_failed") and os.environ.get(_FT_VARIABLE) == "1"
    return goes_on and MPI.Query_thread() == MPI.THREAD_MULTIPLE
