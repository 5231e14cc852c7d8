"""Runs in one process that are killed and resumed, with all that they compute."""

import contextlib
import signal

import numpy as np
import pytest
import torch

from apex.run_folder import RunFolder
from apex.schema import intake_nbytes
from launch.cli.main import main
from launch.run import local
from learner.train_step import TrainStep

TINY = {
    "run.transport": "local", "run.log_period_s": 0.05, "algorithm.hidden": 16, "actor.count": 2,
    "actor.envs": 4,
    "actor.intake_batch": 10, "replay.capacity": 500, "replay.min_size": 100, "learner.batch_size": 16,
    "learner.target_period": 20,
    "learner.publish_period": 10, "evaluator.episodes": 2, "evaluator.period": 20, "replay.error_buffer": 0.5,
    "replay.samples_per_insert": 2.0, "learner.checkpoint_period": 30, "actor.refresh_period": 3,
}  # fmt: skip


@pytest.fixture
def as_before():
    """A run sets torch's threads and takes the signals; give both back."""
    threads, numbers = torch.get_num_threads(), (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    torch.set_num_threads(threads)
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)


class Killed(BaseException):
    """Ends a run where nothing can be tidied up."""


class Runs:
    """Runs of one configuration, whose losses and last states are kept."""

    def __init__(self, directory, preset, patch, **changes):
        self.directory, self.preset = directory, preset
        self.settings = (
            TINY
            | {name.replace("__", "."): value for name, value in changes.items()}
            | {"run.directory": directory}
        )
        self.losses: dict[int, float] = {}
        self.roles, self.killed_at = [], None
        call, build = TrainStep.__call__, local.build

        def record(step, *args):
            if step.learner_steps == self.killed_at:
                raise Killed
            result = call(step, *args)
            self.losses[step.learner_steps] = result.loss
            return result

        def keep(*args):
            self.roles.append(build(*args))
            return self.roles[-1]

        patch.setattr(TrainStep, "__call__", record)
        patch.setattr(local, "build", keep)

    def train(self, steps, *more, killed_at=None):
        """Run up to that many learner steps; return the losses by step."""
        self.losses, self.roles, self.killed_at = {}, [], killed_at
        settings = self.settings | {"run.max_learner_steps": steps}
        arguments = [x for name, value in settings.items() for x in ("--set", f"{name}={value}")]
        with contextlib.suppress(Killed):
            assert main(["train", self.preset, *arguments, *more]) == 0
        return dict(self.losses)

    def resume(self, steps, *more, **options):
        """Go on with the same command and ``--resume``."""
        return self.train(steps, "--resume", str(self.directory / "latest"), *more, **options)

    @property
    def folder(self):
        return RunFolder(self.directory / "latest")

    def everything(self):
        """Return all that a run computes, as bytes.

        Weights, optimiser, replay and what the actors counted.
        """
        state = self.roles[0].train.state_dict()
        tensors = [*state["online"].values(), *state["target"].values(), state["random"]["cpu"]]
        tensors += [t for slot in state["optimizer"]["state"].values() for t in slot.values()]
        arrays = [t.numpy() for t in tensors]
        for role in self.roles:
            if role.counters.role == "replay":
                replay = role.replay
                replay.check()
                live = np.flatnonzero(replay.count)
                arrays += [
                    replay.index.save(),
                    replay.generation,
                    replay.count,
                    replay.strata.state,
                    np.array(replay.landing_place),
                ]
                arrays += [_message(replay.store, place) for place in live]
            if role.counters.role == "actor":
                arrays += [
                    role.counters.vector()[:5],
                    role.intake._pool,
                    np.array(str(role.rng.bit_generator.state)),
                ]
        return b"".join(array.tobytes() for array in arrays)


def _message(store, place):
    """Return the used bytes of a place."""
    return store.buffer[
        place, : intake_nbytes(store.layout, store.spec, int(store.views["header"][place, 1]))
    ]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return ``runs(name, **changes) -> Runs`` of CartPole, each in a folder of its own."""
    return lambda name, preset="cartpole", **changes: Runs(tmp_path / name, preset, monkeypatch, **changes)
