"""The indexes of torch on a GPU: the conformance suite there, and the bits of the host.

Run with:  python -m pytest -q tests/device/test_torch_index_cuda.py
"""

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("index_conformance")

from index_conformance import IndexConformance, RankConformance  # noqa: E402

from replay_rank.index import make_index  # noqa: E402
from replay_rank.strata import Strata  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and torch sees none", allow_module_level=True)

both = pytest.mark.parametrize("name", ["torch", "rank_torch"])


class TestTorchIndexOnCuda(IndexConformance):
    exact = False
    examples = 15  # every call waits for the device, so a history takes longer than on a CPU
    device = "cuda"

    def new_index(self, capacity, **options):
        return make_index("torch", capacity, **{"device": "cuda", **options})


class TestTorchRanksOnCuda(RankConformance):
    examples = 15
    device = "cuda"

    def new_index(self, capacity, **options):
        return make_index("rank_torch", capacity, **{"device": "cuda", **options})


@both
def test_both_devices_hold_the_same_bits(name):
    cpu, cuda = make_index(name, 5000), make_index(name, 5000, device="cuda")
    for k in (1, 512, 20_000):
        rng = np.random.default_rng(k)
        slots, mass = rng.integers(0, 5000, k), rng.random(k)
        cuda.set(slots, mass)
        cpu.set(slots, mass)
        assert cuda.save().tobytes() == cpu.save().tobytes()
        assert (cuda.total, cuda.minimum) == (cpu.total, cpu.minimum)
        cuda.check()


@both
def test_equal_strata_draw_equal_slots_on_both_devices(name):
    cpu, cuda = make_index(name, 5000), make_index(name, 5000, device="cuda")
    priority = np.random.default_rng(4).random(5000)
    cpu.load(priority)
    cuda.load(priority)
    one, other = cpu.draw(Strata(5), 4096)[0], cuda.draw(Strata(5), 4096)[0]
    # A target within rounding of a boundary may fall on the other side of it, in a tree.
    assert (one == other).mean() >= (1.0 if name == "rank_torch" else 0.999)
