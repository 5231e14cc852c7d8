"""How a process that takes a lost one's place joins (see ``mpi_replace``). It imports as little as it can: the others wait."""

from __future__ import annotations

from typing import NamedTuple

from mpi4py import MPI

from apex.config import ConfigError
from apex.topology import LEARNER_RANK


class Joining(NamedTuple):
    """A process that has been told what it is, and has still to meet learner and replay ranks."""

    comm: MPI.Comm
    about: dict


def meet() -> Joining:
    """Return what this process is told. Raises :class:`ConfigError` where nobody has started it."""
    both = MPI.Comm.Get_parent()
    if both == MPI.COMM_NULL:
        raise ConfigError("this program is started by a run, in the place of an actor that it has lost")
    both.Set_errhandler(MPI.ERRORS_RETURN)
    comm = both.Merge(high=True)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return Joining(comm, comm.bcast(None, LEARNER_RANK))


def meeting(joining: Joining):
    """Return ``(meeting, desk, peers)`` for the port; from here on the run goes on without waiting for this process."""
    from apex.transport.mpi_ways import Meeting, private
    from apex.transport.process import own_process
    from apex.transport.shared import make_desk, neighbours

    comm, about = joining
    desk = make_desk(about["size"], about["entries"])
    peers = neighbours([*range(comm.size - 1), about["rank"]], about["rank"], desk, comm.allgather)
    comm.allgather((MPI.Get_processor_name(), *own_process()))
    return Meeting(private(comm), about["rank"], True, about), desk, peers
