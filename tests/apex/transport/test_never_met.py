"""Ranks over ZeroMQ of which one never comes: who waits says for whom, and in the end the job is given up."""

import re
import secrets
import socket
import sys

import pytest

STARTS_S, ENDS_S = 60, 60
WATCHED = ["--set", "run.watchdog_s=1", "--set", "run.meet_s=4"]
pytestmark = pytest.mark.spread


def ranks(tmp_path, endpoint: str, first: int, count: int, size: int) -> list:
    """Return the command that starts some of the ranks of a job."""
    spawn = [
        sys.executable,
        "-m",
        "launch.run.spawn",
        "--first",
        first,
        "-n",
        count,
        "--size",
        size,
        "--endpoint",
        endpoint,
        "--",
    ]
    return [
        *spawn,
        sys.executable,
        "-m",
        "launch.cli.main",
        "train",
        "cartpole",
        "--transport",
        "zmq",
        *WATCHED,
        "--set",
        f"run.directory={tmp_path / 'runs'}",
    ]


def free_endpoint() -> str:
    """Return a place on loopback at which nobody is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_the_learner_names_the_ranks_that_never_come_and_ends_the_job(start, tmp_path):
    endpoint = free_endpoint()
    ended = start(ranks(tmp_path, endpoint, 0, 4, 5), {"APEX_TOKEN": secrets.token_hex(16)}).wait(ENDS_S)
    assert ended.returncode == 1
    waits, gives_up = ended.stderr.splitlines()[-2:]
    # A slow machine may miss more ranks than the one that was never started.
    assert re.fullmatch(
        r"apex: 1 s without another rank: the learner \(rank 0\) waits for ranks? .*4 of 5, "
        rf"expected at {endpoint}",
        waits,
    )
    assert re.fullmatch(
        rf"apex: ranks are missing: ranks? .*4 of 5, expected at {endpoint} "
        r"did not come within 4 s \(run.meet_s\)",
        gives_up,
    )
    assert not (tmp_path / "runs").exists()


def test_ranks_that_find_no_learner_say_so_once_and_end(start, tmp_path):
    endpoint = free_endpoint()
    ended = start(ranks(tmp_path, endpoint, 3, 3, 6), {"APEX_TOKEN": secrets.token_hex(16)}).wait(ENDS_S)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        f"apex: 1 s without another rank: rank 3 waits for the learner, expected at {endpoint}",
        f"apex: the learner (rank 0) did not come to {endpoint} within 4 s (run.meet_s)",
    ]
