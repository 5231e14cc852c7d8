"""Centred RMSProp against the paper's formula, written out in NumPy."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from apex import checkpoint
from apex.config import from_tables, load
from apex.schema import EnvSpec
from learner.rmsprop import CentredRMSprop
from learner.train_step import TrainStep

PAPER = load("paper").learner
LR, DECAY, EPS = PAPER.learning_rate, PAPER.rmsprop_decay, PAPER.optimizer_eps
ROWS = 64


def formula(gradients, lr=LR, decay=DECAY, eps=EPS):
    """Return the steps that the formula of the paper makes for float gradients [n, ...], in float64."""
    g = v = np.zeros_like(gradients[0], dtype=np.float64)
    steps = []
    for x in gradients.astype(np.float64):
        g, v = decay * g + (1 - decay) * x, decay * v + (1 - decay) * x**2
        steps.append(lr * x / np.sqrt(np.maximum(v - g**2, 0) + eps))
    return np.array(steps)


def same_order(gradients, lr=LR, decay=DECAY, eps=EPS):
    """Return the parameters after each step, in float32 and in the order of operations that the class
    documents.
    """
    f = np.float32
    mean, variance, parameter = (np.zeros_like(gradients[0]) for _ in range(3))
    kept = []
    for x in gradients:
        apart = x - mean
        mean = mean + f(1 - decay) * apart
        variance = (variance + f(1 - decay) * (apart * apart)) * f(decay)
        parameter = parameter + f(-lr) * (x / np.sqrt(variance + f(eps)))
        kept.append(parameter)
    return np.array(kept)


def ours(gradients, start=0.0, dtype=torch.float32, **options):
    """Return the parameters before the first and after every step of the class."""
    parameter = torch.full(gradients[0].shape, start, dtype=dtype, requires_grad=True)
    optimizer = CentredRMSprop([parameter], **{"lr": LR, "decay": DECAY, "eps": EPS} | options)
    kept = [parameter.detach().numpy().copy()]
    for x in gradients:
        parameter.grad = torch.from_numpy(np.asarray(x)).to(dtype)
        optimizer.step()
        kept.append(parameter.detach().numpy().copy())
    return np.array(kept), optimizer


def normal(scale, steps=300):
    return (scale * np.random.default_rng(0).normal(size=(steps, ROWS))).astype(np.float32)


GRADIENTS = {
    "random": normal(1.0),
    "of the size seen in training": normal(1e-4),
    "tiny": normal(1e-20),
    "huge": normal(1e12),
    "with a mean": normal(1e-3) + np.float32(0.5),
    "zeros": np.zeros((50, ROWS), np.float32),
    "constant": np.ones((2_000, 4), np.float32),
    "constant and small": np.full((2_000, 4), 1e-3, np.float32),
    "seldom": normal(1.0) * (np.random.default_rng(1).random((300, ROWS)) < 0.02),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_every_step_is_that_of_the_papers_formula(kind):
    gradients = GRADIENTS[kind]
    kept, _ = ours(gradients, dtype=torch.float64)
    expected = np.concatenate([[np.zeros_like(kept[0])], -np.cumsum(formula(gradients), axis=0)])
    # What differs is the oracle, whose v - g^2 cancels for constant gradients.
    assert kept == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("kind", GRADIENTS)
def test_in_float32_a_step_is_within_millionths_of_the_formula(kind):
    gradients = GRADIENTS[kind]
    parameter = torch.zeros(gradients[0].shape, requires_grad=True)
    optimizer = CentredRMSprop([parameter], lr=LR, decay=DECAY, eps=EPS)
    steps = []
    for x in gradients:
        with torch.no_grad():
            parameter.zero_()  # shows its step without rounding
        parameter.grad = torch.from_numpy(x)
        optimizer.step()
        steps.append(-parameter.detach().numpy())
    assert np.array(steps) == pytest.approx(formula(gradients), rel=2e-5, abs=1e-30)


@pytest.mark.parametrize("kind", ["random", "zeros", "constant", "huge"])
def test_in_float32_the_order_of_operations_is_fixed_to_a_few_last_bits(kind):
    gradients = GRADIENTS[kind][:100]
    kept, _ = ours(gradients)
    assert kept[1:] == pytest.approx(same_order(gradients), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("value", [1.0, -1e-3, 3e5, 0.0])
def test_a_constant_gradient_never_gives_nan_and_its_variance_never_falls_below_zero(value):
    kept, optimizer = ours(np.full((3_000, 2), value, np.float32))
    assert np.isfinite(kept).all()
    (state,) = optimizer.state.values()
    assert (state["variance"] >= 0).all()


def test_with_the_papers_epsilon_this_is_not_torchs_optimiser():
    """Live gradients are far below the root of epsilon: outside the root, epsilon does next to nothing."""
    gradients = normal(1e-6, 100)
    kept, _ = ours(gradients)
    parameter = torch.zeros(ROWS, requires_grad=True)
    torchs = torch.optim.RMSprop([parameter], lr=LR, alpha=DECAY, eps=EPS, centered=True)
    for x in gradients:
        before, parameter.grad = parameter.detach().clone(), torch.from_numpy(x)
        torchs.step()
    last = np.abs(parameter.detach().numpy() - before.numpy())
    step = np.abs(formula(gradients)[-1])
    assert np.median(last / step) > 100, "torch's form: epsilon outside the root"
    assert np.abs(kept[-1] - kept[-2]) == pytest.approx(step, rel=1e-2, abs=1e-12)


def test_several_parameters_are_each_updated_as_if_alone_and_one_without_gradient_is_left():
    shapes, rng = [(3, 2), (5,), (1,)], np.random.default_rng(2)
    together = [torch.ones(s, requires_grad=True) for s in shapes]
    idle = torch.ones(4, requires_grad=True)
    optimizer = CentredRMSprop([*together, idle], lr=LR, decay=DECAY, eps=EPS)
    gradients = [rng.normal(size=(10, *s)).astype(np.float32) for s in shapes]
    for i in range(10):
        for p, g in zip(together, gradients):
            p.grad = torch.from_numpy(g[i])
        optimizer.step()
    for p, g in zip(together, gradients):
        assert p.detach().numpy().tolist() == ours(g, start=1.0)[0][-1].tolist()
    assert idle.tolist() == [1.0] * 4


# --- checkpoints ----------------------------------------------------------------------------------

SPEC = EnvSpec((3,), "float32", 1, 2)


def train(optimizer="rmsprop", **learner):
    tables = {"learner": {"optimizer": optimizer, "batch_size": 4, **learner}, "algorithm": {"hidden": 4}}
    return TrainStep(from_tables([("test", tables)]), SPEC)


def give_gradients(step, seed):
    rng = np.random.default_rng(seed)
    for parameter in step.online.parameters():
        parameter.grad = torch.from_numpy(rng.normal(size=tuple(parameter.shape)).astype(np.float32))


def loaded(state, folder, **options):
    path = folder / "learner.pt"
    checkpoint.save(path, state)
    step = train(**options)
    step.load_state_dict(checkpoint.load(path))
    return step


def parameters(step):
    return [p.detach().clone() for p in step.online.parameters()]


def test_a_checkpoint_goes_on_to_the_last_bit_with_the_step_size_of_now(tmp_path):
    one = train()
    for seed in range(5):
        give_gradients(one, seed)
        one.optimizer.step()
    other = loaded(one.state_dict(), tmp_path, learning_rate=0.5, rmsprop_decay=0.5)
    assert [(g["lr"], g["decay"]) for g in other.optimizer.param_groups] == [(0.5, 0.5)]
    same = loaded(one.state_dict(), tmp_path)
    for step in (one, same):
        give_gradients(step, 9)
        step.optimizer.step()
    assert all(map(torch.equal, parameters(one), parameters(same)))


def with_torchs(step, **options):
    """Return the state that a run with torch's RMSprop has saved."""
    torchs = torch.optim.RMSprop(step.online.parameters(), lr=1e-4, alpha=0.95, eps=1e-7, **options)
    for seed in range(5):
        give_gradients(step, seed)
        torchs.step()
    return copy.deepcopy(step.state_dict() | {"optimizer": torchs.state_dict()}), torchs


def test_a_checkpoint_with_torchs_averages_is_converted_and_that_is_said(tmp_path, capsys):
    state, torchs = with_torchs(train(), centered=True)
    step = loaded(state, tmp_path)
    assert "epsilon" in capsys.readouterr().err
    for mine, its in zip(step.optimizer.state.values(), torchs.state.values(), strict=True):
        assert torch.equal(mine["mean"], its["grad_avg"])
        assert torch.allclose(mine["variance"] + mine["mean"] ** 2, its["square_avg"], rtol=1e-5)
    give_gradients(step, 6)
    step.optimizer.step()
    assert all(torch.isfinite(p).all() for p in step.online.parameters())


@pytest.mark.parametrize("saved, now", [("adam", "rmsprop"), ("rmsprop", "adam"), ("not centred", "rmsprop")])
def test_a_checkpoint_of_another_optimiser_is_refused_in_one_line(saved, now, tmp_path):
    step = SimpleNamespace(state=None)
    if saved == "not centred":
        state, _ = with_torchs(train())
    else:
        step = train(saved)
        give_gradients(step, 0)
        step.optimizer.step()
        state = step.state_dict()
    with pytest.raises(ValueError, match="optimiser") as refusal:
        loaded(state, tmp_path, optimizer=now)
    assert "\n" not in str(refusal.value)
