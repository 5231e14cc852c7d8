"""Telling is not part of the work.

A run outlives its terminal, its reader and the disk that its words go to.
"""

import re
import shutil
import signal
import sys
from pathlib import Path

import pyte
import pytest
from in_terminal import LINES
from places import HELPERS

from apex.run_folder import RunFolder

pytestmark = pytest.mark.spread
IN_TERMINAL = [sys.executable, HELPERS / "in_terminal.py"]
APEX = [sys.executable, "-m", "launch.cli.main"]
TRANSPORTS = ("mpi", "zmq", "local")
SMALL = {
    "run.log_period_s": 0.2, "evaluator.episodes": 2, "replay.min_size": 200, "learner.batch_size": 16,
    "algorithm.hidden": 16,
    "run.stop_at_target": "false", "run.max_learner_steps": 1_000_000, "learner.checkpoint_period": 1_000_000,
}  # fmt: skip
SHORT = {"run.max_learner_steps": 40}
LOUD = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Loud(CartPoleEnv):
    def step(self, action):
        print("\u2502" * 500)
        return super().step(action)

gymnasium.register("Loud-v0", Loud, max_episode_steps=100)
"""
STARTS_S, ENDS_S = 60, 60


def train(transport: str, directory: Path, **more) -> list:
    """Return the command of a small run in ``directory``."""
    values = (
        SMALL
        | {"run.directory": directory}
        | {name.replace("__", "."): value for name, value in more.items()}
    )
    return [
        *APEX,
        "train",
        "cartpole",
        "--transport",
        transport,
        *(t for n, v in values.items() for t in ("--set", f"{n}={v}")),
    ]


def told_into(where: str, command: list) -> list:
    """Return the command with its stdout and stderr redirected as a shell would."""
    return ["sh", "-c", f'exec "$@" {where}', "sh", *command]


def learns(folder: RunFolder) -> bool:
    """Whether the learner has made its first steps."""
    rows = folder.rows()
    return bool(rows) and rows[-1]["learner_steps"] > 0


def check_result(directory: Path, reason: str) -> None:
    """Check how the one run there has ended, and that a network was kept."""
    folder = RunFolder(directory / "latest")
    assert (folder.result()["reason"], folder.result()["status"]) == (reason, 0)
    assert (folder.checkpoints / "latest.pt").exists() and folder.error() is None


class TestTerminal:
    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_a_terminal_that_is_closed_ends_the_run_in_order(self, start, tmp_path, transport):
        directory = tmp_path / "runs"
        job = start([*IN_TERMINAL, 100, tmp_path, *train(transport, directory)])
        job.wait_until(lambda: learns(RunFolder(directory / "latest")), STARTS_S, "the first learner step")
        (tmp_path / "close").touch()
        assert job.wait(ENDS_S).returncode == 0
        check_result(directory, "signal")

    def test_a_run_under_nohup_outlives_its_terminal(self, start, tmp_path):
        directory = tmp_path / "runs"
        job = start(
            [*IN_TERMINAL, 100, tmp_path, "nohup", *train("mpi", directory, run__max_wall_s=8)],
            {"HOME": str(tmp_path)},
        )
        job.wait_until(lambda: learns(RunFolder(directory / "latest")), STARTS_S, "the first learner step")
        (tmp_path / "close").touch()
        assert job.wait(ENDS_S).returncode == 0
        check_result(directory, "wall_s")

    @pytest.mark.parametrize("columns, transport", [(80, "mpi"), (120, "zmq")])
    def test_the_table_stands_whole_below_what_ranks_say(self, start, tmp_path, columns, transport):
        command = train(transport, tmp_path / "runs", run__max_learner_steps=40)
        job = start([*IN_TERMINAL, columns, tmp_path, *command], {"TERM": "xterm", "COLUMNS": ""})
        ended = job.wait(ENDS_S)
        assert ended.returncode == 0, ended.stdout
        lines = rendered((job.folder / "stdout").read_bytes(), columns)
        tops, bottoms = ([n for n, text in enumerate(lines) if corner in text] for corner in "┏└")
        assert len(tops) == len(bottoms) == 1, "\n".join(lines)
        table = lines[tops[0] : bottoms[0] + 1]
        assert {text[0] for text in table} <= set("┏┃┡│└") and len(
            {len(text.rstrip()) for text in table}
        ) == 1, "\n".join(lines)
        said = [n for n, text in enumerate(lines) if "priority index" in text or "cores here" in text]
        assert len(said) == 2 and max(said) < tops[0], "\n".join(lines)


def rendered(shown: bytes, columns: int) -> list[str]:
    """Return the lines that a terminal has shown, those that have scrolled away too."""
    screen = pyte.HistoryScreen(columns, LINES, history=10_000)
    pyte.ByteStream(screen).feed(shown)
    scrolled = ["".join(line[column].data for column in range(columns)) for line in screen.history.top]
    return [text.rstrip() for text in [*scrolled, *screen.display]]


class TestReaders:
    @pytest.mark.parametrize("transport", ("mpi", "local"))
    def test_a_full_disk_under_stdout_and_stderr_costs_the_words_alone(self, run_to_end, tmp_path, transport):
        command = train(transport, tmp_path / "runs", run__max_learner_steps=40)
        assert run_to_end(told_into("> /dev/full 2>&1", command)).returncode == 0
        check_result(tmp_path / "runs", "learner_steps")

    @pytest.mark.parametrize(
        "where, transport",
        [(">&- 2>&-", "zmq"), ("| head -n 1", "mpi")],
        ids=["closed", "a reader that leaves"],
    )
    def test_nobody_who_reads_costs_the_words_alone(self, run_to_end, tmp_path, where, transport):
        command = train(transport, tmp_path / "runs", run__max_learner_steps=40)
        ended = run_to_end(["sh", "-c", f'"$@" {where}', "sh", *command])
        assert ended.returncode == 0 and ended.stderr == ""
        check_result(tmp_path / "runs", "learner_steps")

    @pytest.mark.parametrize(
        "command", [["--help"], ["train", "--help"], ["doctor", "--set", "run.seed=x"]], ids=lambda c: c[0]
    )
    def test_no_command_fails_for_its_words(self, run_to_end, command):
        ended = run_to_end(told_into("> /dev/full", [*APEX, *command]))
        assert (
            ended.returncode in (0, 2)
            and "Traceback" not in ended.stderr
            and "Exception ignored" not in ended.stderr
        )

    @pytest.mark.parametrize("where", ["> /dev/full 2>&1", "> FOLDER/shown"], ids=["full", "ascii"])
    def test_an_environment_that_prints_does_not_fail_for_its_words(self, run_to_end, tmp_path, where):
        (tmp_path / "loud.py").write_text(LOUD)
        command = train(
            "local", tmp_path / "runs", run__max_learner_steps=40, env__id="loud:Loud-v0", env__max_restarts=0
        )
        environment = {"PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": "ascii"}
        ended = run_to_end(told_into(where.replace("FOLDER", str(tmp_path)), command), environment)
        assert (ended.returncode, ended.stderr) == (0, "")
        check_result(tmp_path / "runs", "learner_steps")

    def test_readers_that_leave_a_command_of_one_answer_cost_nothing(self, run_to_end, tmp_path):
        assert run_to_end(train("local", tmp_path / "runs", run__max_learner_steps=40)).returncode == 0
        run = tmp_path / "runs" / "latest"
        for number, command in enumerate(
            (["eval", run, "--episodes", "1"], ["plot", run, "--out", tmp_path / "curve.png"], ["doctor"])
        ):
            status = tmp_path / f"status-{number}"
            ended = run_to_end(["sh", "-c", f'{{ "$@"; echo $? > {status}; }} | true', "sh", *APEX, *command])
            assert ended.stderr == "" and status.read_text().strip() in (
                "0",
                "1" if command == ["doctor"] else "0",
            )

    def test_characters_that_the_terminal_does_not_know_are_escaped(self, run_to_end, tmp_path):
        command = train("local", tmp_path / "läufe", run__max_learner_steps=40)
        ended = run_to_end(command, {"PYTHONIOENCODING": "ascii"})
        assert ended.returncode == 0, ended.stderr
        assert "l\\xe4ufe" in ended.stdout


class TestRunFolder:
    @pytest.mark.parametrize("transport", ("zmq", "local"))
    def test_the_result_is_kept_on_a_disk_without_a_byte_left(self, start, small_disk, transport):
        directory = small_disk / "runs"
        job = start(train(transport, directory))
        job.wait_until(lambda: learns(RunFolder(directory / "latest")), STARTS_S, "the first learner step")
        with open(small_disk / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        job.process.send_signal(signal.SIGTERM)
        ended = job.wait(ENDS_S)
        assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
        assert RunFolder(directory / "latest").result()["reason"] == "signal"

    @pytest.mark.parametrize("transport", ("mpi", "local"))
    def test_a_folder_that_is_removed_costs_what_was_in_it_and_the_result_is_told(
        self, start, tmp_path, transport
    ):
        directory = tmp_path / "runs"
        job = start(train(transport, directory))
        job.wait_until(lambda: learns(RunFolder(directory / "latest")), STARTS_S, "the first learner step")
        RunFolder(directory / "latest").path.rename(
            tmp_path / "removed"
        )  # at once: the job may be writing into it
        shutil.rmtree(tmp_path / "removed")
        job.process.send_signal(signal.SIGTERM)
        ended = job.wait(ENDS_S)
        assert ended.returncode == 1 and "Traceback" not in ended.stdout + ended.stderr, ended.stderr
        told = [line for line in ended.stderr.splitlines() if "result.json cannot be written" in line]
        assert re.search(r'"reason": "signal"', told[0]), ended.stderr
