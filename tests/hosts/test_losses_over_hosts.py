"""A run over two hosts, with ``--tolerate actors``, that loses an actor of the second host.

It goes on, and ends in order.
"""

import os
import shlex
import signal
import sys

import pytest

from apex.run_folder import RunFolder

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
SETTINGS = [
    "run.log_period_s=0.2", "run.stop_at_target=false", "run.max_learner_steps=1000000000",
    "evaluator.episodes=2", "replay.min_size=200",
    "learner.batch_size=16", "run.fault_tolerance=actors",
]  # fmt: skip
HAPPENS_S, ENDS_S, LAST = 120, 90, 4


@pytest.fixture
def folder(tmp_path):
    """The folder of the run."""
    return RunFolder(tmp_path / "runs" / "latest")


@pytest.fixture
def train(tmp_path):
    """Return ``train(transport) -> list``: the command of a rank."""

    def command(transport: str) -> list:
        values = [*SETTINGS, f"run.transport={transport}", f"run.directory={tmp_path / 'runs'}"]
        return [
            sys.executable,
            "-m",
            "launch.cli.main",
            "train",
            "cartpole",
            *(text for value in values for text in ("--set", value)),
        ]

    return command


def row(folder: RunFolder, name: str) -> int:
    """Return a count of the last row of the log."""
    rows = folder.rows() if folder.path.exists() else []
    return rows[-1][name] if rows else 0


def lose_one(job, folder: RunFolder) -> int:
    """Kill the last actor; wait until it is replaced and more has come of it.

    Return the process of the learner.
    """
    job.wait_until(lambda: row(folder, "learner_steps") > 0, HAPPENS_S, "training")
    learner = job.rank(0)  # of the start: one that takes a place is rank 0 of a world of its own
    os.kill(job.rank(LAST), signal.SIGKILL)
    job.wait_until(lambda: row(folder, "actors_replaced") == 1, HAPPENS_S, "a new process")
    steps = row(folder, "agent_steps")
    job.wait_until(lambda: row(folder, "agent_steps") > steps + 2000, HAPPENS_S, "more steps")
    return learner


def test_over_mpi(mpirun_command, ssh, start, train, folder):
    job = start([*mpirun_command((2, 3), "--with-ft", "ulfm", "--map-by", "slot"), *train("mpi")], ssh)
    learner = lose_one(job, folder)
    os.kill(learner, signal.SIGUSR1)
    ended = job.wait(ENDS_S)
    assert folder.error() is None, ended.stderr[-3000:]
    assert (folder.result()["reason"], folder.result()["status"]) == ("signal", 0)


def test_over_zmq(hosts, zmq_groups, start, train, folder):
    command = zmq_groups(3, 2, train("zmq"))
    command[-1] = command[-1].replace(
        "launch.run.spawn ", f"launch.run.spawn {shlex.join(['--may-lose', '2', '--lives', '3'])} "
    )
    job = start(command)
    os.kill(lose_one(job, folder), signal.SIGUSR1)
    assert job.wait(ENDS_S).returncode == 0
    assert (folder.result()["reason"], folder.result()["status"]) == ("signal", 0)
