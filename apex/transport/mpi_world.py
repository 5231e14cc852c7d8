"""The start and the end of an MPI world, outside the roles' messages."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from mpi4py import MPI

from apex.config import ConfigError
from apex.topology import LEARNER_RANK
from apex.transport.mpi_comm import can_survive

T = TypeVar("T")
_MPICH = "/dev/shm/mpich_shm_"


def world(expected_size: int) -> MPI.Comm:
    """Return COMM_WORLD; raises :class:`ConfigError` where MPI and the launcher differ on its size."""
    comm = MPI.COMM_WORLD
    if comm.size != expected_size:
        library = MPI.Get_library_version().split(",")[0].strip("\0")
        raise ConfigError(
            f"the launcher started {expected_size} ranks, but {library} sees a world of {comm.size}: "
            "mpirun and the MPI library of mpi4py differ, or variables of an earlier MPI job are still set"
        )
    _unname_shared_memory(comm)
    return comm


def life() -> int:
    """Return 0: over MPI a process that replaces a lost one is spawned by the run (see ``mpi_spawn``)."""
    return 0


def meet(comm: MPI.Comm, watchdog_s: float, meet_s: float) -> None:
    """Return at once: MPI_Init has waited for all ranks, and the launcher watches them."""
    _wait_for_all(comm)


def all_begin(comm: MPI.Comm) -> None:
    """Return once all ranks have called this. Collective."""
    _wait_for_all(comm)


def _unname_shared_memory(comm: MPI.Comm) -> None:
    """Unlink MPICH's shared memory once all ranks have opened it, so that killed ranks leave nothing behind.

    Its place and name cannot be chosen, so nobody could tell later whose a file was. The memory itself stays
    while it is mapped, and MPICH ends well without the name. Collective.
    """
    if "MPICH" not in MPI.Get_library_version():
        return
    _wait_for_all(comm)
    mapped = {
        line.split(maxsplit=5)[-1].rstrip("\n")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if _MPICH in line
    }
    for name in mapped:
        with contextlib.suppress(OSError):  # another rank was first
            os.unlink(name)


def _wait_for_all(comm: MPI.Comm) -> None:
    all_here = comm.Ibarrier()
    while not all_here.Test():
        time.sleep(1e-3)  # waiting inside MPI, ranks would take the cores that others need


def from_learner(comm: MPI.Comm, make: Callable[[], T]) -> T:
    """Return what ``make()`` gives on the learner's rank, on every rank. Collective; only for starting up."""
    made = make() if comm.rank == LEARNER_RANK else None
    _wait_for_all(comm)
    return comm.bcast(made, LEARNER_RANK)


def first_from_each_host(comm: MPI.Comm, make: Callable[[list[int]], T | None]) -> T | None:
    """Return the first value other than None that ``make(ranks on the host)`` returns on any host.

    Collective; only for starting up. ``make`` is called on one rank of each host.
    """
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = host.allgather(comm.rank)
    host.Free()
    made = comm.allgather(make(sorted(ranks)) if comm.rank == min(ranks) else None)
    return next((value for value in made if value is not None), None)


def check_tolerance() -> None:
    """Raise :class:`ConfigError` where the loss of a rank would end the job."""
    if not can_survive():
        needed = "Open MPI 5 under `mpirun --with-ft ulfm`, with MPI_THREAD_MULTIPLE"
        raise ConfigError(
            f"run.fault_tolerance = 'actors' over mpi needs {needed}; start it so, or take --transport zmq"
        )


def leave(tolerant: bool) -> int:
    """Return the exit status of a rank that is done. After a loss MPI cannot be finalised: exit here."""
    if tolerant:
        _flush()
        os._exit(0)
    return 0


def abort(tolerant: bool) -> NoReturn:
    """End all ranks at once with status 1; does not return.

    Where losses are survived this rank alone ends, and as if it were killed, since of any other end its
    launcher would tell nobody. Without a learner or replay rank the others end by themselves.
    """
    _flush()
    if tolerant:
        os.kill(os.getpid(), signal.SIGKILL)
    MPI.COMM_WORLD.Abort(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def facts(comm: MPI.Comm) -> dict:
    """Return the MPI library's version and the ranks that it sees on this host. Collective."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    near = sorted(host.allgather(comm.rank))
    host.Free()
    return {"library": library(), "cuda_aware": _cuda_aware(), "near": near}


def library() -> str:
    """Return the name and version of the library: ``"Open MPI 5.0.11"``, ``"MPICH 5.0.2"``."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _cuda_aware() -> bool | None:
    """Return whether the library takes addresses on a GPU; None where it has no such question."""
    for path in _loaded_libraries():
        with contextlib.suppress(AttributeError):  # the library has no such function
            return bool(ctypes.CDLL(path).MPIX_Query_cuda_support())
    return None


def _loaded_libraries() -> list[str]:
    """Return the MPI libraries that this process has loaded."""
    paths = {
        line.split(maxsplit=5)[-1].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libmpi" in line
    }
    return sorted(path for path in paths if Path(path).is_file())
