"""The indexes of torch beyond the contract: calls that take tensors, and that none of them waits for the device."""

import contextlib
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode

from replay_rank import tensor_index
from replay_rank.index import make_index
from replay_rank.strata import Strata
from replay_rank.tensor_index import clamp, last_rows

NAMES = ["torch", "rank_torch"]
both = pytest.mark.parametrize("name", NAMES)


def tensors(slots, mass, dtype=torch.float64):
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(mass, dtype=dtype)


def filled(name, mass, **options):
    index = make_index(name, len(mass), **options)
    index.load(np.asarray(mass, np.float64))
    return index


def everything(index):
    """What an index says about its content, as bytes."""
    return np.append(index.save(), [index.total, index.minimum]).tobytes()


# --- write ----------------------------------------------------------------------------------------


@both
def test_good_rows_are_written_as_set_writes_them(name):
    rng = np.random.default_rng(1)
    one, other = make_index(name, 300), make_index(name, 300)
    for k in (0, 1, 50, 700):
        slots, mass = rng.integers(0, 300, k), 10.0 ** rng.uniform(-6, 6, k) * (rng.random(k) < 0.8)
        one.write(torch.from_numpy(slots), torch.from_numpy(mass))
        other.set(slots, mass)
        assert everything(one) == everything(other)
        one.check()
    assert one.clamped.item() == one.dropped.item() == 0


@both
def test_a_bad_mass_is_clamped_and_counted(name):
    index = make_index(name, 8, floor=0.25)
    bad = [math.nan, -1.0, -math.inf, -5e-324, math.inf, 1.7e308 if name == "torch" else math.inf]
    index.write(*tensors(range(8), [*bad, 3.0, 1e-9]))
    assert index.save().tolist() == [0.25] * 4 + [index.largest] * 2 + [3.0, 1e-9]
    assert index.clamped.item() == 6 and index.dropped.item() == 0
    index.write(*tensors([0, 0], [math.nan, 1.0]))
    assert index.clamped.item() == 7 and index.save()[0] == 1.0
    index.check()


@both
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_empties_a_slot_and_is_not_counted(name, zero):
    index = filled(name, [1.0, 2.0])
    index.write(*tensors([1], [zero]))
    assert np.signbit(index.save()).tolist() == [False, False] and index.save().tolist() == [1.0, 0.0]
    assert index.clamped.item() == 0
    assert set(index.find_prefix(np.linspace(0.0, 3.0, 50))[0]) == {0}


@both
def test_a_slot_out_of_range_is_dropped_and_counted(name):
    index = filled(name, [1.0, 2.0, 3.0])
    before = everything(index)
    index.write(*tensors([3, -1, 2**62, -(2**63), 4], [9.0, 9.0, math.nan, 9.0, 9.0]))
    assert everything(index) == before
    assert index.dropped.item() == 5 and index.clamped.item() == 0
    index.write(*tensors([3, 0, 3], [9.0, 5.0, 9.0]))
    assert index.save().tolist() == [5.0, 2.0, 3.0] and index.dropped.item() == 7
    index.check()


@both
def test_of_duplicates_the_last_row_wins(name):
    rng = np.random.default_rng(2)
    slots, mass = rng.integers(0, 40, 5000), rng.random(5000)
    index, expected = make_index(name, 40), np.zeros(40)
    index.write(torch.from_numpy(slots), torch.from_numpy(mass))
    expected[slots] = mass
    assert index.save().tolist() == expected.tolist()


@both
def test_written_priorities_of_float32_are_taken_as_they_are(name):
    index = make_index(name, 3)
    index.write(*tensors([2, 0], [0.1, math.inf], torch.float32))
    assert index.save().tolist() == [index.largest, 0.0, float(np.float32(0.1))]


@both
@pytest.mark.parametrize("capacity", [1, 8, 129, 1000])
def test_no_sum_overflows_when_every_mass_was_clamped(name, capacity):
    index = make_index(name, capacity)
    index.write(torch.arange(capacity), torch.full((capacity,), torch.inf))
    assert index.clamped.item() == capacity
    assert 0.0 < index.total < math.inf
    slots, _, probability = index.draw_tensors(capacity, torch.full((capacity,), 0.5, dtype=torch.float64))
    assert ((probability > 0.0) & (probability <= 1.0)).all()
    assert name == "rank_torch" or slots.tolist() == list(range(capacity))


@both
def test_tensors_of_other_shapes_are_refused(name):
    index = make_index(name, 4)
    for slots, mass in [(torch.zeros(2), torch.zeros(3)), (torch.zeros(1, 1), torch.zeros(1, 1))]:
        with pytest.raises(ValueError, match="one length"):
            index.write(slots.long(), mass)
    with pytest.raises(ValueError, match="3 draws need as many uniforms"):
        index.draw_tensors(3, torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match="number of draws must be >= 0"):
        index.draw_tensors(-1)


def test_the_spare_slot_takes_every_row_but_the_last_of_a_slot():
    slots, mass = last_rows(*tensors([2, 9, 2, 0, 2, 9], [1.0, 5.0, 2.0, 3.0, -0.0, 6.0]), spare=9)
    assert slots.tolist() == [0, 9, 9, 2, 9, 9]
    assert mass.tolist() == [3.0, 0.0, 0.0, 0.0, 0.0, 0.0] and not mass.signbit().any()


def test_clamp_says_which_rows_it_changed():
    mass, bad = clamp(torch.tensor([math.nan, -1.0, 0.0, 0.5, 7.0, math.inf]), 0.1, 7.0)
    assert mass.tolist() == pytest.approx([0.1, 0.1, 0.0, 0.5, 7.0, 7.0])
    assert bad.tolist() == [True, True, False, False, False, True]


# --- draw_tensors ---------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("k", [0, 1, 7, 512])
def test_a_draw_of_tensors_equals_a_draw_of_the_same_uniforms(name, k):
    index = filled(name, np.random.default_rng(3).random(300))
    slots, mass, probability = index.draw_tensors(k, torch.from_numpy(Strata(4).uniforms(k)))
    expected = index.draw(Strata(4), k)
    assert (slots.dtype, mass.dtype, probability.dtype) == (torch.int64, torch.float64, torch.float64)
    for found, same in zip((slots, mass, probability), expected):
        assert found.tolist() == same.tolist()


@both
def test_a_generator_makes_the_draws_repeatable(name):
    index = filled(name, np.random.default_rng(5).random(300))
    first, same, other = (index.draw_tensors(64, generator=torch.Generator().manual_seed(seed))[0] for seed in (6, 6, 7))
    assert first.tolist() == same.tolist() != other.tolist()


@both
def test_an_empty_index_draws_rows_of_mass_and_probability_zero(name):
    slots, mass, probability = make_index(name, 5).draw_tensors(3)
    assert slots.tolist() == [0, 0, 0]
    assert mass.tolist() == probability.tolist() == [0.0, 0.0, 0.0]


@both
def test_draws_of_tensors_have_the_distribution_of_the_cpu_index(name):
    rng = np.random.default_rng(8)
    priority = np.where(rng.random(60) < 0.2, 0.0, rng.random(60) + 0.05)
    index = filled(name, priority)
    ranked = np.argsort(np.argsort(-priority)) + 1.0
    cpu = filled("numpy", priority if name == "torch" else np.where(priority > 0.0, ranked**-0.6, 0.0))
    generator, strata, counts = torch.Generator().manual_seed(9), Strata(9), np.zeros((2, 60))
    for _ in range(2000):
        counts[0] += np.bincount(index.draw_tensors(10, generator=generator)[0].numpy(), minlength=60)
        counts[1] += np.bincount(cpu.draw(strata, 10)[0], minlength=60)
    assert counts.sum() == 40_000 and not counts[:, priority == 0.0].any()
    assert stats.chi2_contingency(counts[:, priority > 0.0]).pvalue > 1e-3


# --- no call of tensors waits for the device ----------------------------------------------------------


@contextlib.contextmanager
def without_data(monkeypatch, kind):
    """Make tensors that have shapes and no data, so that whatever would read a value on the host raises."""
    if kind == "meta":
        monkeypatch.setattr(tensor_index, "find_device", torch.device)
        yield "meta"
    else:
        with FakeTensorMode():
            yield kind


@both
@pytest.mark.parametrize("kind", ["meta", "cpu"])
def test_writing_and_drawing_tensors_reads_nothing_on_the_host(name, kind, monkeypatch):
    with without_data(monkeypatch, kind) as device:
        index = make_index(name, 40_000, device=device)
        for k in (0, 1, 512, 50_000):
            slots = torch.zeros(k, dtype=torch.int64, device=device)
            index.write(slots, torch.zeros(k, dtype=torch.float32, device=device))
            drawn = index.draw_tensors(k)
            drawn += index.draw_tensors(k, torch.zeros(k, dtype=torch.float64, device=device))
            assert all(t.shape == (k,) and t.device.type == device for t in drawn)
        assert index.clamped.shape == index.dropped.shape == ()


@both
@pytest.mark.parametrize("kind", ["meta", "cpu"])
def test_a_call_that_reads_on_the_host_is_caught_by_that_test(name, kind, monkeypatch):
    with without_data(monkeypatch, kind) as device:
        index = make_index(name, 100, device=device)
        readers = [
            lambda: index.total,
            lambda: index.clamped.item(),
            lambda: index._leaves().nonzero(),
            lambda: index._leaves()[index._leaves() > 0.0],
            lambda: torch.unique(index._leaves()),
            lambda: bool(index.clamped > 0),
        ]
        for read in readers:
            with pytest.raises((RuntimeError, NotImplementedError)):
                read()


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
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda rows, dim: torch.nn.functional.pad(uneven, (0, 124), value=3.0))
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


def test_a_priority_written_after_a_draw_has_its_new_rank():
    index = filled("rank_torch", [1.0, 2.0, 3.0])
    first = torch.zeros(1, dtype=torch.float64)
    for slot, priority in [(0, 9.0), (1, 10.0), (0, 11.0)]:
        index.write(*tensors([slot], [priority]))
        assert index.draw_tensors(1, first)[0].tolist() == [slot]


@pytest.mark.parametrize("fan_out", [0, 1, 3, 100, -2])
def test_a_fan_out_that_is_no_power_of_two_is_refused(fan_out):
    with pytest.raises(ValueError, match=f"power of two >= 2, got {fan_out}"):
        make_index("torch", 5, fan_out=fan_out)


@both
@pytest.mark.parametrize("floor", [0.0, -1.0, math.nan, math.inf])
def test_a_floor_that_is_no_mass_is_refused(name, floor):
    with pytest.raises(ValueError, match="floor must be finite and > 0"):
        make_index(name, 5, floor=floor)


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
