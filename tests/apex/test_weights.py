"""Weights as one flat vector: to the last bit, and only into the network they came from."""

import dataclasses

import numpy as np
import pytest
import torch

from apex import weights
from apex.algorithms.double_dqn import make_network
from apex.config import AlgorithmConfig, Config
from apex.schema import EnvSpec

VECTOR = EnvSpec((4,), "float32", 1, 3)
PIXELS = EnvSpec((36, 36), "uint8", 4, 5)


def network(seed=0, spec=VECTOR, **options):
    torch.manual_seed(seed)
    return make_network(Config(algorithm=AlgorithmConfig(**{"hidden": 8, **options})), spec)


NETWORKS = {
    "plain": lambda seed: network(seed, dueling=False),
    "dueling": lambda seed: network(seed),
    "small_cnn": lambda seed: network(seed, PIXELS, network="small_cnn"),
    "nature_cnn": lambda seed: network(seed, PIXELS, network="nature_cnn"),
    # Running statistics are state but no parameters; one of them is an integer.
    "with_buffers": lambda seed: torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)),
}


def flat(module):
    vector = np.full(weights.size(module), np.nan, np.float32)
    weights.flatten(module, vector)
    return vector


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_that_went_through_a_vector_are_the_same_to_the_last_bit(name):
    sender, receiver = NETWORKS[name](0), NETWORKS[name](1)
    weights.unflatten(receiver, flat(sender))
    for (key, sent), received in zip(sender.state_dict().items(), receiver.state_dict().values()):
        assert torch.equal(sent, received), key
    assert flat(receiver).tobytes() == flat(sender).tobytes()


def test_any_vector_comes_back_to_the_last_bit():
    net = network()
    vector = np.random.default_rng(0).integers(0, 2**32, weights.size(net), np.uint32).view(np.float32)
    vector[:4] = -0.0, 1e-45, np.inf, np.nan
    weights.unflatten(net, vector)
    assert flat(net).tobytes() == vector.tobytes()


def test_the_vector_is_every_tensor_of_the_state_in_order():
    net = network()
    assert np.array_equal(flat(net), np.concatenate([t.numpy().ravel() for t in net.state_dict().values()]))
    assert weights.table(net) == tuple((name, tuple(t.shape)) for name, t in net.state_dict().items())


def test_the_network_does_not_share_memory_with_the_vector():
    net, other = network(), network(1)
    vector = flat(net)
    weights.unflatten(other, vector)
    vector[:] = 0
    assert torch.equal(next(other.parameters()), next(net.parameters())) and next(net.parameters()).any()


def test_gradients_still_reach_a_network_that_was_loaded():
    net = network()
    weights.unflatten(net, flat(network(1)))
    net(torch.ones(2, 1, 4)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("call", [weights.flatten, weights.unflatten])
@pytest.mark.parametrize(
    "wrong",
    [lambda v: v[:-1], lambda v: np.append(v, v[:1]), lambda v: v.astype(np.float64), lambda v: v[None]],
)
def test_a_vector_of_another_length_dtype_or_shape_is_refused_and_nothing_changes(call, wrong):
    net = network()
    before, vector = flat(net), wrong(np.zeros(weights.size(net), np.float32))
    with pytest.raises(ValueError, match=rf"weight vector must be float32\[{weights.size(net)}\]"):
        call(net, vector)
    assert flat(net).tobytes() == before.tobytes() and not vector.any()


def test_load_state_takes_the_state_of_an_equal_network():
    net, other = network(), network(1)
    weights.load_state(net, other.state_dict())
    assert flat(net).tobytes() == flat(other).tobytes()


@pytest.mark.parametrize(
    "other, tensor",
    [
        (lambda: network(hidden=9), "torso.1.weight"),
        (lambda: network(spec=dataclasses.replace(VECTOR, num_actions=4)), "advantage.2.weight"),
        (lambda: network(dueling=False), "value.0.weight"),
        (lambda: network(spec=dataclasses.replace(VECTOR, frame_shape=(5,))), "torso.1.weight"),
    ],
    ids=["width", "actions", "missing", "observations"],
)
def test_the_state_of_another_network_is_refused_by_its_first_tensor_that_does_not_fit(other, tensor):
    net = network()
    before = flat(net)
    with pytest.raises(ValueError, match=f"'{tensor}'") as error:
        weights.load_state(net, other().state_dict())
    assert "\n" not in str(error.value) and flat(net).tobytes() == before.tobytes()


def test_a_state_with_a_tensor_too_many_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"no tensor 'value\.0\.weight'") as error:
        weights.load_state(network(dueling=False), network().state_dict())
    assert "\n" not in str(error.value)
