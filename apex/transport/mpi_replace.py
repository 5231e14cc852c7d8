"""A new process in the place of one that was lost: MPI_Comm_spawn, while all others go on.

Learner and replay ranks start it together, over a communicator that only they have. Starting takes a second, in
which MPI must be waited for; so each does it in a thread. The newcomer joins with :mod:`apex.transport.mpi_newcomer`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

from mpi4py import MPI

from apex.topology import LEARNER_RANK
from apex.transport.mpi_ways import private
from apex.transport.process import end_process
from apex.transport.shared import Desk, Peer, neighbours

PATIENCE_S = 60.0  # a process that ends before it has begun MPI is waited for for ever
_PATIENCE_AT_END_S = 10.0  # the same, when the run ends


class Newcomer(NamedTuple):
    """A process that has joined as ``rank``."""

    rank: int
    comms: tuple[MPI.Comm, ...]
    peer: Peer | None  # where it is on this rank's host
    process: tuple[str, int, int]  # its host, number, and when it began


class Replacements:
    """What learner and replay ranks start together. ``command`` is that of a new process; it matters on the learner only."""

    def __init__(self, comm: MPI.Comm, ranks: list[int], command: list[str], desk: Desk | None):
        """Collective over ``ranks`` of ``comm``: the learner and all replay ranks."""
        self._service = comm.Create_group(comm.group.Incl(ranks))
        self._service.Set_errhandler(MPI.ERRORS_RETURN)
        self._rank, self._command, self._desk = comm.rank, command, desk
        self._asked: deque[dict] = deque()
        self._thread: threading.Thread | None = None
        self._about: dict | None = None
        self._patient_until, self._hurries = 0.0, False
        self._outcome: Newcomer | str | None = None
        self.has_started = False  # the last one: it has begun, whether or not it has joined
        self.broken: str | None = None  # why none can be started any more

    @property
    def busy(self) -> bool:
        """Whether a process is being started, or is still to be."""
        return self.broken is None and (self._thread is not None or bool(self._asked))

    def ask(self, about: dict) -> None:
        """Have a process started once none is being started; it is told what the learner's ``about`` says, with its ``rank``."""
        self._asked.append(about)

    def next(self) -> dict | None:
        """Return what the next process is told, if there is one to be started now: the last has joined, and was told by :meth:`ended`."""
        return self._asked.popleft() if self._thread is None and self.broken is None and self._asked else None

    def begin(self, about: dict) -> None:
        """Begin, on all of them, what :meth:`next` has returned."""
        self.has_started = False
        self._about, self._outcome, self._patient_until = about, None, time.monotonic() + PATIENCE_S
        self._thread = threading.Thread(target=self._run, name="replacement", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """The run ends, and is not to wait for long for a process that may not come."""
        if not self._hurries:
            self._hurries = True
            self._patient_until = min(self._patient_until, time.monotonic() + _PATIENCE_AT_END_S)

    def ended(self) -> Newcomer | str | None:
        """Return who has joined, or why nobody has; None while that is open, for as long as there is time."""
        if self._thread is None:
            return None
        if self._thread.is_alive():
            if time.monotonic() <= self._patient_until:
                return None
            self.has_started = False
            self.broken = self._outcome = f"no process has joined within {_PATIENCE_AT_END_S if self._hurries else PATIENCE_S:g} s"
        self._thread = None
        return self._outcome

    def waiting(self) -> list[dict]:
        """Return, and forget, what is still to be started."""
        asked, self._asked = list(self._asked), deque()
        return asked

    def _run(self) -> None:
        try:
            newcomer = self._start()
            if self.broken is None:
                self._outcome = newcomer
            elif newcomer.peer is not None:  # too late: nobody will ever hear it
                end_process(*newcomer.process[1:])
            else:
                for comm in newcomer.comms:
                    comm.Revoke()
        except BaseException as error:  # whatever it is, the run goes on without this process
            why = f"{type(error).__name__}: {error}"
            self._outcome = f"its process has ended before it had joined ({why})" if self.has_started else why

    def _start(self) -> Newcomer:
        program, *arguments = self._command
        both = self._service.Spawn(program, arguments, maxprocs=1, root=LEARNER_RANK)
        self.has_started = True
        both.Set_errhandler(MPI.ERRORS_RETURN)
        comm = both.Merge(high=False)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            about = comm.bcast(self._about, LEARNER_RANK)
            if self._desk is not None:
                self._desk.clear(about["rank"])
            numbers = [*range(comm.size - 1), about["rank"]]
            peers = neighbours(numbers, self._rank, self._desk, comm.allgather)
            process = comm.allgather(None)[-1]
            return Newcomer(about["rank"], private(comm), peers.get(about["rank"]), process)
        except MPI.Exception:
            comm.Revoke()  # so that nobody waits there
            raise
