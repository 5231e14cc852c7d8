"""A tolerant run of which a rank is killed before all have met: it ends with one line, and is not waited for for ever."""

import os
import signal
import sys

import pytest

from apex.run_folder import RunFolder

TRAIN = [sys.executable, "-m", "launch.main", "train", "cartpole", "--tolerate", "actors"]
LAST, STARTS_S, ENDS_S = 4, 60, 60
pytestmark = pytest.mark.spread


@pytest.mark.parametrize("transport", ["mpi", "zmq"])
def test_a_rank_that_is_killed_before_all_have_met_ends_the_job_with_one_line(start, tmp_path, inject, transport):
    env = inject(LAST, late_s=1000)
    settings = ["--set", "actor.count=2", "--set", "run.meet_s=20", "--set", f"run.directory={tmp_path / 'runs'}"]
    job = start([*TRAIN, "--transport", transport, *settings], env)
    job.wait_until(lambda: _is_there(job), STARTS_S, "the last rank")
    os.kill(job.rank(LAST), signal.SIGKILL)
    ended = job.wait(ENDS_S)
    assert ended.returncode not in (0, 2)
    told = [line for line in ended.stderr.splitlines() if "before" in line and "had met" in line]
    assert len(told) == 1, ended.stderr[-3000:]
    assert RunFolder(tmp_path / "runs" / "latest").result()["reason"] == "error"


def _is_there(job) -> bool:
    try:
        return bool(job.rank(LAST))
    except StopIteration:
        return False
