"""MPICH's shared memory has no name once all ranks have met, so that kill -9 leaves nothing of it."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

MPIEXEC = shutil.which("mpiexec.hydra")
pytestmark = pytest.mark.skipif(
    MPIEXEC is None, reason="MPICH is not on PATH (`pip install mpich` into an environment of its own)"
)

RANK = """
import sys, time
from pathlib import Path
from mpi4py import MPI
from apex.transport import mpi_world
mapped = lambda: {line.split()[5] for line in open("/proc/self/maps") if "/dev/shm/mpich" in line}
before = mapped()
comm = mpi_world.world(2)
assert comm.allgather(bytes(1 << 20)) == [bytes(1 << 20)] * 2
Path(sys.argv[1], str(comm.rank)).write_text(" ".join(before))
if sys.argv[2] == "stays":
    time.sleep(1000)
"""


def environment() -> dict[str, str]:
    library = next(Path(MPIEXEC).resolve().parent.parent.glob("lib/**/libmpi.so.12"))
    return {"MPI4PY_LIBMPI": str(library), "PATH": f"{Path(MPIEXEC).parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("how", ["stays", "ends"])
def test_ranks_that_have_met_leave_no_segment_and_mpich_ends_well_without_its_name(start, tmp_path, how):
    told = [tmp_path / "0", tmp_path / "1"]
    job = start([MPIEXEC, "-n", 2, sys.executable, "-c", RANK, tmp_path, how], environment())
    if how == "ends":
        assert job.wait(60).returncode == 0
    else:
        job.wait_until(lambda: all(path.exists() and path.read_text() for path in told), 60, "two ranks")
        for pid in job.processes():
            os.kill(pid, signal.SIGKILL)
        job.wait(10)
    named = {name for path in told for name in path.read_text().split()}
    assert named, "else this test shows nothing"
    assert not [name for name in named if Path(name).exists()]
