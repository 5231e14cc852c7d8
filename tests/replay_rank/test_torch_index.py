"""The indexes of torch beyond the contract: sums, ranks, duplicates and devices."""

import math

import numpy as np
import pytest
import torch

from replay_rank.index import make_index
from replay_rank.index._tensor import last_rows

NAMES = ["torch", "rank_torch"]
both = pytest.mark.parametrize("name", NAMES)


def tensors(slots, mass, dtype=torch.float64):
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(mass, dtype=dtype)


def filled(name, mass, **options):
    index = make_index(name, len(mass), **options)
    index.load(np.asarray(mass, np.float64))
    return index


def test_the_spare_slot_takes_every_row_but_the_last_of_a_slot():
    slots, mass = last_rows(*tensors([2, 9, 2, 0, 2, 9], [1.0, 5.0, 2.0, 3.0, -0.0, 6.0]), spare=9)
    assert slots.tolist() == [0, 9, 9, 2, 9, 9]
    assert mass.tolist() == [3.0, 0.0, 0.0, 0.0, 0.0, 0.0] and not mass.signbit().any()


# --- the tree, the ranks and their options --------------------------------------------------------------


@pytest.mark.parametrize("fan_out", [2, 8, 128, 1024])
@pytest.mark.parametrize("capacity", [1, 7, 128, 5000])
def test_the_sums_of_the_wide_tree_are_those_of_a_binary_one_to_the_last_bit(fan_out, capacity):
    mass = 10.0 ** np.random.default_rng(capacity).uniform(-6, 6, capacity)
    tree, binary = filled("torch", mass, fan_out=fan_out), filled("binary", mass)
    assert (tree.total, tree.minimum) == (binary.total, binary.minimum)
    tree.check()


def test_a_target_beyond_what_a_row_adds_up_to_falls_on_its_last_filled_entry():
    index = filled("torch", [1.0, 0.0, 2.0, 0.0, 0.0])
    index._sum[-1] *= 1.001  # as if the total were rounded up by that much
    slots, mass = index.find_prefix(np.array([2.999, 3.0, 3.002, 9.0]))
    assert slots.tolist() == [2] * 4 and mass.tolist() == [2.0] * 4


def test_a_sum_made_in_parallel_that_rises_at_an_empty_entry_does_not_choose_it(monkeypatch):
    index = filled("torch", [1.0, 0.0, 2.0])
    uneven = torch.tensor([[1.0, 1.0 + 2.0**-52, 3.0, 3.0 + 2.0**-50]], dtype=torch.float64)
    monkeypatch.setattr(
        torch.Tensor, "cumsum", lambda rows, dim: torch.nn.functional.pad(uneven, (0, 124), value=3.0)
    )
    for target in (1.0, 3.0, 3.0 + 2.0**-51):
        assert index._descend(torch.tensor([target], dtype=torch.float64)).tolist() == [2]


def test_check_names_a_damaged_entry_of_the_tree():
    index = filled("torch", np.ones(300), fan_out=4)
    index._sum[1].view(-1)[7] += 1.0
    with pytest.raises(AssertionError, match="entry 7 of level 1 "):
        index.check()
    index = filled("torch", np.ones(300))
    index._sum[0].view(-1)[300] = 1.0
    with pytest.raises(AssertionError, match="entry 300 of level 0 "):
        index.check()


def test_check_names_a_damaged_rank():
    index = filled("rank_torch", [3.0, 2.0, 1.0])
    index.check()
    index._priorities[1] = 9.0  # behind the back of the order
    with pytest.raises(AssertionError, match="rank 2 is out of order"):
        index.check()
    index._priorities[1] = math.nan
    with pytest.raises(AssertionError, match="slot 1 "):
        index.check()


def test_a_priority_set_after_a_draw_has_its_new_rank():
    index = filled("rank_torch", [1.0, 2.0, 3.0])
    for slot, priority in [(0, 9.0), (1, 10.0), (0, 11.0)]:
        index.set(np.array([slot]), np.array([priority]))
        assert index.find_prefix(np.zeros(1))[0].tolist() == [slot]


@pytest.mark.parametrize("fan_out", [0, 1, 3, 100, -2])
def test_a_fan_out_that_is_no_power_of_two_is_refused(fan_out):
    with pytest.raises(ValueError, match=f"power of two >= 2, got {fan_out}"):
        make_index("torch", 5, fan_out=fan_out)


@both
@pytest.mark.parametrize("device", ["gpu", "", "cuda:9999", "meta", None, 3, "mps:7"])
def test_a_device_that_is_not_here_is_refused_in_one_line(name, device):
    with pytest.raises(ValueError, match="device") as refusal:
        make_index(name, 5, device=device)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 200


def out_of_memory() -> list[RuntimeError]:
    """What torch raises without memory: on a card, and, told by trying, on the CPU."""
    with pytest.raises(RuntimeError) as on_cpu:
        torch.zeros(2**45, dtype=torch.float64)
    return [torch.OutOfMemoryError("out of memory"), on_cpu.value]


@both
@pytest.mark.parametrize("error", out_of_memory(), ids=["card", "cpu"])
def test_an_index_too_large_for_its_device_is_a_memory_error(name, error, monkeypatch):
    refuse_large(monkeypatch, error)
    with pytest.raises(MemoryError, match="no memory for a priority index of capacity 1000"):
        make_index(name, 1000)


@both
def test_another_error_of_torch_is_not_called_a_lack_of_memory(name, monkeypatch):
    refuse_large(monkeypatch, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        make_index(name, 1000)


@both
def test_a_device_without_float64_is_refused(name, monkeypatch):
    zeros = torch.zeros

    def narrow(shape, dtype=torch.float32, device=None):
        if dtype == torch.float64:
            raise TypeError("Cannot convert a tensor to float64")
        return zeros(shape, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "zeros", narrow)
    with pytest.raises(ValueError, match=r"'cpu'.*float64"):
        make_index(name, 5)


def refuse_large(monkeypatch, error: RuntimeError) -> None:
    zeros = torch.zeros

    def too_large(shape, **options):
        if shape == () or np.prod(shape) < 1000:
            return zeros(shape, **options)
        raise error

    monkeypatch.setattr(torch, "zeros", too_large)


@both
def test_the_backend_names_the_device(name):
    assert make_index(name, 5).backend == "torch cpu"
    assert make_index(name, 100_000).nbytes >= 800_000
