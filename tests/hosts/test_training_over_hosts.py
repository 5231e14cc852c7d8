"""`apex train` as the ranks of a job on two hosts: it trains, ends in order, and leaves a complete run folder."""

import os
import signal
import sys

import pytest

from apex import checkpoint
from apex import config as configuration
from apex.run_folder import RunFolder

pytestmark = pytest.mark.timeout(300)
SETTINGS = ["run.log_period_s=0.2", "evaluator.episodes=2", "evaluator.period=50", "replay.min_size=200", "learner.batch_size=16"]
ENDS_S = 120


@pytest.fixture
def train(tmp_path):
    """Return ``train(*settings) -> list``: the command of a rank."""

    def command(*settings: str) -> list:
        values = [*SETTINGS, f"run.directory={tmp_path / 'runs'}", *settings]
        return [sys.executable, "-m", "launch.main", "train", "cartpole", *(text for value in values for text in ("--set", value))]

    return command


@pytest.fixture
def folder(tmp_path):
    """The folder of the run."""
    return RunFolder(tmp_path / "runs" / "latest")


def check(ended, folder: RunFolder, reason: str, transport: str, ranks: int) -> None:
    """Check that a run went well and left all that it should."""
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = folder.result()
    assert (result["reason"], result["status"], result["transport"], result["ranks"]) == (reason, 0, transport, ranks)
    assert f"apex: ended by {reason}" in ended.stdout
    last = folder.rows()[-1]
    assert last["learner_steps"] == result["learner_steps"] > 0 and last["transitions"] > 200 and last["evaluations"] > 0
    assert checkpoint.load(folder.checkpoints / "latest.pt")["learner_steps"] == result["learner_steps"]
    assert configuration.load(str(folder.config_path)).run.transport == transport
    assert folder.error() is None


@pytest.mark.parametrize("how", ["slot", "node"])
def test_it_trains_over_mpi(hosts, mpirun_command, ssh, run_to_end, train, folder, how):
    before = hosts.traffic()
    command = [*mpirun_command((3, 2), "--map-by", how), *train("run.max_learner_steps=200")]
    check(run_to_end(command, ssh, timeout=ENDS_S), folder, "learner_steps", "mpi", 5)
    assert min(hosts.traffic() - before) > 100_000


def test_USR1_to_mpirun_ends_the_ranks_of_both_hosts_in_order(mpirun_command, ssh, start, train, folder):
    job = start([*mpirun_command((2, 3), "--map-by", "slot"), *train("run.max_learner_steps=1000000000")], ssh)
    job.wait_until(lambda: folder.path.exists() and any(row["evaluations"] for row in folder.rows()), ENDS_S, "a row of the log with an evaluation")
    launchers = [pid for pid, command in job.processes().items() if command.split()[0].endswith(("mpirun", "prterun"))]
    os.kill(min(launchers), signal.SIGUSR1)
    check(job.wait(ENDS_S), folder, "signal", "mpi", 5)


def test_it_trains_over_zmq(hosts, zmq_groups, run_to_end, train, folder):
    before = hosts.traffic()
    command = zmq_groups(2, 3, train("run.max_learner_steps=200", "run.transport=zmq"))
    check(run_to_end(command, timeout=ENDS_S), folder, "learner_steps", "zmq", 5)
    assert min(hosts.traffic() - before) > 100_000
