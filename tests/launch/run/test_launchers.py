"""Open MPI's shared memory: in a folder of the run's own, which goes with it, or with the next run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from apex import leftovers
from launch.run import launchers

VARIABLE = "OMPI_MCA_btl_sm_backing_directory"


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A place of shared memory, outside of any resource manager's job."""
    monkeypatch.setattr(launchers, "SHARED_MEMORY", tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def test_the_folder_goes_with_all_that_killed_ranks_have_left_in_it(memory):
    with launchers.segments() as variables:
        (Path(variables[VARIABLE]) / "sm_segment").write_bytes(b"left")
        assert len(list(memory.iterdir())) == 1
    assert list(memory.iterdir()) == []


IN_USE = """
import sys
from pathlib import Path
from launch.run import launchers
launchers.SHARED_MEMORY = Path(sys.argv[1])
with launchers.segments() as variables:
    print(variables[sys.argv[2]], flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=[[], ["unshare", "--pid", "--fork", "--kill-child"]], ids=["here", "in a container"])
def launcher(request, memory):
    """A process that uses a folder, here or where processes are counted anew; and its folder."""
    command = [*request.param, sys.executable]
    if request.param and subprocess.run([*command, "-c", ""], capture_output=True).returncode:
        pytest.skip("no namespace of their own for processes here")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, "-c", IN_USE, memory, VARIABLE],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_the_folder_of_a_living_launcher_stays_and_goes_with_it(memory, launcher):
    process, folder = launcher
    with launchers.segments() as variables:
        assert sorted(memory.iterdir()) == sorted([folder, Path(variables[VARIABLE])])
    process.stdin.close()
    assert process.wait(60) == 0
    assert list(memory.iterdir()) == []


def test_what_a_killed_launcher_has_left_goes_with_the_next_run(memory, launcher):
    process, folder = launcher
    (folder / "sm_segment").write_bytes(b"left")
    process.kill()
    with leftovers._locked(folder):  # once the kernel has ended all of it
        assert folder.exists()
    with launchers.segments() as variables:
        assert list(memory.iterdir()) == [Path(variables[VARIABLE])]


def test_a_folder_is_left_over_even_where_its_maker_s_process_id_is_used_again(memory):
    (memory / f"apex-segments-{os.getppid()}-x").mkdir()
    with launchers.segments() as variables:
        assert list(memory.iterdir()) == [Path(variables[VARIABLE])]


@pytest.mark.parametrize("without", ["a place", "leave"])
def test_where_there_can_be_no_folder_open_mpi_is_left_to_itself(memory, monkeypatch, without):
    if without == "a place":
        monkeypatch.setattr(launchers, "SHARED_MEMORY", memory / "nowhere")
    else:
        monkeypatch.setenv("SLURM_JOB_ID", "7")  # its ranks may be on other hosts
    with launchers.segments() as variables:
        assert variables == ({"OMPI_MCA_btl": "^tcp"} if without == "a place" else {})
