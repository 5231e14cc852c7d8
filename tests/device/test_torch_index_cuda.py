"""The indexes of torch on a GPU: the conformance suite there, and that no call of tensors waits for it.

Run with:  python -m pytest -q tests/device/test_torch_index_cuda.py
"""

import math

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("index_conformance")

from index_conformance import IndexConformance, RankConformance  # noqa: E402
from scipy import stats  # noqa: E402

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


@pytest.fixture
def never_waiting():
    """Make every wait of the host for the device an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def batch(k, capacity):
    """Slots (int64[k]) and masses (float64[k]) on the device, bad ones among them."""
    rng = np.random.default_rng(k)
    slots, mass = rng.integers(-1, capacity + 1, k), rng.random(k)
    mass[::7] = math.nan
    return torch.from_numpy(slots).cuda(), torch.from_numpy(mass).cuda()


@both
@pytest.mark.parametrize("capacity", [100, 2**20])
def test_writing_and_drawing_never_wait_for_the_device(name, capacity, request):
    index = make_index(name, capacity, device="cuda")
    batches = [batch(k, capacity) for k in (1, 512, 20_000)]
    uniforms = torch.from_numpy(Strata(1).uniforms(512)).cuda()
    request.getfixturevalue("never_waiting")
    for slots, mass in batches:
        index.write(slots, mass)
        index.draw_tensors(512)
        index.draw_tensors(512, uniforms)
    with pytest.raises(RuntimeError, match="synchroniz"):
        index.clamped.item()


@both
def test_both_devices_hold_the_same_bits(name):
    cpu, cuda = make_index(name, 5000), make_index(name, 5000, device="cuda")
    for k in (1, 512, 20_000):
        slots, mass = batch(k, 5000)
        cuda.write(slots, mass)
        cpu.write(slots.cpu(), mass.cpu())
        assert cuda.save().tobytes() == cpu.save().tobytes()
        assert (cuda.total, cuda.minimum) == (cpu.total, cpu.minimum)
        assert (cuda.clamped.item(), cuda.dropped.item()) == (cpu.clamped.item(), cpu.dropped.item())
        cuda.check()


@both
def test_both_devices_draw_from_the_same_distribution(name):
    priority = np.random.default_rng(2).random(60) * (np.arange(60) % 5 > 0)
    cpu, cuda = make_index(name, 60), make_index(name, 60, device="cuda")
    cpu.load(priority)
    cuda.load(priority)
    generator, strata, counts = torch.Generator("cuda").manual_seed(3), Strata(3), np.zeros((2, 60))
    for _ in range(2000):
        counts[0] += np.bincount(cuda.draw_tensors(10, generator=generator)[0].cpu().numpy(), minlength=60)
        counts[1] += np.bincount(cpu.draw(strata, 10)[0], minlength=60)
    assert not counts[:, priority == 0.0].any()
    assert stats.chi2_contingency(counts[:, priority > 0.0]).pvalue > 1e-3


@both
def test_equal_uniforms_draw_equal_slots_on_both_devices(name):
    cpu, cuda = make_index(name, 5000), make_index(name, 5000, device="cuda")
    priority = np.random.default_rng(4).random(5000)
    cpu.load(priority)
    cuda.load(priority)
    uniforms = torch.from_numpy(Strata(5).uniforms(4096))
    one, other = cpu.draw_tensors(4096, uniforms), cuda.draw_tensors(4096, uniforms.cuda())
    # A target within rounding of a boundary may fall on the other side of it, in a tree.
    assert (one[0] == other[0].cpu()).double().mean() >= (1.0 if name == "rank_torch" else 0.999)
