"""Checkpoints of a few bytes, and whether every byte of one is right."""

import os
from pathlib import Path

import numpy as np

from apex import checkpoint
from apex.checkpoint import Part
from apex.config import load, to_tables
from apex.control import CheckpointRequest
from apex.state import split
from launch.run import resume

ABOUT = {"config": to_tables(load("cartpole")), "replay_ranks": 1, "num_actors": 1}
PARTS = ("learner", "replay-0")
RECORD = {"wall_s": 1.0, "eval_return": 1.0, "eval_episodes": 1, "evaluations": 1}
COUNTS = {"inserted": 3, "sampled": 0, "stale_updates": 0, "landing": 0, "newest_generation": 1, "slots": 50}
ARRAYS = {"generation": np.arange(10), "count": np.arange(10), "index": {"mass": np.arange(50.0)}}
STATES = {
    "learner": {
        "run_log": RECORD, "answers": {}, "counters": {"x": 1.0}, "importance": {"smallest": [1.0]},
        "param_version": 1, "turn": 0,
        "publish_at": 0, "requested": 0, "mass": np.arange(50.0),
    },
    "replay-0": {
        "replay": COUNTS | ARRAYS | {"strata": {"state": 1}}, "limiter": {"inserted": 3, "sampled": 0},
        "counters": {"x": 1.0},
        "open_requests": 0, "segments": {}, "places": 3, "segment": np.arange(10), "row": np.arange(10),
    },
}  # fmt: skip


def write_parts(checkpoints, steps, number=1):
    """Write the two parts of a checkpoint; return its folder as it is and as it is to be."""
    request = CheckpointRequest(number, steps, 0)
    partial = request.partial(checkpoints)
    partial.mkdir(parents=True)
    for name in PARTS:
        part = Part(partial, name)
        values, arrays = split(STATES[name])
        part.arrays({**arrays, "steps": np.array(steps)})
        with part.file(f"{name}.bin") as file:
            file.write(os.urandom(3000))
        part.finish(values)
    return partial, checkpoints / request.name


def write(checkpoints, steps, number=1):
    """Write a checkpoint of two parts; return its folder."""
    partial, target = write_parts(checkpoints, steps, number)
    checkpoint.commit(partial, target, ABOUT | {"learner_steps": steps}, PARTS)
    return target


def newest(checkpoints):
    return resume.newest(checkpoints, load("cartpole"))[0].folder


def verify(folder: Path) -> dict:
    """Return the manifest; raise ``Corrupt`` for a wrong file."""
    manifest, wrong = checkpoint.examine(folder)
    for name, what in wrong.items():
        raise checkpoint.Corrupt(f"checkpoint {folder}: {name} {what}")
    return manifest
