"""Who goes first where ranks share cores."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from apex.run_folder import RunFolder

LEARNER, REPLAY, EVALUATOR, ACTOR = range(4)


def niceness(pid: int) -> int:
    """Return the niceness of a process, relative to this one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16]) - os.nice(0)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset (Debian: util-linux) is missing")
def test_on_a_crowded_host_acting_ranks_have_a_lower_priority_and_the_run_says_so(start, tmp_path):
    settings = {
        "run.directory": tmp_path / "runs",
        "replay.min_size": 200,
        "learner.batch_size": 16,
        "actor.nice": 3,
        "run.max_wall_s": 60,
    }
    overrides = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
    core = min(os.sched_getaffinity(0))
    job = start(
        ["taskset", "-c", core, sys.executable, "-m", "launch.cli.main", "train", "cartpole", *overrides]
    )
    job.wait_until(
        lambda: list(tmp_path.glob("runs/c*")) and RunFolder(next(tmp_path.glob("runs/c*"))).rows(),
        120,
        "a row of the log",
    )
    assert [niceness(job.rank(rank)) for rank in (LEARNER, REPLAY, EVALUATOR, ACTOR)] == [0, 0, 3, 3]
    assert (
        "4 ranks on 1 cores here: a rank without work sleeps at once" in (job.folder / "stdout").read_text()
    )
