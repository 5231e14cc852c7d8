"""Short runs in one process, with what they left."""

import numpy as np
import pytest

from apex.config import load, to_toml
from apex.run_folder import RunFolder, create
from apex.topology import make
from launch.run import local, preflight
from learner.train_step import TrainStep

STEPS = 80
TINY = [
    f"run.max_learner_steps={STEPS}",
    "run.transport=local",
    "run.log_period_s=0.05",
    "algorithm.hidden=16",
    "actor.count=2",
    "actor.envs=4",
    "actor.intake_batch=10",
    "replay.capacity=500",
    "replay.min_size=100",
    "learner.batch_size=16",
    "learner.target_period=20",
    "learner.publish_period=10",
    "evaluator.episodes=2",
    "evaluator.period=20",
    "replay.error_buffer=0.5",
]


class Run:
    """One run: its configuration, folder and roles, and the loss of each learner step."""

    def __init__(self, folder, *overrides):
        self.config = load("cartpole", [*TINY, f"run.directory={folder}", *overrides])
        self.folder = RunFolder(create(folder, "cartpole", self.config.run.seed))
        self.folder.write_config(to_toml(self.config))
        self.roles, self.losses = [], []

    def start(self):
        topology = make(self.config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, "build", self._keeping(local.build))
            patch.setattr(TrainStep, "__call__", self._recording(TrainStep.__call__))
            local.run(self.config, preflight.check(self.config), topology, self.folder, "cartpole")
        self.learner, self.actors = self.roles[0], self.roles[2 + self.config.replay.ranks :]
        self.replays = self.roles[1 : 1 + self.config.replay.ranks]
        return self

    def _keeping(self, build):
        def keep(*args):
            self.roles.append(build(*args))
            return self.roles[-1]

        return keep

    def _recording(self, call):
        def record(step, *args):
            result = call(step, *args)
            self.losses.append(result.loss)
            return result

        return record

    def everything(self):
        """Return all that a run computes, as bytes.

        Losses, weights, optimiser, replay and what the actors counted.
        """
        state = self.learner.train.state_dict()
        tensors = [*state["online"].values(), *state["target"].values()]
        tensors += [t for slot in state["optimizer"]["state"].values() for t in slot.values()]
        arrays = [np.array(self.losses), *(t.numpy() for t in tensors)]
        for role in self.replays:
            replay = role.replay
            arrays += [
                replay.index.get(np.arange(replay.slots)),
                replay.generation,
                replay.count,
                replay.store.buffer,
            ]
        arrays += [
            np.array([a.counters[n] for n in ("agent_steps", "episodes", "return_sum", "transitions")])
            for a in self.actors
        ]
        return b"".join(array.tobytes() for array in arrays)
