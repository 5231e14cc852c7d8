"""The scripts of launch/slurm, unmodified, on a real SLURM.

Jobs on one and many nodes, USR1, preemption, requeue and resume.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import slurm_cluster
from places import ROOT

from apex import checkpoint
from apex.run_folder import RunFolder
from launch.run.launchers import find_mpirun

REASON = slurm_cluster.missing()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no SLURM here: {REASON}"),
    pytest.mark.timeout(2000),
    pytest.mark.slow,
]

STARTS_S, ENDS_S = 500, 500  # ten times what an idle machine takes
SMALL = {"run.log_period_s": 0.2, "evaluator.episodes": 2, "replay.min_size": 200, "learner.batch_size": 16}
FOR_EVER = {
    "run__max_learner_steps": 10_000_000,
    "run__stop_at_target": "false",
    "learner__checkpoint_period": 100,
}
ALIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")


@pytest.fixture(scope="module")
def cluster():
    """The SLURM of this module's tests."""
    made = slurm_cluster.Cluster()
    try:
        made.start()
        yield made
    finally:
        made.stop()


class Submitted:
    """A job of `apex submit`."""

    def __init__(self, cluster, number: int, directory: Path, log: Path):
        self.cluster, self.number, self.directory, self.log_path = cluster, number, directory, log

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else "(no output)"

    @property
    def state(self) -> str:
        return self.cluster.job(self.number)["JobState"]

    def wait_until(self, holds, timeout: float, what: str) -> None:
        """Wait for something that the job is to do; fails with its output."""
        try:
            self.cluster.wait_until(holds, timeout, what)
        except TimeoutError as error:
            pytest.fail(f"{error}\n--- the job: {self.state}\n{self.log[-4000:]}")

    def wait(self) -> str:
        """Return the state and exit code that the job ended with."""
        self.wait_until(lambda: self.state not in ALIVE, ENDS_S, f"the end of job {self.number}")
        job = self.cluster.job(self.number)
        return f"{job['JobState']} {job['ExitCode']}"

    @property
    def run(self) -> RunFolder:
        return RunFolder(next(iter(self.directory.glob("**/latest"))).resolve())

    def learns(self) -> bool:
        """Whether the learner has made steps and left a checkpoint."""
        found = [*self.directory.glob("**/latest")]
        return bool(found) and (found[0] / "checkpoints" / "latest.pt").exists()


@pytest.fixture
def submit(cluster, environment, tmp_path):
    """Return ``submit(*options, **settings) -> Submitted``: `apex submit cartpole` with a small run."""
    apex = tmp_path / "apex"  # what `pip install` makes, for the source of this checkout
    apex.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -P -m launch.cli.main "$@"\n')
    apex.chmod(0o755)
    jobs = []

    def submit_job(*options: str, **settings) -> Submitted:
        log, directory = tmp_path / f"job-{len(jobs)}.log", tmp_path / f"runs-{len(jobs)}"
        values = (
            SMALL
            | {"run.directory": directory}
            | {name.replace("__", "."): value for name, value in settings.items()}
        )
        command = [
            sys.executable,
            "-m",
            "launch.cli.main",
            "submit",
            "cartpole",
            "--mem",
            "100M",
            "--sbatch",
            f"output={log}",
            *options,
        ]
        command += [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
        variables = environment | cluster.environment | {"APEX": str(apex)}
        ended = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        number = int(re.search(r"Submitted batch job (\d+)", ended.stdout)[1])
        jobs.append(Submitted(cluster, number, directory, log))
        return jobs[-1]

    yield submit_job
    for job in jobs:
        cluster.command("scancel", str(job.number))
    for job in jobs:
        job.wait()


def check_ended_in_order(job: Submitted, reason: str, ranks: int) -> dict:
    """Check that a job's run ended as a run should; return its result."""
    assert job.wait() == "COMPLETED 0:0", job.log
    result = job.run.result()
    assert (result["reason"], result["status"], result["ranks"]) == (reason, 0, ranks)
    assert checkpoint.load(job.run.checkpoints / "latest.pt")["learner_steps"] == result["learner_steps"]
    return result


def test_one_node_runs_a_rank_for_each_core(submit):
    job = submit("--ranks-per-node", "4", run__max_learner_steps=200)
    assert check_ended_in_order(job, "learner_steps", 4)["learner_steps"] == 200


@pytest.mark.parametrize("launch", ["srun --mpi=pmix", "mpirun"])
def test_two_nodes_are_one_world(submit, launch):
    job = submit(
        "--nodes",
        "2",
        "--ranks-per-node",
        "2",
        "--launch",
        launch.replace("mpirun", find_mpirun()),
        run__max_learner_steps=200,
    )
    check_ended_in_order(job, "learner_steps", 4)


def test_a_heterogeneous_job_is_one_world_with_the_learner_on_the_node_with_the_GPU(submit):
    job = submit(
        "--kind", "heterogeneous", "--ranks-per-node", "1", "--partition", "cpu", "--learner-partition",
        "gpu",
        run__max_learner_steps=200,
    )  # fmt: skip
    check_ended_in_order(job, "learner_steps", 4)
    # The second part is on cpu1 or cpu2 and counts its ranks from 3.
    assert job.cluster.job(job.number)["NodeList"] == "accel1"


def test_the_doctor_finds_ranks_that_srun_has_started_without_an_MPI(submit):
    job = submit("--nodes", "2", "--ranks-per-node", "2", "--launch", "srun --mpi=none", "--doctor")
    assert job.wait().startswith("FAILED")
    assert job.log.count("4 worlds of one") == 1, job.log
    assert "srun --mpi=list" in job.log


def test_training_that_srun_has_started_without_an_MPI_is_refused(submit):
    job = submit("--nodes", "2", "--ranks-per-node", "2", "--launch", "srun --mpi=none")
    ended = job.wait()
    assert ended.startswith("FAILED")
    assert job.log.count("apex: srun has started 4 tasks, but no MPI") == 1, (ended, job.log)
    assert not [*job.directory.glob("*/config.toml")]


def test_the_doctor_is_content_with_a_world_of_two_nodes(submit):
    job = submit("--nodes", "2", "--ranks-per-node", "2", "--doctor")
    assert job.wait() == "COMPLETED 0:0", job.log
    assert "4 ranks on 2 hosts" in job.log
    assert "apex: 0 wrong" in job.log, job.log
    assert job.log.count("the 2 ranks of cpu") == 2, job.log


def test_a_run_that_is_out_of_time_ends_in_order_and_comes_back(submit, cluster):
    notice_s = 360
    sized = ("--nodes", "2", "--ranks-per-node", "2", "--time", "60")
    job = submit("--kind", "requeue", "--sbatch", f"signal=B:USR1@{notice_s}", *sized, **FOR_EVER)
    job.wait_until(job.learns, STARTS_S, "the first checkpoint")
    hours, minutes, _ = map(int, cluster.job(job.number)["RunTime"].split(":"))
    soon = (
        60 * hours + minutes + notice_s // 60
    )  # minutes: less than the notice is left, and enough to end in order
    cluster.command("scontrol", "update", f"JobId={job.number}", f"TimeLimit={soon}")
    check_comes_back(job)


def test_a_preempted_run_ends_in_order_comes_back_and_goes_on(submit, cluster):
    job = submit("--kind", "requeue", "--ranks-per-node", "4", **FOR_EVER)
    job.wait_until(job.learns, STARTS_S, "the first checkpoint")
    node = cluster.job(job.number)["NodeList"]
    higher = [
        "sbatch",
        "--partition=high",
        f"--nodelist={node}",
        "--ntasks=4",
        "--output=/dev/null",
        "--wrap=sleep 1",
    ]
    cluster.command(*higher)
    steps = check_comes_back(job)
    job.wait_until(lambda: job.state == "RUNNING", STARTS_S, "the second start")
    job.wait_until(
        lambda: (job.run.rows() or [{"learner_steps": 0}])[-1]["learner_steps"] > steps,
        STARTS_S,
        "more steps",
    )
    cluster.command("scancel", "--signal=TERM", "--batch", str(job.number))
    assert check_ended_in_order(job, "signal", 4)["learner_steps"] > steps


def check_comes_back(job: Submitted) -> int:
    """Check that a job ends its run in order and is in the queue again.

    Return the learner steps of the run.
    """
    job.wait_until(lambda: job.cluster.job(job.number)["Restarts"] == "1", ENDS_S, "the requeue")
    result = job.run.result()
    assert (result["reason"], result["status"]) == ("signal", 0), job.log
    assert checkpoint.load(job.run.checkpoints / "latest.pt")["learner_steps"] == result["learner_steps"] > 0
    return result["learner_steps"]
