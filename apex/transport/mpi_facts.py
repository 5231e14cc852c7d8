"""What `apex doctor` asks the MPI library of a rank."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from mpi4py import MPI


def facts(comm: MPI.Comm) -> dict:
    """Return what this rank's library says of itself, and the ranks that it takes to be on this host. Collective."""
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
    paths = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/libmpi" in line}
    return sorted(path for path in paths if Path(path).is_file())
