"""``launch.run.spawn``: starts ranks, passes on what they are told, ends with them, and leaves nothing
behind.
"""

import json
import os
import signal
import sys
import time

import pytest

from apex import leftovers
from launch.run import spawn

SPAWN = [sys.executable, "-m", "launch.run.spawn"]
OURS = "{k: v for k, v in os.environ.items() if k.startswith('APEX_')}"
TELL = f"import json, os; os.write(1, (json.dumps({OURS}) + chr(10)).encode())"
STAY = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1], os.environ["APEX_RANK"]).touch()
time.sleep(1000)
"""


@pytest.fixture
def stay(start, tmp_path):
    """Three ranks that heed only SIGUSR1, once all are there."""
    job = start([*SPAWN, "-n", 3, "--", sys.executable, "-c", STAY, tmp_path])
    job.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)), 20, "three ranks")
    assert folders(job)
    return job


def folders(job) -> list:
    """Return the folders for sockets that there are."""
    return list(job.temporary.glob(f"{leftovers.SOCKETS}*"))


@pytest.mark.parametrize(
    "options, ranks, size, endpoint",
    [
        ([], range(3), 3, "ipc:///"),
        (["--first", 2, "--size", 7], range(2, 5), 7, "ipc:///"),
        (["--endpoint", "tcp"], range(3), 3, "tcp://127.0.0.1:"),
    ],
    ids=["all", "some", "tcp"],
)
def test_ranks_are_told_who_they_are_and_where_to_meet(run_to_end, options, ranks, size, endpoint):
    token = {"APEX_TOKEN": "5a" * 16} if "--size" in options else {}
    ended = run_to_end([*SPAWN, "-n", 3, *options, "--", sys.executable, "-c", TELL], token)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads(line) for line in ended.stdout.splitlines()]
    assert sorted(int(rank["APEX_RANK"]) for rank in told) == list(ranks)
    assert {rank["APEX_SIZE"] for rank in told} == {str(size)}
    assert len({(rank["APEX_TOKEN"], rank["APEX_ENDPOINT"]) for rank in told}) == 1
    assert told[0]["APEX_ENDPOINT"].startswith(endpoint) and len(told[0]["APEX_TOKEN"]) == 32


@pytest.mark.parametrize(
    "end, status", [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)], ids=["status", "signal"]
)
def test_the_first_rank_that_fails_ends_all_and_gives_the_status(run_to_end, end, status):
    program = f"import os, sys, time\nif os.environ['APEX_RANK'] == '1':\n    {end}\ntime.sleep(1000)"
    started = time.monotonic()
    assert run_to_end([*SPAWN, "-n", 3, "--", sys.executable, "-c", program]).returncode == status
    assert time.monotonic() - started < 10


def test_SIGUSR1_comes_to_every_rank(stay):
    stay.process.send_signal(signal.SIGUSR1)
    assert stay.wait(10).returncode == 0
    assert not folders(stay)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name
)
def test_a_signal_that_ends_it_ends_all_ranks(stay, number):
    stay.process.send_signal(number)
    assert stay.wait(10).returncode == 128 + number
    assert not folders(stay)


def test_killed_itself_it_leaves_no_rank(stay):
    stay.process.kill()
    assert stay.wait(10).returncode == -signal.SIGKILL  # fails where a process is left


def test_what_a_killed_one_has_left_goes_with_the_next_start_and_what_is_in_use_stays(
    start, run_to_end, stay, tmp_path
):
    (used,) = folders(stay)
    temporary = {"TMPDIR": str(stay.temporary)}
    killed = start([*SPAWN, "-n", 1, "--", sys.executable, "-c", STAY, tmp_path], temporary)
    killed.wait_until(lambda: len(folders(stay)) == 2, 20, "a folder")
    killed.process.kill()
    killed.wait(10)
    assert len(folders(stay)) == 2
    ended = run_to_end([*SPAWN, "-n", 1, "--", sys.executable, "-c", ""], temporary)
    assert ended.returncode == 0 and folders(stay) == [used]


@pytest.mark.parametrize(
    "token, options, complaint",
    [
        ("5a", [], "APEX_TOKEN has 1 bytes, not 16 to 64"),
        ("5a" * 15, [], "APEX_TOKEN has 15 bytes"),
        ("5a" * 65, [], "APEX_TOKEN has 65 bytes"),
        ("a good long password", [], "APEX_TOKEN is not written in hex"),
        ("", ["--size", 3], "APEX_TOKEN is not set"),
        ("", ["--first", 2, "--size", 3], "APEX_TOKEN is not set"),
    ],
    ids=["1 byte", "15 bytes", "65 bytes", "not hex", "none, the first of more", "none, the last of more"],
)
def test_a_token_that_others_could_guess_is_refused_in_one_line_before_anything_is_started(
    run_to_end, tmp_path, token, options, complaint
):
    command = [sys.executable, "-c", STAY, tmp_path]
    ended = run_to_end([*SPAWN, "-n", 1, *options, "--", *command], {"APEX_TOKEN": token})
    assert ended.returncode == 2 and complaint in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    makes_one = ended.stderr.partition("`")[2].partition("`")[0]
    told = run_to_end(
        [
            "/bin/sh",
            "-c",
            f'{makes_one} && exec "$@"',
            "sh",
            *SPAWN,
            "-n",
            1,
            *options,
            "--",
            sys.executable,
            "-c",
            TELL,
        ]
    )
    assert told.returncode == 0 and len(json.loads(told.stdout)["APEX_TOKEN"]) == 32


def test_apex_train_refuses_such_a_token_before_there_is_a_run_folder(run_to_end, tmp_path):
    train = [
        sys.executable,
        "-m",
        "launch.cli.main",
        "train",
        "cartpole",
        "--transport",
        "zmq",
        "--set",
        f"run.directory={tmp_path}/runs",
    ]
    ended = run_to_end(train, {"APEX_TOKEN": "5a"})
    assert (
        ended.returncode == 2
        and ended.stderr.startswith("apex: APEX_TOKEN has 1 bytes")
        and len(ended.stderr.splitlines()) == 1
    )
    assert not ended.stdout and not list(tmp_path.iterdir())


def test_an_empty_token_is_none_and_one_is_made_where_all_ranks_are_of_one_launcher(run_to_end):
    ended = run_to_end([*SPAWN, "-n", 1, "--", sys.executable, "-c", TELL], {"APEX_TOKEN": ""})
    assert ended.returncode == 0 and len(json.loads(ended.stdout)["APEX_TOKEN"]) == 32


def test_it_ends_with_the_process_that_started_it(start, tmp_path):
    command = f"[*{SPAWN!r}, '-n', '2', '--', sys.executable, '-c', sys.argv[1], sys.argv[2]]"
    program = f"import subprocess, sys; subprocess.run({command})"
    job = start([sys.executable, "-c", program, STAY, tmp_path])
    job.wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), 20, "two ranks")
    job.process.kill()
    job.wait(10)
    assert not folders(job)


def test_a_command_that_cannot_be_run_is_an_error(run_to_end):
    ended = run_to_end([*SPAWN, "-n", 2, "--", "/nonexistent/command"])
    assert ended.returncode == 127
    assert ended.stderr == "launch.run.spawn: /nonexistent/command: No such file or directory\n"


TAKES_PLACE = """
import os, pathlib, sys, time
life = os.environ["APEX_LIFE"]
pathlib.Path(sys.argv[1], f"{os.environ['APEX_RANK']}-{life}").touch()
if os.environ["APEX_RANK"] == "0":
    while not pathlib.Path(sys.argv[1], "through").exists():
        time.sleep(0.01)
elif life == "0":
    sys.exit(1)
else:
    time.sleep(1000 if sys.argv[2] == "stays" else 1)
"""


@pytest.fixture
def replaced(start, tmp_path):
    """Return ``replaced(how) -> job`` of two ranks, of which the second has been lost and started again."""

    def job_of(how: str):
        job = start(
            [
                *SPAWN,
                "-n",
                2,
                "--may-lose",
                1,
                "--lives",
                1,
                "--",
                sys.executable,
                "-c",
                TAKES_PLACE,
                tmp_path,
                how,
            ]
        )
        job.wait_until((tmp_path / "1-1").exists, 20, "a new process")
        return job

    return job_of


def test_a_process_that_takes_a_place_does_not_die_of_a_SIGUSR1_that_comes_while_it_starts(
    replaced, tmp_path
):
    job = replaced("leaves")
    os.kill(job.rank(1), signal.SIGUSR1)
    (tmp_path / "through").touch()
    assert job.wait(20).returncode == 0
    assert not (tmp_path / "1-2").exists()


def test_a_rank_that_may_be_lost_does_not_keep_a_job_whose_first_rank_has_ended_well(replaced, tmp_path):
    job = replaced("stays")
    (tmp_path / "through").touch()
    assert job.wait(spawn._LEAVE_S + 10).returncode == 0
    assert not folders(job)


def test_the_loss_of_such_a_rank_after_the_first_has_ended_well_is_none(replaced, tmp_path):
    job = replaced("stays")
    first = job.rank(0)
    (tmp_path / "through").touch()
    job.wait_until(lambda: first not in job.processes(), 20, "the end of the first rank")
    os.kill(job.rank(1), signal.SIGKILL)
    assert job.wait(spawn._LEAVE_S).returncode == 0
