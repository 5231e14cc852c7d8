"""A new process in the place of a lost one: MPI_Comm_spawn, while all other ranks continue.

The core (learner and replay ranks, which the run needs) spawns it together, over a communicator of its own.
A start takes a second and blocks inside MPI, so each rank of the core waits in a thread. The new process
imports as little as possible before it has joined: the core waits for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

from apex.config import ConfigError
from apex.processes import end_process, own_process
from apex.topology import LEARNER_RANK

if TYPE_CHECKING:  # a new process imports as little as it can before it has joined
    from apex.transport.mpi_comm import Membership
    from apex.transport.shared_memory import ControlPage, SharedPeer

PATIENCE_S = 60.0  # a process that ends before it has begun MPI is waited for for ever
_PATIENCE_AT_END_S = 10.0  # the same, when the run ends


class Joining(NamedTuple):
    """A new process that knows its rank and has still to meet the core."""

    comm: MPI.Comm
    handover: dict


class Newcomer(NamedTuple):
    """A process that has joined as ``rank``."""

    rank: int
    comms: tuple[MPI.Comm, ...]
    peer: SharedPeer | None  # where it is on this rank's host
    process: tuple[str, int, int]  # its host, process id, and when it began


def accept() -> Joining:
    """In the new process: return its handover; raises :class:`ConfigError` where it was not spawned."""
    both = MPI.Comm.Get_parent()
    if both == MPI.COMM_NULL:
        raise ConfigError("this program is started by a run, in the place of an actor that it has lost")
    both.Set_errhandler(MPI.ERRORS_RETURN)
    comm = both.Merge(high=True)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return Joining(comm, comm.bcast(None, LEARNER_RANK))


def connect(joining: Joining) -> tuple[Membership, ControlPage | None, dict[int, SharedPeer]]:
    """In the new process: return ``(membership, page, peers)`` of its wire; nobody waits for it any more."""
    from apex.transport.mpi_comm import Membership, private
    from apex.transport.shared_memory import make_page, neighbours

    comm, handover = joining
    rank, size = handover["rank"], handover["size"]
    page = make_page(size, handover["entries"])
    peers = neighbours([*range(comm.size - 1), rank], rank, page, comm.allgather)
    comm.allgather((MPI.Get_processor_name(), *own_process()))
    return Membership(private(comm), rank, size, True, handover), page, peers


class Spawner:
    """What the core starts together. ``command`` is that of a new process; it matters on the learner only."""

    def __init__(self, comm: MPI.Intracomm, core: list[int], command: list[str], page: ControlPage | None):
        """Collective over the ranks ``core`` of ``comm``."""
        self._service = comm.Create_group(comm.group.Incl(core))
        self._service.Set_errhandler(MPI.ERRORS_RETURN)
        self._rank, self._command, self._page = comm.rank, command, page
        self._asked: deque[dict] = deque()
        self._thread: threading.Thread | None = None
        self._handover: dict | None = None
        self._patient_until, self._hurries = 0.0, False
        self._outcome: Newcomer | str | None = None
        self.has_started = False  # the last one: it has begun, whether or not it has joined
        self.broken: str | None = None  # why none can be started any more

    @property
    def busy(self) -> bool:
        """Whether a process is being started, or is still to be."""
        return self.broken is None and (self._thread is not None or bool(self._asked))

    def ask(self, handover: dict) -> None:
        """Queue the start of a process; it receives the learner's ``handover``, which holds its ``rank``."""
        self._asked.append(handover)

    def next(self) -> dict | None:
        """Return the handover of the next process to start now, None while another is being started."""
        return self._asked.popleft() if self._thread is None and self.broken is None and self._asked else None

    def begin(self, handover: dict) -> None:
        """Begin, on all of the core, what :meth:`next` has returned."""
        self.has_started = False
        self._handover, self._outcome, self._patient_until = handover, None, time.monotonic() + PATIENCE_S
        self._thread = threading.Thread(target=self._run, name="replacement", daemon=True)
        self._thread.start()

    def hurry(self) -> None:
        """The run ends, and is not to wait for long for a process that may not come."""
        if not self._hurries:
            self._hurries = True
            self._patient_until = min(self._patient_until, time.monotonic() + _PATIENCE_AT_END_S)

    def ended(self) -> Newcomer | str | None:
        """Return the newcomer, or why none has joined; None while that is open and there is time left."""
        if self._thread is None:
            return None
        if self._thread.is_alive():
            if time.monotonic() <= self._patient_until:
                return None
            self.has_started = False
            self.broken = self._outcome = (
                f"no process has joined within {_PATIENCE_AT_END_S if self._hurries else PATIENCE_S:g} s"
            )
        self._thread = None
        return self._outcome

    def waiting(self) -> list[dict]:
        """Return, and forget, the handovers in the queue."""
        asked, self._asked = list(self._asked), deque()
        return asked

    def _run(self) -> None:
        try:
            newcomer = self._start()
            if self.broken is None:
                self._outcome = newcomer
            elif newcomer.peer is not None:  # too late: no rank will ever receive from it
                end_process(*newcomer.process[1:])
            else:
                for comm in newcomer.comms:
                    comm.Revoke()
        except BaseException as error:  # the run continues without this process, whatever happened
            why = f"{type(error).__name__}: {error}"
            self._outcome = f"its process has ended before it had joined ({why})" if self.has_started else why

    def _start(self) -> Newcomer:
        from apex.transport.mpi_comm import private
        from apex.transport.shared_memory import neighbours

        program, *arguments = self._command
        both = self._service.Spawn(program, arguments, maxprocs=1, root=LEARNER_RANK)
        self.has_started = True
        both.Set_errhandler(MPI.ERRORS_RETURN)
        comm = both.Merge(high=False)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            handover = comm.bcast(self._handover, LEARNER_RANK)
            rank = handover["rank"]
            if self._page is not None:
                self._page.clear(rank)
            peers = neighbours([*range(comm.size - 1), rank], self._rank, self._page, comm.allgather)
            process = comm.allgather(None)[-1]
            return Newcomer(rank, private(comm), peers.get(rank), process)
        except MPI.Exception:
            comm.Revoke()  # so that nobody waits there
            raise
