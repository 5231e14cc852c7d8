"""`apex train` as the ranks of a job on two hosts.

It trains, ends in order, and leaves a complete run folder.
"""

import os
import signal
import sys
from pathlib import Path

import pytest

from apex import checkpoint
from apex import config as configuration
from apex.run_folder import RunFolder

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
SETTINGS = [
    "run.log_period_s=0.2",
    "evaluator.episodes=2",
    "evaluator.period=50",
    "replay.min_size=200",
    "learner.batch_size=16",
]
ENDS_S = 120
SLOW = 125_000  # bytes a second, as of a line of one megabit


@pytest.fixture
def train(tmp_path):
    """Return ``train(*settings) -> list``: the command of a rank."""

    def command(*settings: str) -> list:
        values = [*SETTINGS, f"run.directory={tmp_path / 'runs'}", *settings]
        return [
            sys.executable,
            "-m",
            "launch.cli.main",
            "train",
            "cartpole",
            *(text for value in values for text in ("--set", value)),
        ]

    return command


@pytest.fixture
def folder(tmp_path):
    """The folder of the run."""
    return RunFolder(tmp_path / "runs" / "latest")


def check(ended, folder: RunFolder, reason: str, transport: str, ranks: int) -> None:
    """Check that a run went well and left all that it should."""
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = folder.result()
    assert (result["reason"], result["status"], result["transport"], result["ranks"]) == (
        reason,
        0,
        transport,
        ranks,
    )
    assert f"apex: ended by {reason}" in ended.stdout
    last = folder.rows()[-1]
    assert (
        last["learner_steps"] == result["learner_steps"] > 0
        and last["transitions"] > 200
        and last["evaluations"] > 0
    )
    assert checkpoint.load(folder.checkpoints / "latest.pt")["learner_steps"] == result["learner_steps"]
    assert configuration.load(str(folder.config_path)).run.transport == transport
    assert folder.error() is None


def test_it_trains_over_mpi(hosts, mpirun_command, ssh, run_to_end, train, folder):
    before = hosts.traffic()
    command = [*mpirun_command((3, 2), "--map-by", "node"), *train("run.max_learner_steps=200")]
    check(run_to_end(command, ssh, timeout=ENDS_S), folder, "learner_steps", "mpi", 5)
    assert min(hosts.traffic() - before) > 100_000


def test_it_trains_over_a_slow_link(hosts, mpirun_command, ssh, run_to_end, train, folder):
    hosts.limit_rate(SLOW)
    try:
        command = [*mpirun_command((3, 2), "--map-by", "node"), *train("run.max_learner_steps=100")]
        check(run_to_end(command, ssh, timeout=ENDS_S), folder, "learner_steps", "mpi", 5)
    finally:
        hosts.limit_rate(0)


def test_USR1_to_mpirun_ends_both_hosts_in_order_even_where_it_comes_when_all_is_over(
    mpirun_command, ssh, start, train, folder
):
    job = start(
        [*mpirun_command((2, 3), "--map-by", "slot"), *train("run.max_learner_steps=1000000000")], ssh
    )
    job.wait_until(
        lambda: any(row["evaluations"] and row["learner_steps"] for row in rows(folder)),
        ENDS_S,
        "some training",
    )
    of_second_host = [job.rank(rank) for rank in (2, 3, 4)]
    send(job, signal.SIGSTOP, "prted")  # which hands the signal to the ranks of the second host
    send(job, signal.SIGUSR1, "prterun", "mpirun")
    job.wait_until(
        lambda: not any(catches(pid, signal.SIGUSR1) for pid in of_second_host),
        ENDS_S,
        "the end of Python there",
    )
    send(job, signal.SIGCONT, "prted")
    check(job.wait(ENDS_S), folder, "signal", "mpi", 5)


def rows(folder: RunFolder) -> list[dict]:
    """Return the rows of the log so far."""
    return folder.rows() if folder.path.exists() else []


def send(job, number: int, *names: str) -> None:
    """Send a signal to the processes of a job that run such a program."""
    pids = [pid for pid, command in job.processes().items() if Path(command.split()[0]).name in names]
    assert pids
    for pid in pids:
        os.kill(pid, number)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    return bool(
        int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16) >> (number - 1) & 1
    )


def test_it_trains_over_zmq(hosts, zmq_groups, run_to_end, train, folder):
    before = hosts.traffic()
    command = zmq_groups(2, 3, train("run.max_learner_steps=200", "run.transport=zmq"))
    check(run_to_end(command, timeout=ENDS_S), folder, "learner_steps", "zmq", 5)
    assert min(hosts.traffic() - before) > 100_000
