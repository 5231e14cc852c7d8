"""``apex train --transport zmq``: trains, with no MPI there."""

import re
import socket
import sys

import pytest

from apex import leftovers
from apex.run_folder import RunFolder

TRAIN = [sys.executable, "-m", "launch.cli.main", "train", "cartpole", "--transport", "zmq"]
SMALL = [
    "run.log_period_s=0.2",
    "evaluator.episodes=2",
    "replay.min_size=200",
    "learner.batch_size=16",
    "run.max_learner_steps=40",
]

# Loaded by Python itself at the start of every process: there is no mpi4py, and no mpirun.
WITHOUT_MPI = """
import os, shutil, sys
sys.modules["mpi4py"] = None
shutil.which = lambda name, *more: None
"""


@pytest.fixture
def small(tmp_path):
    """Arguments of a small run."""
    values = [*SMALL, f"run.directory={tmp_path / 'runs'}"]
    return [*TRAIN, *(text for value in values for text in ("--set", value))]


@pytest.fixture
def without_mpi(tmp_path):
    """The environment of a machine that has none."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MPI)
    return {"PYTHONPATH": f"{tmp_path}:."}


def check(ended, tmp_path, ranks: int) -> None:
    """Check that a run went well."""
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = RunFolder(tmp_path / "runs" / "latest").result()
    assert (result["reason"], result["status"], result["learner_steps"]) == ("learner_steps", 0, 40)
    assert (result["transport"], result["ranks"]) == ("zmq", ranks)
    assert ended.stderr == ""
    row = RunFolder(tmp_path / "runs" / "latest").rows()[-1]
    assert row["replay_size"] == row["transitions"] > 0, "the last row holds what was on its way"


def test_it_trains_on_a_machine_without_mpi(start, small, without_mpi, tmp_path):
    job = start([*small, "--ranks", 6, "--set", "replay.ranks=2"], without_mpi)
    check(job.wait(60), tmp_path, 6)
    assert not list(job.temporary.glob(f"{leftovers.SOCKETS}*"))


@pytest.fixture
def groups(start, small, without_mpi):
    """Return ``groups(*settings)``.

    The acting ranks, and the learner's group, of a job that is started like one on two hosts.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    started = [["--first", first, "-n", 2, "--size", 4, "--endpoint", endpoint] for first in (2, 0)]
    env = without_mpi | {"APEX_TOKEN": "5a" * 16}
    return lambda *more: [
        start([sys.executable, "-m", "launch.run.spawn", *group, "--", *small, *more], env)
        for group in started
    ]


def test_it_trains_as_two_groups_of_ranks_that_meet_over_tcp(groups, tmp_path):
    acting, learning = groups()
    assert acting.wait(60).returncode == 0
    check(learning.wait(60), tmp_path, 4)


def test_a_group_of_ranks_ends_when_the_learner_on_another_host_is_gone(groups, tmp_path):
    acting, learning = groups("--set", "run.max_learner_steps=1000000")
    learning.wait_until(
        lambda: RunFolder(tmp_path / "runs" / "latest").rows(), 60, "the first row of the log"
    )
    learning.process.kill()
    ended = acting.wait(20)
    assert ended.returncode == 1
    assert "learner (rank 0) was lost, and the run needs it: the connection has broken" in ended.stderr


@pytest.mark.parametrize(
    "env, complaint",
    [
        ({"APEX_RANK": "0", "APEX_SIZE": "4"}, "no place to meet"),
        ({"APEX_RANK": "0", "APEX_SIZE": "4", "APEX_ENDPOINT": "http://x:1"}, "no place to meet"),
        ({"APEX_RANK": "0", "APEX_SIZE": "4", "APEX_ENDPOINT": "tcp://x"}, "no place to meet"),
        (
            {"APEX_RANK": "0", "APEX_SIZE": "4", "APEX_ENDPOINT": "ipc:///nonexistent/folder"},
            "no place to meet",
        ),
        (
            {"APEX_RANK": "0", "APEX_SIZE": "4", "APEX_ENDPOINT": "tcp://127.0.0.1:1", "APEX_TOKEN": "5a"},
            "APEX_TOKEN has 1 bytes",
        ),
        ({"APEX_RANK": "0", "APEX_SIZE": "4", "APEX_ENDPOINT": "ipc:///tmp"}, "is open to other users"),
        ({"APEX_RANK": "4", "APEX_SIZE": "4"}, "are no rank of a world"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
            "'zmq', but these 4 ranks were started for mpi",
        ),
    ],
    ids=[
        "nowhere",
        "elsewhere",
        "no port",
        "no folder",
        "a short token",
        "a shared folder",
        "no rank",
        "a rank of MPI",
    ],
)
def test_a_rank_that_cannot_meet_the_others_is_refused_in_one_line(run_to_end, small, env, complaint):
    ended = run_to_end(small, env)
    assert ended.returncode == 2
    assert re.fullmatch(rf"apex: .*{re.escape(complaint)}.*\n", ended.stderr)
