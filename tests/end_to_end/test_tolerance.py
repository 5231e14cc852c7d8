"""``--tolerate actors``: acting processes that are killed, raise or hang are replaced, and the run goes on.

Over both transports.
"""

import os
import signal
import sys
import time

import pytest
from small_checkpoints import verify

from apex import checkpoint
from apex.run_folder import RunFolder
from launch.run.launchers import find_mpirun

TRAIN = [sys.executable, "-m", "launch.cli.main", "train"]
SMALL = {
    "run.log_period_s": 0.2, "run.stop_at_target": "false", "run.max_learner_steps": 1_000_000,
    "actor.count": 2, "evaluator.episodes": 2,
    "evaluator.period": 100, "replay.min_size": 200, "learner.batch_size": 16,
    "learner.checkpoint_period": 200,
}  # fmt: skip
LEARNER, REPLAY, EVALUATOR, ACTOR, OTHER_ACTOR = range(5)
COUNTS = (
    "agent_steps",
    "transitions",
    "episodes",
    "evaluations",
    "learner_steps",
    "actors_lost",
    "actors_replaced",
)
SILENCE_S = 10
HAPPENS_S, ENDS_S = 120, 60
pytestmark = pytest.mark.spread


class Run:
    """A run of two actors over a transport, which tolerates their loss."""

    def __init__(self, start, directory, transport, figure=None):
        self.start, self.directory, self.transport, self.figure = start, directory, transport, figure

    def command(self, *arguments, **more) -> list:
        values = (
            SMALL
            | {"run.directory": self.directory}
            | {name.replace("__", "."): value for name, value in more.items()}
        )
        settings = [text for name, value in values.items() for text in ("--set", f"{name}={value}")]
        return [
            *TRAIN,
            *(arguments or ["cartpole"]),
            "--transport",
            self.transport,
            "--tolerate",
            "actors",
            *settings,
        ]

    def begin(self, *arguments, env=None, **more) -> None:
        """Start it, and wait until it learns."""
        self.job = self.start(self.command(*arguments, **more), env)
        if arguments:
            self.until(
                lambda: "resuming at" in (self.job.folder / "stdout").read_text(), "a run that is resumed"
            )
        self.until(lambda: self.row("learner_steps") > 0, "the first learner step")

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.directory / "latest")

    def row(self, name: str) -> int:
        """Return a count of the last row of the log, 0 while there is none."""
        rows = self.folder.rows()
        return rows[-1][name] if rows else 0

    def until(self, holds, what: str) -> None:
        self.job.wait_until(holds, HAPPENS_S, what)

    def lose(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to the processes that ranks have from the start."""
        for pid in [self.job.rank(rank) for rank in ranks]:
            os.kill(pid, number)
        self.signal, self.since = number, time.monotonic()

    def until_replaced(self, count: int) -> None:
        """Wait until so many have been replaced, and all acting ranks send and evaluate again."""
        self.until(
            lambda: (self.row("actors_lost"), self.row("actors_replaced")) == (count, count),
            f"replacement {count}",
        )
        self.figure(
            f"s from {self.signal.name} of an acting rank until it is replaced, {self.transport}",
            time.monotonic() - self.since,
        )
        for name, more in (("agent_steps", 500), ("evaluations", 1), ("learner_steps", 50)):
            least = self.row(name) + more
            self.until(lambda name=name, least=least: self.row(name) >= least, f"more {name}")

    def end(self, reason: str = "signal"):
        """End it by Ctrl-C; check that it ended as a run should."""
        if reason == "signal":
            self.job.process.send_signal(signal.SIGINT)
        ended = self.job.wait(ENDS_S)
        assert ended.returncode == 0, ended.stderr[-3000:]
        result = self.folder.result()
        assert (result["reason"], result["status"]) == (reason, 0)
        assert self.folder.error() is None
        rows = self.folder.rows()
        for name in COUNTS:
            counts = [row[name] for row in rows]
            assert counts == sorted(counts), f"{name} runs backwards"
        return ended


@pytest.fixture(params=["mpi", "zmq"])
def run(request, start, tmp_path, figure):
    return Run(start, tmp_path / "runs", request.param, figure)


def check_failed(run, ended, *lines: str) -> None:
    """Check that a run failed with one of these lines, which say why, and with a checkpoint to go on from."""
    assert ended.returncode not in (0, 2)
    # Over ZeroMQ it depends on who notices first: a rank that has lost a peer, or the launcher whose child
    # was killed.
    result = run.folder.result()
    assert result["status"] != 0 and result["reason"] in (
        {"error"} if run.transport == "mpi" else {"error", "killed"}
    )
    assert any(line in ended.stderr for line in lines)
    verify(checkpoint.complete(run.folder.checkpoints)[0])
    assert f"apex train --resume {run.folder.path.resolve()}" in ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_or_stopped_acting_ranks_are_replaced_and_their_counts_survive_a_resume(
    run,
):
    run.begin(run__heartbeat_timeout_s=SILENCE_S)
    run.lose(signal.SIGKILL, ACTOR, OTHER_ACTOR)
    run.until_replaced(2)
    run.lose(signal.SIGSTOP, EVALUATOR)
    run.until_replaced(3)
    ended = run.end()
    silent = "sent no report within run.heartbeat_timeout_s"
    for name, why in (("actor 0 (rank 3)", ""), ("actor 1 (rank 4)", ""), ("evaluator (rank 2)", silent)):
        assert (
            f"apex: {name} was lost: its process has ended; a new process replaces it (1 of 10)"
            in ended.stderr
        )
        assert f"apex: a new process has joined as {name}\n" in ended.stderr
        assert f"apex: {name} {why}" in ended.stderr
    assert "prterun" not in ended.stderr and "lost 3, replaced 3" in ended.stdout
    before = run.folder.rows()[-1]
    run.begin("--resume", str(run.directory / "latest"))
    run.until(lambda: run.row("learner_steps") > before["learner_steps"], "steps after the checkpoint")
    assert run.row("actors_lost") == 3 and run.row("agent_steps") >= before["agent_steps"]
    run.lose(signal.SIGKILL, EVALUATOR)
    run.until_replaced(4)
    run.end()


@pytest.mark.parametrize("run", ["mpi"], indirect=True)  # how it ends is the roles' own; kills are over both
def test_an_actor_that_raises_tells_why_and_is_replaced(run, inject):
    fault = inject(ACTOR, module="actors.actor", cls="Actor", method="_step", how="raises", after=200)
    run.begin(env=fault)
    run.until(lambda: run.row("actors_lost") >= 1, "the loss")
    # Over ZeroMQ the next process of the rank has the fault too, and is lost in its turn.
    run.until(lambda: run.row("actors_replaced") >= 1, "the replacement")
    told = run.end().stderr
    assert "actor 0 (rank 3) failed:" in told and "RuntimeError: injected" in told


@pytest.mark.parametrize("run", ["zmq"], indirect=True)  # over MPI: the last test of this file
def test_an_actor_that_is_lost_once_too_often_ends_the_run(run):
    run.begin(run__max_replacements=0)
    run.until(lambda: checkpoint.complete(run.folder.checkpoints), "a checkpoint")
    run.lose(signal.SIGKILL, ACTOR)
    ended = run.job.wait(ENDS_S)
    check_failed(
        run,
        ended,
        "actor 0 (rank 3) was lost again (its process has ended) after 0 replacements (run.max_replacements)",
    )


@pytest.mark.parametrize(
    "run, rank, name",
    [
        ("mpi", LEARNER, "learner (rank 0)"),
        ("mpi", REPLAY, "replay 0 (rank 1)"),
        ("zmq", LEARNER, "learner (rank 0)"),
    ],
    indirect=["run"],
    ids=["mpi-learner", "mpi-replay", "zmq-learner"],
)
def test_the_loss_of_learner_or_replay_ends_the_job_which_a_checkpoint_resumes(run, rank, name):
    run.begin()
    run.until(lambda: checkpoint.complete(run.folder.checkpoints), "a checkpoint")
    run.lose(signal.SIGKILL, rank)
    ended = run.job.wait(ENDS_S)
    run.figure(
        f"s from the loss of learner or replay to the end of the job, {run.transport}",
        time.monotonic() - run.since,
    )
    # Over ZeroMQ the launcher tells, or whoever wanted to send to it before.
    who = name if run.transport == "mpi" else f"rank {rank}"
    check_failed(
        run, ended, f"apex: {who} was lost, and the run needs it", f"apex: {who} was ended by SIGKILL"
    )
    assert "Traceback" not in ended.stderr
    steps = checkpoint.steps_of(checkpoint.complete(run.folder.checkpoints)[0])
    if rank == LEARNER:
        run.begin("--resume", str(run.directory / "latest"))
        run.until(lambda: run.row("learner_steps") > steps, "steps after the checkpoint")
        run.end()


@pytest.mark.parametrize("run", ["zmq"], indirect=True)  # the end is the endpoints' own
def test_an_actor_that_is_stopped_while_the_run_ends_is_ended_and_the_run_ends_well(run):
    run.begin(run__shutdown_timeout_s=10)
    run.lose(signal.SIGSTOP, ACTOR)
    told = run.end().stderr
    assert "actor 0 (rank 3) sent no report within" in told and "actor 0 (rank 3) was lost" in told


def test_an_mpirun_that_outlives_no_rank_is_refused_in_one_line(start, tmp_path):
    run = Run(start, tmp_path / "runs", "mpi")
    ended = start([find_mpirun(), "-n", 5, *run.command()]).wait(ENDS_S)
    assert ended.returncode == 2 and not run.directory.exists()
    told = [line for line in ended.stderr.splitlines() if line.startswith("apex: ")]
    assert (
        len(told) == 1
        and "run.fault_tolerance = 'actors' over mpi needs Open MPI 5 under `mpirun --with-ft ulfm`"
        in told[0]
    )


@pytest.mark.parametrize("run", ["mpi"], indirect=True)  # over ZeroMQ it is started at once
def test_a_run_that_is_told_to_end_while_a_process_is_started_ends_well(run):
    run.begin()
    run.lose(signal.SIGKILL, ACTOR)
    run.until(lambda: "a new process replaces it" in (run.job.folder / "stderr").read_text(), "the loss")
    run.end()


def test_a_process_that_fails_before_it_has_joined_is_lost_once_more(start, tmp_path, figure):
    run = Run(start, tmp_path / "runs", "mpi", figure)
    run.begin(run__max_replacements=1)
    run.folder.config_path.unlink()
    run.until(lambda: checkpoint.complete(run.folder.checkpoints), "a checkpoint")
    run.lose(signal.SIGKILL, ACTOR)
    ended = run.job.wait(ENDS_S)
    check_failed(run, ended, "actor 0 (rank 3) was lost again (its process has ended before it had joined")
