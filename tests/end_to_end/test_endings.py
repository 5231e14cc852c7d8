"""How runs end: by a limit, by a signal, by an exception, by a kill.

Never by hanging, and leaving no process behind.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from apex import checkpoint, leftovers
from apex.run_folder import RunFolder
from launch.run import launchers

TRAIN = [sys.executable, "-m", "launch.cli.main", "train", "cartpole"]
SMALL = {"run.log_period_s": 0.2, "evaluator.episodes": 2, "replay.min_size": 200, "learner.batch_size": 16}
STARTS_S, ENDS_S = 60, 30
ACTOR_RANK = 3
pytestmark = pytest.mark.spread


def settings(directory, **more) -> list[str]:
    """Return the arguments of a small run in ``directory``."""
    values = (
        SMALL
        | {"run.directory": directory}
        | {name.replace("__", "."): value for name, value in more.items()}
    )
    return [text for name, value in values.items() for text in ("--set", f"{name}={value}")]


LAUNCHERS = {"mpi": launchers.mpi, "zmq": launchers.zmq}


@pytest.fixture
def directory(tmp_path):
    """Where the test's one run is."""
    return tmp_path / "runs"


@pytest.fixture(params=["mpi", "zmq"])
def train(request, directory):
    """Return ``train(**more) -> command`` of a small run over each transport."""
    return lambda **more: [*TRAIN, "--transport", request.param, *settings(directory, **more)]


@pytest.fixture
def launched(train):
    """Return ``launched(ranks, **more) -> command`` of the same run, without our launcher around it."""

    def command(ranks: int, **more) -> list:
        run = train(**more)
        return [*LAUNCHERS[run[run.index("--transport") + 1]](ranks), *run]

    return command


def folder_of(directory) -> RunFolder:
    """Return the run folder."""
    return RunFolder(directory / "latest")


def learns(directory) -> bool:
    """Whether the learner has made its first steps."""
    rows = folder_of(directory).rows()
    return bool(rows) and rows[-1]["learner_steps"] > 0


def shared_memory(job) -> set[Path]:
    """Return the files in shared memory that the job's processes use; over MPI there are some."""
    used = set()
    for pid in job.processes():
        used |= {
            Path(name)
            for name in re.findall(r"/dev/shm/\S+", (Path("/proc") / str(pid) / "maps").read_text())
        }
    assert used or "zmq" in job.process.args
    return used


def launcher_of(job) -> int | None:
    """Return the pid of what has started the job's ranks, or is to.

    Mpirun, which runs as prterun, or ``launch.run.spawn``.
    """
    ranks = (
        (pid, line) for pid, line in job.processes().items() if "launch.cli.main" in line
    )  # not mpirun --version
    return next(
        (pid for pid, line in ranks if "prterun" in line.split(" ")[0] or "-m launch.run.spawn" in line), None
    )


def ended_over(command: list) -> str:
    """Return the transport of a command."""
    return command[command.index("--transport") + 1]


def states(job) -> set[str]:
    """Return the states of the job's processes: T for one that is stopped."""
    found = set()
    for pid in job.processes():
        with contextlib.suppress(OSError):
            found.add((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def check_ended_before_the_first_step(directory, ended) -> None:
    """Check that a run ended in order though there was no role to end.

    With a result, and one line about the signal.
    """
    assert ended.returncode == 0, ended.stderr[-3000:]
    folder = folder_of(directory)
    result = folder.result()
    assert (result["reason"], result["status"], result["learner_steps"]) == ("signal", 0, 0)
    assert folder.error() is None and "Traceback" not in ended.stderr
    assert ended.stderr.count("ending the run") == 1
    assert "apex: ended by signal" in ended.stdout
    assert not (folder.path / ".starting").exists()


def check_orderly(directory, ended, reason: str) -> dict:
    """Check that a run ended as a run should; return its result."""
    assert ended.returncode == 0, ended.stderr[-3000:]
    folder = folder_of(directory)
    result = folder.result()
    assert (result["reason"], result["status"]) == (reason, 0)
    assert checkpoint.load(folder.checkpoints / "latest.pt")["learner_steps"] == result["learner_steps"]
    assert folder.rows()[-1]["learner_steps"] == result["learner_steps"]
    assert folder.error() is None
    return result


class TestSignals:
    @pytest.mark.parametrize(
        "train, number",
        [
            ("mpi", signal.SIGTERM),
            ("mpi", signal.SIGHUP),
            ("zmq", signal.SIGUSR1),
        ],  # SIGINT: see the test of Ctrl-Z
        indirect=["train"],
        ids=lambda value: getattr(value, "name", value),
    )
    def test_a_signal_to_the_launcher_ends_the_run_in_order(self, start, directory, train, number, figure):
        job = start(train())
        job.wait_until(lambda: learns(directory), STARTS_S, "the first learner step")
        job.process.send_signal(number)
        sent = time.monotonic()
        ended = job.wait(ENDS_S)
        figure(
            f"s from a signal to the end of a run, last checkpoint included, {ended_over(train())}",
            time.monotonic() - sent,
        )
        assert check_orderly(directory, ended, "signal")["learner_steps"] > 0
        assert f"apex: {number.name}: ending the run" in ended.stderr
        assert "apex: ended by signal" in ended.stdout

    def test_a_signal_to_the_launcher_before_the_ranks_have_started_ends_the_run_in_order(
        self, start, directory, train
    ):
        job = start(train())
        job.wait_until(lambda: launcher_of(job), STARTS_S, "mpirun or launch.run.spawn")
        job.process.send_signal(signal.SIGINT)
        check_ended_before_the_first_step(directory, job.wait(ENDS_S))

    def test_a_signal_while_the_ranks_meet_ends_the_run_though_one_never_comes(
        self, start, directory, train, inject
    ):
        job = start(train(), inject(ACTOR_RANK, late_s=1000))
        job.wait_until(
            lambda: folder_of(directory).path.joinpath(".starting", "0").exists(),
            STARTS_S,
            "the learner's rank",
        )
        job.process.send_signal(signal.SIGTERM)
        check_ended_before_the_first_step(directory, job.wait(ENDS_S))

    def test_a_starting_rank_is_not_reported_as_hanging_and_a_signal_ends_the_run_at_once(
        self, start, directory, train, inject, injected
    ):
        job = start(
            train(run__watchdog_s=0.5), inject(ACTOR_RANK, **HANG | {"method": "__init__", "after": 1})
        )
        job.wait_until(injected.exists, STARTS_S, "the actor that starts")
        told = lambda: (job.folder / "stderr").read_text()  # noqa: E731
        job.wait_until(lambda: "which start" in told() and "3" in told(), STARTS_S, "who waits for whom")
        time.sleep(2)  # a watchdog that takes it for a hang has told by now
        job.process.send_signal(signal.SIGINT)
        ended = job.wait(ENDS_S)
        check_ended_before_the_first_step(directory, ended)
        assert "has waited" not in ended.stderr
        assert not (folder_of(directory).path / "stacks").exists()

    def test_ctrl_z_stops_every_rank_and_the_shell_lets_them_go_on(self, start, directory, train):
        job = start(train())
        job.wait_until(lambda: learns(directory), STARTS_S, "the first learner step")
        job.process.send_signal(signal.SIGTSTP)
        job.wait_until(lambda: states(job) == {"T"}, STARTS_S, "every process of the job to stop")
        rows = len(folder_of(directory).rows())
        job.process.send_signal(signal.SIGCONT)
        job.wait_until(lambda: len(folder_of(directory).rows()) > rows + 1, STARTS_S, "rows of the log")
        job.process.send_signal(signal.SIGINT)
        ended = job.wait(ENDS_S)
        assert check_orderly(directory, ended, "signal")["learner_steps"] > 0
        assert "apex: SIGINT: ending the run" in ended.stderr

    def test_SIGUSR1_to_what_started_the_ranks_ends_the_run_in_order(self, start, directory, launched):
        job = start(launched(4))
        job.wait_until(lambda: learns(directory), STARTS_S, "the first learner step")
        job.process.send_signal(signal.SIGUSR1)
        check_orderly(directory, job.wait(ENDS_S), "signal")

    def test_SIGTERM_to_one_actor_ends_the_whole_run_in_order(self, start, directory, train):
        job = start(train())
        job.wait_until(lambda: learns(directory), STARTS_S, "the first learner step")
        os.kill(job.rank(ACTOR_RANK), signal.SIGTERM)
        check_orderly(directory, job.wait(ENDS_S), "signal")

    def test_a_second_ctrl_c_ends_a_run_in_one_process_too(self, start, directory, inject, injected):
        env = inject(0, **HANG)
        env["FAULT"] = json.dumps(json.loads(env["FAULT"]) | {"rank": None})
        job = start([*TRAIN, "--transport", "local", *settings(directory)], env)
        job.wait_until(injected.exists, STARTS_S, "the hang")
        while job.process.poll() is None:
            job.process.send_signal(signal.SIGINT)  # again and again: two that come at once are one
            time.sleep(1)
        check_killed(directory, job.wait(ENDS_S), 128 + signal.SIGINT)


class TestLimits:
    @pytest.mark.parametrize("train", ["mpi"], indirect=True)
    def test_ranks_that_the_user_has_started_end_after_max_learner_steps(
        self, run_to_end, directory, launched
    ):
        ended = run_to_end(launched(5, run__max_learner_steps=40))
        result = check_orderly(directory, ended, "learner_steps")
        assert (result["learner_steps"], result["ranks"]) == (40, 5)
        assert "learner 40" in ended.stdout

    def test_a_run_ends_after_max_wall_s(self, run_to_end, directory):
        result = check_orderly(
            directory,
            run_to_end([*TRAIN, "--transport", "local", *settings(directory, run__max_wall_s=1.5)]),
            "wall_s",
        )
        assert result["wall_s"] >= 1.5


class TestRefusals:
    def test_a_configuration_that_all_ranks_refuse_together_is_refused_in_one_line(
        self, run_to_end, directory, launched
    ):
        ended = run_to_end(launched(4, replay__index="nonsense"))
        check_refused(ended, directory, "apex: replay.index")

    def test_a_world_that_needs_more_memory_than_its_machine_has_is_refused_in_one_line(
        self, mpirun, directory
    ):
        ended = mpirun(4, [*TRAIN[1:], *settings(directory, replay__capacity=50_000_000_000)])
        check_refused(ended, directory, "apex: replay.capacity = 50000000000 is too large")

    @pytest.mark.parametrize("ranks", [None, 4], ids=["the launcher", "a world"])
    def test_a_directory_that_cannot_be_made_is_refused_in_one_line(
        self, run_to_end, mpirun, tmp_path, ranks
    ):
        (tmp_path / "file").write_text("not a folder")
        arguments = [*TRAIN, *settings(tmp_path / "file" / "runs")]
        ended = run_to_end(arguments) if ranks is None else mpirun(ranks, arguments[1:])
        check_refused(ended, tmp_path / "file" / "runs", "cannot be written to")

    def test_a_world_that_is_too_small_is_refused_in_one_line_even_if_the_first_rank_is_late(
        self, mpirun, directory, inject
    ):
        ended = mpirun(3, [*TRAIN[1:], *settings(directory)], inject(0, late_s=1.0))
        check_refused(ended, directory, "apex: 3 ranks are too few")


def check_refused(ended, directory, line: str) -> None:
    """Check that one rank said why, once, and that nothing was made."""
    assert ended.returncode == 2
    assert (ended.stdout + ended.stderr).count("apex: ") == 1
    assert line in ended.stderr
    assert not directory.exists()


FAULTS = {
    "learner": (0, "learner.learner", "Learner", "_train", "raises", "learner (rank 0)"),
    "replay": (1, "replay_rank.service", "ReplayService", "_answer", "raises", "replay 0 (rank 1)"),
    "evaluator": (2, "actors.evaluator", "Evaluator", "_step", "raises", "evaluator (rank 2)"),
    "actor": (3, "actors.actor", "Actor", "_step", "raises", "actor 0 (rank 3)"),
    "a thread of the actor": (3, "actors.actor", "Actor", "_step", "raises in a thread", "actor 0 (rank 3)"),
}
RAISES = [
    ("mpi", "learner"), ("mpi", "replay"), ("mpi", "a thread of the actor"), ("zmq", "learner"),
    ("zmq", "evaluator"), ("zmq", "actor"),
]  # fmt: skip
HANG = {"module": "actors.actor", "cls": "Actor", "method": "_step", "how": "hangs", "after": 20}


class TestFailures:
    @pytest.mark.parametrize(
        "train, rank, module, cls, method, how, name",
        [(over, *FAULTS[fault]) for over, fault in RAISES], indirect=["train"],
        ids=[f"{over}-{fault}" for over, fault in RAISES],
    )  # fmt: skip
    def test_an_exception_ends_the_job_with_its_traceback_last(
        self, start, directory, train, inject, injected, figure, rank, module, cls, method, how, name
    ):
        job = start(train(), inject(rank, module=module, cls=cls, method=method, how=how, after=20))
        job.wait_until(injected.exists, STARTS_S, "the injected exception")
        ended = job.wait(ENDS_S)
        took = time.time() - float(injected.read_text())
        figure(f"s from an exception in a rank to the end of the job, {ended_over(train())}", took)
        check_failed(directory, ended)
        told = ended.stderr[ended.stderr.index(f"{name} failed:") :]
        assert "Traceback" in told
        assert told.splitlines()[-1] == "RuntimeError: injected"
        assert folder_of(directory).error() == told

    def test_a_killed_rank_ends_the_job(self, start, directory, train):
        job = start(train())
        job.wait_until(lambda: learns(directory), STARTS_S, "the first learner step")
        used = shared_memory(job)
        os.kill(job.rank(ACTOR_RANK), signal.SIGKILL)
        ended = job.wait(ENDS_S)
        check_killed(directory, ended, 128 + signal.SIGKILL)
        assert not any(path.exists() for path in used)
        assert folder_of(directory).result()["learner_steps"] > 0  # as far as the log had come

    @pytest.mark.parametrize(
        "train, number", [("mpi", signal.SIGKILL), ("mpi", signal.SIGTERM), ("zmq", signal.SIGKILL)],
        indirect=["train"], ids=lambda value: getattr(value, "name", value),
    )  # fmt: skip
    def test_a_killed_mpirun_or_spawn_takes_its_ranks_with_it(self, start, directory, train, number):
        job = start(train())
        job.wait_until(lambda: learns(directory), STARTS_S, "the first learner step")
        used = shared_memory(job)
        os.kill(launcher_of(job), number)
        check_killed(directory, job.wait(ENDS_S), 128 + number)
        assert not any(path.exists() for path in used)
        assert not list(job.temporary.glob(f"{leftovers.SOCKETS}*"))

    def test_a_rank_that_does_not_answer_is_named_when_the_end_takes_too_long(
        self, start, directory, train, inject, injected
    ):
        job = start(train(run__shutdown_timeout_s=1), inject(ACTOR_RANK, **HANG))
        job.wait_until(injected.exists, STARTS_S, "the hang")
        job.process.send_signal(signal.SIGTERM)
        ended = job.wait(ENDS_S)
        check_failed(directory, ended)
        assert "could not finish within 1 s" in ended.stderr.splitlines()[-1]
        assert "actor 0 (rank 3)" in ended.stderr.splitlines()[-1]
        saved = checkpoint.load(folder_of(directory).checkpoints / "latest.pt")
        assert saved["learner_steps"] == folder_of(directory).result()["learner_steps"]

    def test_hanging_and_waiting_ranks_print_where_they_are_and_a_second_ctrl_c_ends_them(
        self, start, directory, train, inject
    ):
        job = start(train(run__watchdog_s=2), inject(ACTOR_RANK, **HANG | {"after": 5}))
        told = lambda: (job.folder / "stderr").read_text()  # noqa: E731
        job.wait_until(
            lambda: "learner (rank 0) has waited 2 s for sample batches" in told(),
            STARTS_S,
            "the learner's complaint",
        )
        hung, waits = (folder_of(directory).stacks_of(role, 0) for role in ("actor", "learner"))
        job.wait_until(
            lambda: "in fail" in hung.read_text() and "in drive" in waits.read_text(), STARTS_S, "the stacks"
        )
        assert f"stacks of ranks that wait or hang are in {hung.parent.resolve()}" in told()
        job.process.send_signal(signal.SIGINT)
        job.wait_until(lambda: "ending the run" in told(), STARTS_S, "the first Ctrl-C to be taken")
        used = shared_memory(job)
        job.process.send_signal(signal.SIGINT)
        ended = job.wait(ENDS_S)
        check_killed(directory, ended, 128 + signal.SIGINT)
        assert ended.stderr.count("the ranks are killed") == 1
        assert not any(path.exists() for path in used)

    def test_a_killed_launcher_takes_its_ranks_with_it(self, start, directory, train):
        job = start(train())
        job.wait_until(lambda: learns(directory), STARTS_S, "the first learner step")
        job.process.kill()
        assert job.wait(ENDS_S).returncode == -signal.SIGKILL


def check_killed(directory, ended, status: int) -> None:
    """Check that status, result and one line say that the run was ended by force."""
    result = folder_of(directory).result()
    assert (ended.returncode, result["reason"], result["status"]) == (status, "killed", status), ended.stderr[
        -3000:
    ]
    assert ended.stdout.count(f"apex: killed with status {status} after") == 1
    assert "Traceback" not in ended.stderr


def check_failed(directory, ended) -> None:
    """Check that the status and the result say that the run failed."""
    result = folder_of(directory).result()
    assert ended.returncode != 0
    assert result["reason"] == "error"
    assert result["status"] != 0
