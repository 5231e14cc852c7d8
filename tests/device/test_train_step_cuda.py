"""The learner's update on a GPU: the same numbers as on a CPU, from pinned memory that is used again.

Run with:  python -m pytest -q tests/device/test_train_step_cuda.py
"""

import numpy as np
import pytest
import torch

from apex.config import from_tables
from apex.schema import EnvSpec, aligned_bytes, sample_layout
from learner.train_step import TrainStep

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and torch sees none", allow_module_level=True)

SPEC, BATCH = EnvSpec((84, 84), "uint8", 4, 6), 32


def make_step(device: str) -> TrainStep:
    tables = {
        "learner": {"batch_size": BATCH, "device": device},
        "algorithm": {"network": "nature_cnn", "hidden": 32},
    }
    return TrainStep(from_tables([("test", tables)]), SPEC)


def sample(seed: int):
    rng, layout = np.random.default_rng(seed), sample_layout(SPEC, BATCH)
    views = layout.views(aligned_bytes(layout.nbytes))
    for name in ("obs", "next_obs"):
        views[name][:] = rng.integers(0, 256, views[name].shape, np.uint8)
    views["action"][:] = rng.integers(SPEC.num_actions, size=BATCH)
    views["reward"][:], views["discount"][:] = rng.normal(size=BATCH), 0.97
    return views, rng.random(BATCH).astype(np.float32)


def test_every_step_sees_its_own_batch_as_on_a_cpu_though_the_memory_is_used_again():
    here, there = make_step("cpu"), make_step("cuda")
    there.online.load_state_dict(here.online.state_dict())
    there.target.load_state_dict(here.target.state_dict())
    for seed in range(5):
        ours, theirs = here(*sample(seed)), there(*sample(seed))
        assert np.allclose(ours.priority, theirs.priority, rtol=1e-2, atol=1e-3)
    pinned = {name: tensor.data_ptr() for name, tensor in there._pinned.items()}
    there(*sample(6))
    assert pinned and {name: tensor.data_ptr() for name, tensor in there._pinned.items()} == pinned
    assert all(tensor.is_pinned() for tensor in there._pinned.values())
