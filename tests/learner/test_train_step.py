"""One optimiser update against formulas written out by hand in float64."""

import itertools

import numpy as np
import pytest
import torch

from apex.algorithms.networks import make
from apex.config import AlgorithmConfig, from_tables, load
from apex.schema import EnvSpec, aligned_bytes, sample_layout
from learner.train_step import NotFinite, TrainStep

SPEC = EnvSpec((3,), "float32", 2, 4)
PIXELS = EnvSpec((36, 36), "uint8", 2, 4)
BATCH = 6


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost more than they save on matrices this small, most of all on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_config(learner=None, algorithm=None, seed=0):
    learner = {"batch_size": BATCH, "learning_rate": 0.01, "max_grad_norm": 1e6, "target_period": 1000} | (
        learner or {}
    )
    algorithm = {"hidden": 5} | (algorithm or {})
    return from_tables([("test", {"learner": learner, "algorithm": algorithm, "run": {"seed": seed}})])


def make_step(spec=SPEC, seed=0, *, learner=None, algorithm=None):
    """Return an update whose target network differs from the online one."""
    step = TrainStep(make_config(learner, algorithm, seed), spec)
    other = TrainStep(make_config(learner, algorithm, seed + 1), spec)
    step.target.load_state_dict(other.online.state_dict())
    return step


def sample(spec=SPEC, seed=0, scale=2.0):
    """Return the views of a sample message with TD errors on both sides of Huber's bend, and weights."""
    rng, layout = np.random.default_rng(seed), sample_layout(spec, BATCH)
    views = layout.views(aligned_bytes(layout.nbytes))
    for name in ("obs", "next_obs"):
        views[name][:] = (
            rng.integers(0, 256, views[name].shape)
            if spec.frame_dtype == "uint8"
            else rng.normal(size=views[name].shape)
        )
    views["action"][:] = rng.integers(spec.num_actions, size=BATCH)
    views["reward"][:] = scale * rng.normal(size=BATCH)
    views["discount"][:] = [0.99**3, 0.0, 0.99, 0.99**3, 0.99**2, 0.0]
    return views, rng.uniform(0.1, 1.0, BATCH).astype(np.float32)


# --- by hand --------------------------------------------------------------------------------------


def state_of(network):
    return {name: tensor.numpy().astype(np.float64) for name, tensor in network.state_dict().items()}


def q_by_hand(state, obs):
    """Q-values [B, A]: one hidden layer, then the head, or V + A - mean(A)."""

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def head(name):
        return linear(f"{name}.2", np.maximum(linear(f"{name}.0", hidden), 0))

    hidden = np.maximum(linear("torso.1", obs.reshape(len(obs), -1).astype(np.float64)), 0)
    advantage = head("advantage")
    if "value.0.weight" not in state:
        return advantage
    return head("value") + advantage - advantage.mean(axis=1, keepdims=True)


def goal_by_hand(online, target, views, double):
    goals = []
    for i in range(BATCH):
        q_target = q_by_hand(target, views["next_obs"][i : i + 1])[0]
        q_choice = q_by_hand(online, views["next_obs"][i : i + 1])[0] if double else q_target
        goals.append(float(views["reward"][i]) + float(views["discount"][i]) * q_target[q_choice.argmax()])
    return np.array(goals)


def loss_by_hand(online, goal, views, weight):
    """Return (mean of weight * Huber(TD error), TD errors)."""
    error = goal - q_by_hand(online, views["obs"])[np.arange(BATCH), views["action"]]
    huber = [0.5 * e * e if abs(e) <= 1 else abs(e) - 0.5 for e in error]
    return sum(w * h for w, h in zip(weight.astype(np.float64), huber)) / BATCH, error


def gradient_by_hand(online, goal, views, weight, h=1e-6):
    """Return the gradient of the loss by central differences; the goal is held fixed."""
    gradient = {name: np.zeros_like(value) for name, value in online.items()}
    for name, value in online.items():
        for at in np.ndindex(value.shape):
            old = value[at]
            sides = []
            for moved in (old + h, old - h):
                value[at] = moved
                sides.append(loss_by_hand(online, goal, views, weight)[0])
            value[at] = old
            gradient[name][at] = (sides[0] - sides[1]) / (2 * h)
    return gradient


def norm(gradient):
    return np.sqrt(sum((g**2).sum() for g in gradient.values()))


SETTINGS = list(itertools.product([True, False], [True, False]))


@pytest.mark.parametrize("double, dueling", SETTINGS)
def test_loss_priorities_and_gradient_are_those_of_the_formulas(double, dueling):
    step = make_step(algorithm={"double": double, "dueling": dueling})
    views, weight = sample()
    online, target = state_of(step.online), state_of(step.target)
    goal = goal_by_hand(online, target, views, double)
    loss, error = loss_by_hand(online, goal, views, weight)
    gradient = gradient_by_hand(online, goal, views, weight)
    assert (np.abs(error) < 1).any() and (np.abs(error) > 1).any()

    result = step(views, weight)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert (
        result.priority == pytest.approx(np.abs(error), rel=1e-4, abs=1e-5)
        and result.priority.dtype == np.float32
    )
    assert result.td_error == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert result.q_value == pytest.approx((goal - error).mean(), rel=1e-4, abs=1e-5)
    assert result.grad_norm == pytest.approx(norm(gradient), rel=1e-4)
    for name, parameter in step.online.named_parameters():
        assert parameter.grad.numpy() == pytest.approx(gradient[name], abs=1e-5), name


def test_double_learning_makes_a_difference_in_these_tests():
    step = make_step()
    views, _ = sample()
    online, target = state_of(step.online), state_of(step.target)
    assert not np.allclose(
        goal_by_hand(online, target, views, True), goal_by_hand(online, target, views, False)
    )


def test_the_priority_is_the_td_error_before_weighting():
    views, weight = sample()
    weighted, plain = make_step()(views, weight), make_step()(views, np.ones(BATCH, np.float32))
    assert weighted.priority.tolist() == plain.priority.tolist()
    assert weighted.loss != plain.loss


def test_a_row_of_zero_weight_moves_nothing():
    views, _ = sample()
    weight = np.zeros(BATCH, np.float32)
    step = make_step()
    result = step(views, weight)
    assert result.loss == 0.0 and result.grad_norm == 0.0 and (result.priority > 0).all()


def test_the_message_is_only_read():
    views, weight = sample()
    before = {name: view.tobytes() for name, view in views.items()}
    make_step()(views, weight)
    assert {name: view.tobytes() for name, view in views.items()} == before


# --- the optimiser --------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.25, 4.0])
def test_a_gradient_is_clipped_to_the_global_norm_and_a_smaller_one_is_left_alone(share):
    views, weight = sample()
    free = make_step()
    full = free(views, weight).grad_norm
    step = make_step(learner={"max_grad_norm": share * full})
    assert step(views, weight).grad_norm == pytest.approx(full, rel=1e-6), (
        "the norm told is that before clipping"
    )
    for clipped, whole in zip(step.online.parameters(), free.online.parameters()):
        assert torch.allclose(clipped.grad, min(1.0, share) * whole.grad, rtol=1e-4, atol=1e-8)


FIRST_STEP = {
    # With one gradient both averages are corrected back to it.
    "adam": lambda g, lr, eps: lr * g / (np.abs(g) + eps),
    # decay 0.9: averages are 0.1 g and 0.1 g^2, so the variance is 0.1 g^2 - 0.01 g^2; epsilon is inside the
    # root.
    "rmsprop": lambda g, lr, eps: lr * g / np.sqrt(0.09 * g**2 + eps),
}


@pytest.mark.parametrize("optimizer", FIRST_STEP)
def test_the_first_update_is_that_of_the_optimisers_formula(optimizer):
    learner = {"optimizer": optimizer, "optimizer_eps": 1e-3, "rmsprop_decay": 0.9}
    step = make_step(learner=learner)
    before = state_of(step.online)
    step(*sample())
    for name, parameter in step.online.named_parameters():
        moved = FIRST_STEP[optimizer](parameter.grad.numpy().astype(np.float64), 0.01, 1e-3)
        assert parameter.detach().numpy() == pytest.approx(before[name] - moved, abs=2e-6), name


def test_training_on_one_batch_brings_its_td_errors_down():
    step = make_step(learner={"learning_rate": 0.03})
    views, weight = sample()
    losses = [step(views, weight).loss for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0] and step.learner_steps == 60


# --- the target network -----------------------------------------------------------------------------


def bits(network):
    return b"".join(tensor.numpy().tobytes() for tensor in network.state_dict().values())


def test_the_target_is_copied_exactly_at_every_period_and_at_no_other_step():
    step = make_step(learner={"target_period": 3})
    expected = bits(step.target)
    for learner_step in range(1, 10):
        step(*sample(seed=learner_step))
        if learner_step % 3 == 0:
            expected = bits(step.online)
        assert bits(step.target) == expected, learner_step
        assert learner_step % 3 == 0 or bits(step.online) != expected


def test_the_target_starts_as_a_copy_that_does_not_learn():
    step = TrainStep(make_config(), SPEC)
    assert bits(step.target) == bits(step.online)
    step(*sample())
    assert bits(step.target) != bits(step.online)
    assert not any(p.requires_grad or p.grad is not None for p in step.target.parameters())


# --- what is not finite -----------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["reward", "obs", "next_obs"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_raises_and_changes_nothing(field, value):
    step = make_step()
    step(*sample())
    views, weight = sample(seed=1)
    views[field][2] = value
    before = bits(step.online)
    with pytest.raises(NotFinite, match="the loss of learner step 2 is"):
        step(views, weight)
    assert bits(step.online) == before and step.learner_steps == 1


def test_a_gradient_that_is_not_finite_raises_and_changes_nothing_not_even_the_optimiser():
    step, undisturbed = make_step(), make_step()
    step(*sample()), undisturbed(*sample())
    before = bits(step.online)
    hook = next(step.online.parameters()).register_hook(lambda gradient: gradient * np.inf)
    with pytest.raises(NotFinite, match="the gradient of learner step 2 has norm"):
        step(*sample(seed=1))
    assert bits(step.online) == before and step.learner_steps == 1
    hook.remove()
    step(*sample(seed=2)), undisturbed(*sample(seed=2))
    assert bits(step.online) == bits(undisturbed.online)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_that_breaks_a_parameter_raises_and_changes_nothing_not_even_the_optimiser(
    optimizer, steps_before
):
    step, undisturbed = (make_step(learner={"optimizer": optimizer}) for _ in range(2))
    for i in range(steps_before):
        step(*sample(seed=i)), undisturbed(*sample(seed=i))
    before = bits(step.online)
    step.optimizer.param_groups[0]["lr"] = 1e38
    with pytest.raises(NotFinite, match=f"a parameter after learner step {steps_before + 1} is not finite"):
        for parameter in step.online.parameters():  # whose step is now beyond float32
            parameter.register_hook(lambda gradient: gradient + 1e5)
        step(*sample(seed=7))
    assert bits(step.online) == before and step.learner_steps == steps_before
    for parameter in step.online.parameters():
        parameter._backward_hooks.clear()
    step.optimizer.param_groups[0]["lr"] = 0.01
    step(*sample(seed=8)), undisturbed(*sample(seed=8))
    assert bits(step.online) == bits(undisturbed.online)


# --- networks ---------------------------------------------------------------------------------------


def network(spec=SPEC, **options):
    torch.manual_seed(0)
    return make(AlgorithmConfig(**{"hidden": 5, **options}), spec)


def test_dueling_values_average_to_the_state_value_and_ignore_a_shift_of_all_advantages():
    net, obs = network(dueling=True), torch.randn(7, *SPEC.observation_shape)
    q = net(obs)
    assert torch.allclose(q.mean(dim=1, keepdim=True), net.value(net.torso(obs)), atol=1e-6)
    with torch.no_grad():
        net.advantage[2].bias += 3.0
    assert torch.allclose(net(obs), q, atol=1e-5)


@pytest.mark.parametrize("name", ["small_cnn", "nature_cnn", "mlp"])
@pytest.mark.parametrize("dueling", [True, False])
def test_uint8_pixels_are_scaled_to_one(name, dueling):
    pixels = network(PIXELS, network=name, dueling=dueling)
    floats = network(EnvSpec((36, 36), "float32", 2, 4), network=name, dueling=dueling)
    floats.load_state_dict(pixels.state_dict())
    obs = torch.randint(0, 256, (3, *PIXELS.observation_shape), dtype=torch.uint8)
    q = pixels(obs)
    assert q.shape == (3, 4) and q.dtype == torch.float32
    assert torch.allclose(q, floats(obs.float() / 255), atol=1e-6)
    assert not torch.allclose(q, floats(obs.float()), atol=1e-3)


def test_an_update_on_pixels_takes_uint8_as_it_came():
    step = make_step(PIXELS, algorithm={"network": "small_cnn"})
    result = step(*sample(PIXELS))
    assert np.isfinite(result.loss) and result.priority.shape == (BATCH,)


# --- seeds and checkpoints ------------------------------------------------------------------------


def test_one_seed_gives_the_same_training_to_the_last_bit_and_another_does_not():
    runs = []
    for seed in (0, 0, 1):
        step = make_step(seed=seed)
        losses = [step(*sample(seed=i)).loss for i in range(5)]
        runs.append((losses, bits(step.online)))
    assert runs[0] == runs[1] and runs[0] != runs[2]


def test_the_state_holds_both_networks_the_optimiser_and_the_step_count():
    step = make_step()
    step(*sample())
    state = step.state_dict()
    assert state["learner_steps"] == 1 and set(state) == {
        "online",
        "target",
        "optimizer",
        "learner_steps",
        "random",
    }
    assert torch.equal(state["target"]["torso.1.weight"], step.target.torso[1].weight)
    assert torch.equal(state["online"]["torso.1.weight"], step.online.torso[1].weight)
    assert len(state["optimizer"]["state"]) == len(list(step.online.parameters()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_neither_published_nor_kept(bad):
    step = TrainStep(load("cartpole"), EnvSpec((4,), "float32", 1, 2))
    step.check_finite()
    with torch.no_grad():
        next(step.online.parameters()).view(-1)[0] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        step.check_finite()
