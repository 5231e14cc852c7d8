"""Whole jobs killed by SIGKILL at random moments, checkpoint writes included, and resumed.

And a disk that is full.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from small_checkpoints import verify

from apex import checkpoint
from apex import config as configuration
from apex.checkpoint import Reader
from apex.envs import env_spec
from apex.run_folder import RunFolder
from replay_rank.persistence import Restore, Segments
from replay_rank.rate_limit import RateLimiter
from replay_rank.replay import Replay

TRAIN = [sys.executable, "-m", "launch.cli.main", "train", "cartpole"]
SMALL = {
    "run.log_period_s": 0.1, "run.stop_at_target": "false", "run.max_learner_steps": 1_000_000,
    "algorithm.hidden": 16, "actor.envs": 4,
    "actor.intake_batch": 10, "replay.capacity": 2000, "replay.min_size": 200,
    "replay.samples_per_insert": 4.0,
    "learner.batch_size": 16, "learner.checkpoint_period": 20, "evaluator.episodes": 1,
    "evaluator.period": 200,
}  # fmt: skip
COUNTERS = (
    "wall_s",
    "learner_steps",
    "agent_steps",
    "env_frames",
    "episodes",
    "transitions",
    "param_version",
    "evaluations",
)
STARTS_S, ENDS_S = 400, 400
pytestmark = pytest.mark.spread


class Runs:
    """One run that is killed and resumed over and over."""

    def __init__(self, start, directory, transport):
        self.start, self.directory, self.transport = start, directory, transport
        self.env = {
            "OMPI_MCA_btl_sm_backing_directory": str(directory.parent)
        }  # a killed mpirun leaves its memory behind
        self.jobs = 0

    def begin(self, **changes):
        """Start it, or go on with it."""
        values = (
            SMALL
            | {"run.directory": self.directory}
            | {name.replace("__", "."): value for name, value in changes.items()}
        )
        arguments = [text for name, value in values.items() for text in ("--set", f"{name}={value}")]
        resume = ["--resume", self.directory / "latest"] if self.jobs else []
        self.jobs += 1
        return self.start([*TRAIN, "--transport", self.transport, *resume, *arguments], self.env)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.directory / "latest")

    def newest(self) -> int:
        """Return the learner steps of the newest checkpoint, -1 while there is none."""
        return max(map(checkpoint.steps_of, checkpoint.complete(self.folder.checkpoints)), default=-1)

    def saved(self) -> Reader:
        """Return the newest checkpoint, after every byte of it has been checked."""
        folder = checkpoint.complete(self.folder.checkpoints)[0]
        verify(folder)
        return Reader(folder, configuration.load(str(self.folder.config_path)), 1)


def seal_again(folder) -> None:
    """Give a checkpoint's manifest the digests of its files as they are now."""
    held = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    for name in held["files"]:
        data = (folder / name).read_bytes()
        held["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    text = json.dumps(held, sort_keys=True).encode()
    (folder / "manifest.json").write_text(
        json.dumps({"sha256": hashlib.sha256(text).hexdigest(), "manifest": held})
    )


def kill_all(job) -> None:
    """Kill every process of a job at once, as a power cut would."""
    while pids := list(job.processes()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    job.process.wait()


def check_tree(saved: Reader) -> None:
    """Check that every replay rank's index is, to the last bit, that of its leaves, and its leaves those
    that were saved.
    """
    config = configuration.from_tables([("saved", saved.config)])
    for index in range(saved.replay_ranks):
        replay = Replay(config, env_spec(config.env), np.random.default_rng(0))
        Restore(saved, index, saved.replay_ranks)(
            replay, RateLimiter(config), Segments(saved.folder.parent, "", replay.store.buffer)
        )
        replay.check()
        mass = saved.state(f"replay-{index}")["replay"]["index"]["mass"]
        fresh = Replay(config, env_spec(config.env), np.random.default_rng(0)).index
        assert replay.index.save().tobytes() == mass.tobytes()
        assert (replay.index.total, replay.index.minimum) == fresh.load(mass)


def check_log(folder: RunFolder) -> None:
    rows = folder.rows()
    for name in COUNTERS:
        values = [row[name] for row in rows]
        assert values == sorted(values), f"{name} runs backwards"


CHANGES = {
    "mpi": [
        {"actor__count": 2, "replay__ranks": 2},
        {"actor__count": 1, "replay__capacity": 4000},
        {"replay__ranks": 1},
    ],
    "zmq": [{"replay__ranks": 2}, {"replay__ranks": 1, "actor__count": 2}],
}  # what is changed when a run goes on after each kill
ROUNDS = int(os.environ.get("KILL_ROUNDS", 1))  # `make soak` kills more often


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("transport", CHANGES if ROUNDS > 1 else ["mpi"])
def test_a_job_killed_at_random_moments_goes_on_from_its_last_checkpoint(start, tmp_path, figure, transport):
    runs, rng = Runs(start, tmp_path / "runs", transport), random.Random(transport)
    changes, before = {}, -1
    for change in CHANGES[transport] * ROUNDS:
        changes |= change
        job = runs.begin(**changes)
        job.wait_until(lambda before=before: runs.newest() > before, STARTS_S, "a new checkpoint")
        time.sleep(rng.random())
        kill_all(job)
        saved = runs.saved()
        assert saved.learner_steps > before
        check_tree(saved)
        check_log(runs.folder)
        before = saved.learner_steps
    end = before + 50
    ended = runs.begin(**changes, run__max_learner_steps=end).wait(ENDS_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"resuming at {before} learner steps; environments begin new episodes" in ended.stdout
    assert runs.folder.result()["learner_steps"] == runs.saved().learner_steps == end
    check_log(runs.folder)
    assert runs.folder.rows()[-1]["agent_steps"] > 0
    assert not list(runs.folder.checkpoints.glob(".*"))
    figure(
        f"kills of a whole job resumed from, its tree equal to the last bit, {transport}",
        len(CHANGES[transport]) * ROUNDS,
    )


def last_state(folder: RunFolder, steps: int) -> list[bytes]:
    """Return networks, optimiser, replay and actors of a checkpoint, as bytes."""
    path = folder.checkpoints / f"step-{steps:09d}"
    state = torch.load(path / "learner.pt", weights_only=True)
    tensors = [*state["online"].values(), *state["target"].values(), state["random"]["cpu"]]
    tensors += [tensor for slot in state["optimizer"]["state"].values() for tensor in slot.values()]
    parts = [tensor.numpy().tobytes() for tensor in tensors]
    for name in ("replay-0", "actor-0"):
        with np.load(path / f"{name}.npz") as arrays:
            parts += [arrays[key].tobytes() for key in sorted(arrays.files) if key not in ("segment", "row")]
    values = json.loads((path / "learner.json").read_text())["values"]
    return [
        *parts,
        json.dumps(
            [values["answers"]["actor"]["0"]["rng"], values["transport"], values["importance"]]
        ).encode(),
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_local_run_killed_at_random_moments_ends_to_the_last_bit_as_one_that_was_not(
    start, tmp_path, figure
):
    steps, rng = 500 * ROUNDS, random.Random("local")
    whole, killed = (Runs(start, tmp_path / name, "local") for name in ("whole", "killed"))
    assert whole.begin(run__max_learner_steps=steps).wait(ENDS_S).returncode == 0
    kills, before = 0, -1
    while kills < 3 * ROUNDS:
        job = killed.begin(run__max_learner_steps=steps)
        job.wait_until(lambda before=before: killed.newest() > before, STARTS_S, "a new checkpoint")
        time.sleep(0.1 * rng.random())
        assert job.process.poll() is None, "it has come to its end before enough kills"
        kill_all(job)
        kills, before = kills + 1, killed.saved().learner_steps
        check_tree(killed.saved())
        check_log(killed.folder)
    ended = killed.begin(run__max_learner_steps=steps).wait(ENDS_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "every environment goes on where it was" in ended.stdout
    assert last_state(killed.folder, steps) == last_state(whole.folder, steps)
    figure("kills of a whole job resumed from, the run's end equal to the last bit, local", kills)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport, damaged", [("local", "replay-0.npz"), ("zmq", "*.bin")])
def test_a_damaged_file_costs_its_checkpoint_and_a_damaged_segment_its_places_only(
    start, tmp_path, transport, damaged
):
    runs = Runs(start, tmp_path / "runs", transport)
    assert runs.begin(run__max_learner_steps=70).wait(ENDS_S).returncode == 0
    newest, before = checkpoint.complete(runs.folder.checkpoints)[:2]
    path = next(newest.glob(damaged))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    ended = runs.begin(run__max_learner_steps=90).wait(ENDS_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"{newest.name}: {path.name} has been changed" in ended.stderr
    goes_on_from, is_lost = (newest, True) if damaged == "*.bin" else (before, False)
    assert f"resuming at {checkpoint.steps_of(goes_on_from)} learner steps" in ended.stdout
    assert ("replay transitions are lost" in ended.stderr) == is_lost
    assert runs.saved().learner_steps == 90
    check_log(runs.folder)


@pytest.mark.timeout(900)
def test_a_second_job_in_a_run_folder_is_refused_and_the_first_ends_with_its_own_result(start, tmp_path):
    runs = Runs(start, tmp_path / "runs", "zmq")
    first = runs.begin()
    first.wait_until(lambda: runs.newest() > 0, STARTS_S, "a checkpoint")
    second = runs.begin(run__max_learner_steps=runs.newest() + 40).wait(ENDS_S)
    assert second.returncode == 2 and second.stderr.count("\n") == 1, second.stderr
    assert f"is in use by process {first.process.pid} on " in second.stderr
    played = start(
        [*TRAIN[:-2], "eval", str(runs.folder.path), "--checkpoint", "latest", "--episodes", "1"]
    ).wait(ENDS_S)
    assert played.returncode == 0 and "greedy return" in played.stdout, played.stderr
    first.process.send_signal(signal.SIGTERM)
    ended = first.wait(ENDS_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = runs.folder.result()
    assert result["reason"] == "signal" and result["learner_steps"] == runs.saved().learner_steps > 0
    newest = runs.saved().folder
    torch.save({"online": {}}, newest / "learner.pt")
    seal_again(newest)
    refused = runs.begin().wait(ENDS_S)  # what only the learner's rank reads
    assert refused.returncode == 1 and "Traceback" not in refused.stderr + refused.stdout, refused.stderr
    assert (
        refused.stderr.splitlines()[-1].startswith("apex: checkpoint ")
        and runs.folder.error().count("\n") == 1
    )


def fill(filler: Path, left_mib: float) -> None:
    """Write the disk of `filler` full, but for `left_mib`.

    The run writes there too, so the disk may be full before.
    """
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while (room := int(shutil.disk_usage(filler.parent).free - left_mib * 2**20)) > 0:
            file.write(bytes(min(room, 1 << 20)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport, left_mib", [("mpi", 4), ("zmq", 0.25)])
def test_a_full_disk_costs_checkpoints_and_a_warning_and_never_the_run(
    start, small_disk, transport, left_mib
):
    runs = Runs(start, small_disk / "runs", transport)
    job = runs.begin()
    job.wait_until(lambda: runs.newest() > 0, STARTS_S, "a checkpoint")
    filler = small_disk / "filler"
    fill(filler, left_mib)
    told = job.folder / "stderr"
    job.wait_until(lambda: "apex: warning: no checkpoint step-" in told.read_text(), STARTS_S, "a warning")
    assert "No space left on device" in told.read_text()
    during = runs.newest()
    filler.unlink()
    job.wait_until(lambda: runs.newest() > during, STARTS_S, "a checkpoint after there was room again")
    job.process.send_signal(signal.SIGTERM)
    ended = job.wait(ENDS_S)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert runs.saved().learner_steps == runs.folder.result()["learner_steps"]
    assert not list(runs.folder.checkpoints.glob(".*"))
