"""Runs of which a rank is killed before all have met, or never comes.

They end with one line, and nobody waits for ever.
"""

import os
import re
import signal
import sys

import pytest

from apex.run_folder import RunFolder

TRAIN = [sys.executable, "-m", "launch.cli.main", "train", "cartpole"]
LAST, ENDS_S = 4, 60
pytestmark = pytest.mark.spread


@pytest.mark.parametrize("transport", ["mpi", "zmq"])
def test_a_rank_that_is_killed_before_all_have_met_ends_the_job_with_one_line(
    start, tmp_path, inject, transport
):
    job = start(
        _run(tmp_path, transport, "run.fault_tolerance=actors", "run.meet_s=20"), inject(LAST, late_s=1000)
    )
    os.kill(job.rank(LAST), signal.SIGKILL)
    told = _told_at_the_end(job, tmp_path)
    # Over ZeroMQ another process takes its place, which does not come either.
    assert re.fullmatch(
        rf"apex: .*(before .* had met|{LAST} of 5.* did not come within 20 s \(run.meet_s\))", told
    ), told


def test_the_launcher_gives_up_over_mpi_once_no_rank_has_come_for_too_long(start, tmp_path, inject):
    # Rank 3 comes when the first have waited for most of what the launcher waits after it.
    env = inject(LAST, late_s=1000, late_too={"3": 4})
    job = start(_run(tmp_path, "mpi", "run.watchdog_s=1", "run.meet_s=6"), env)
    told = _told_at_the_end(job, tmp_path)
    # A slow machine may miss more ranks than the one that never comes.
    assert re.fullmatch(rf"apex: ranks? .*{LAST} of 5 did not come within 6 s \(run.meet_s\)", told), told


def _run(tmp_path, transport: str, *settings: str) -> list:
    """Return the command of a run of five ranks."""
    settings = ["actor.count=2", f"run.directory={tmp_path / 'runs'}", *settings]
    return [*TRAIN, "--transport", transport, *(text for setting in settings for text in ("--set", setting))]


def _told_at_the_end(job, tmp_path) -> str:
    """Return the last line of a run, which is an error."""
    ended = job.wait(ENDS_S)
    result = RunFolder(tmp_path / "runs" / "latest").result()
    assert (ended.returncode, result["reason"]) == (result["status"], "error") and ended.returncode not in (
        0,
        2,
    ), ended.stderr[-3000:]
    return ended.stderr.splitlines()[-1]
