"""Open MPI's shared memory: in a folder of the run's own, which goes with it, or with the next run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import mpirun

VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A place of shared memory, outside of any resource manager's job."""
    monkeypatch.setattr(mpirun, "_SHARED_MEMORY", tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def test_the_folder_goes_with_all_that_killed_ranks_have_left_in_it(memory):
    with mpirun.segments() as variables:
        (Path(variables[VARIABLE]) / "sm_segment").write_bytes(b"left")
        assert len(list(memory.iterdir())) == 1
    assert list(memory.iterdir()) == []


def test_what_a_killed_launcher_has_left_goes_with_the_next_run_and_what_a_living_one_uses_stays(memory):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getppid()):
        (memory / f"apex-mpi-{pid}-x").mkdir()
    with mpirun.segments():
        assert {path.name.split("-")[2] for path in memory.iterdir()} == {str(os.getppid()), str(os.getpid())}


@pytest.mark.parametrize("without", ["a place", "leave"])
def test_where_there_can_be_no_folder_open_mpi_is_left_to_itself(memory, monkeypatch, without):
    if without == "a place":
        monkeypatch.setattr(mpirun, "_SHARED_MEMORY", memory / "nowhere")
    else:
        monkeypatch.setenv("SLURM_JOB_ID", "7")  # its ranks may be on other hosts
    with mpirun.segments() as variables:
        assert variables == {}
