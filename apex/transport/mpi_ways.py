"""How ranks over MPI reach each other, also where a new process has taken the place of one that was lost.

The ranks of the start share one communicator. A process that comes later shares one with the learner and the
replay ranks, whom alone it has to do with; there they have their usual numbers, and it comes after them. That
a process is gone is what fault-tolerant MPI (ULFM, Bland et al. 2013) tells: by an error of a call that needs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from mpi4py import MPI

from apex.transport.checked import Arrived, probe

MESSAGES, ANNOUNCEMENTS, INTAKES = range(3)
"""Communicators of their own: announcements are looked for now and then, intake waits until there is a place for it."""
_LOOKS_EVERY_S = 0.02
_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"  # set by mpirun
_PROC_FAILED, _PROC_FAILED_PENDING, _REVOKED = 75, 76, 77  # error classes of Open MPI's, for which mpi4py has no names in every version


class Meeting(NamedTuple):
    """Where a rank meets the others: communicators of its port alone."""

    comms: tuple[MPI.Comm, ...]
    rank: int
    tolerant: bool  # an actor that is lost is no error
    about: dict | None = None  # of a process that came later: what the learner told it

    @classmethod
    def of(cls, comm: MPI.Comm, tolerant: bool) -> Meeting:
        """Return that of a rank of the start. Collective over ``comm``."""
        return cls(private(comm), comm.rank, tolerant)


class Ways:
    """The communicators of this rank's port, by whom they lead to."""

    def __init__(self, meeting: Meeting):
        self._first, self.tolerant = meeting.comms, meeting.tolerant
        self._later: dict[int, tuple[MPI.Comm, ...]] = {}
        self._gone: set[int] = set()
        self._looks_at = 0.0
        self.heard: Callable[[Arrived], None] = lambda arrived: None
        """Called with every message that is matched."""

    def to(self, rank: int, channel: int) -> tuple[MPI.Comm, int]:
        """Return the communicator that leads to a rank, and the rank's number there."""
        later = self._later.get(rank)
        return (self._first[channel], rank) if later is None else (later[channel], later[channel].size - 1)

    def is_gone(self, rank: int) -> bool:
        """Whether a rank is lost, and not replaced."""
        return rank in self._gone

    def probe(self, channel: int, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Arrived | None:
        """Match a message of any rank, or of one of those of the start, if there is one."""
        arrived = self._probe(channel, source, tag)
        if arrived is not None:
            self.heard(arrived)
        return arrived

    def _probe(self, channel: int, source: int, tag: int) -> Arrived | None:
        arrived = self.tried(probe, self._first[channel], source, tag)
        if arrived is not None or source != MPI.ANY_SOURCE:
            return arrived
        for rank, comms in self._later.items():
            arrived = self.tried(probe, comms[channel], source, tag)
            if arrived is not None:
                arrived.source = rank
                return arrived
        return None

    def join(self, rank: int, comms: tuple[MPI.Comm, ...]) -> None:
        """A new process is ``rank`` from now on."""
        self._later[rank] = comms
        self._gone.discard(rank)

    def leave(self, rank: int) -> None:
        """A rank is lost."""
        self._later.pop(rank, None)
        self._gone.add(rank)

    def tried(self, call, *args):
        """Return what an MPI call gives, or None where it fails because of a rank that is lost; :meth:`lost` then tells which."""
        try:
            return call(*args)
        except MPI.Exception as error:
            if self.tolerant and error.Get_error_class() == _REVOKED:
                raise RuntimeError("this process has come too late: the run goes on without it") from None
            if not self.tolerant or error.Get_error_class() not in (_PROC_FAILED, _PROC_FAILED_PENDING):
                raise
            self._looks_at = 0.0
            return None

    def lost(self) -> list[int]:
        """Return the ranks found lost since the last call; looks every ``_LOOKS_EVERY_S``, or at once after a call has failed."""
        now = time.monotonic()
        if not self.tolerant or now < self._looks_at:
            return []
        self._looks_at = now + _LOOKS_EVERY_S
        found = {rank for comm in self._first for rank in self._failed(comm)} - self._gone - self._later.keys()
        return sorted(found) + [rank for rank, comms in self._later.items() if any([self._failed(comm) for comm in comms])]

    @staticmethod
    def _failed(comm: MPI.Comm) -> list[int]:
        """Return who of a communicator has failed, and let messages of any other be received again."""
        failed = comm.Get_failed()
        if failed.size:
            comm.Ack_failed(failed.size)
        ranks = MPI.Group.Translate_ranks(failed, None, comm.group) if failed.size else []
        failed.Free()
        return list(ranks)


def private(comm: MPI.Comm) -> tuple[MPI.Comm, ...]:
    """Return a copy of ``comm`` for each channel, whose errors are exceptions. Collective."""
    copies = tuple(comm.Dup() for _ in (MESSAGES, ANNOUNCEMENTS, INTAKES))
    for copy in copies:
        copy.Set_errhandler(MPI.ERRORS_RETURN)
    return copies


def can_tolerate() -> bool:
    """Whether the library goes on when a rank is lost, Open MPI under ``mpirun --with-ft ulfm``, and lets a thread start another."""
    goes_on = hasattr(MPI.Comm, "Get_failed") and os.environ.get(_FT_VARIABLE) == "1"
    return goes_on and MPI.Query_thread() == MPI.THREAD_MULTIPLE
