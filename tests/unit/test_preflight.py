"""Everything that cannot run is refused before it starts, in one line that names what would."""

import re

import numpy as np
import pytest
import torch

from actors.intake import Intake
from apex.algorithms.double_dqn import initial_priority
from apex.config import ConfigError, load
from apex.envs import env_spec
from apex.schema import EnvSpec, sample_layout
from apex.topology import make
from launch import memory as memory_module
from launch import preflight
from replay_rank.replay import Replay
from replay_rank.service import memory_bytes


def refusal(call, *args):
    """Return the one line with which ``call`` refuses."""
    with pytest.raises(ConfigError) as error:
        call(*args)
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


def check(*overrides):
    return preflight.check(load("cartpole", overrides))


def test_what_can_run_gives_its_spec():
    assert check() == EnvSpec((4,), "float32", 1, 2)
    assert check("env.family=atari", "env.id=pong", "env.frame_size=42", "algorithm.network=small_cnn").frame_shape == (42, 42)


@pytest.mark.parametrize(
    "override, expected",
    [
        ("env.family=atary", "env.family = 'atary' is unknown; did you mean 'atari'?"),
        ("env.id=CartPol-v1", "env.id = 'CartPol-v1' is not a registered Gymnasium id; did you mean 'CartPole-v1'?"),
        ("algorithm.name=double_dqm", "algorithm.name = 'double_dqm' is not a module of apex/algorithms; did you mean 'double_dqn'?"),
        ("algorithm.name=networks", "algorithm.name = 'networks' is not a module of apex/algorithms"),
        ("replay.index=binry", "replay.index: no priority index is called 'binry'; did you mean 'binary'?"),
        ("learner.device=gpu", "learner.device = 'gpu' is not a device that can be used; use cpu or cuda"),
        ("learner.device=", "learner.device = '' is not a device that can be used"),
        ("learner.device=mps", "learner.device = 'mps' is not a device that can be used; use cpu or cuda"),
        ("learner.device=meta", "learner.device = 'meta' is not a device that can be used; use cpu or cuda"),
        ("learner.device=cuda:99", "learner.device = 'cuda:99', but torch sees"),
        ("replay.error_band=0.0", "replay.error_band = 0.0 is too narrow"),
        ("algorithm.network=nature_cnn", "algorithm.network = 'nature_cnn' needs image frames [height, width], got [4]; use 'mlp'"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(override, expected):
    assert expected in refusal(check, override)


def test_a_network_too_deep_for_the_frames_is_refused():
    pong = ["env.family=atari", "env.id=pong", "env.frame_size=16", "algorithm.network=nature_cnn"]
    assert "too deep for [16, 16] frames; raise env.frame_size" in refusal(check, *pong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_is_refused_where_there_is_none():
    assert "torch sees no CUDA devices here; use cpu" in refusal(check, "learner.device=cuda")


def test_a_device_for_the_index_is_refused_where_there_is_none_or_the_index_takes_none():
    assert refusal(check, "replay.index_device=cuda").startswith("replay.index: the priority index 'wide' lives on the cpu")
    told = refusal(lambda: preflight.check(load("cartpole", ["replay.index=torch", "replay.index_device=cuda:3"])))
    assert told == "replay.index_device = 'cuda:3', but torch sees no CUDA devices here; use cpu"


def test_an_index_whose_library_is_not_built_is_refused_in_one_line(monkeypatch):
    def missing(name, capacity, **options):
        raise ImportError("the C part is missing or out of date; run: make native")

    monkeypatch.setattr(preflight, "make_index", missing)
    assert "run: make native" in refusal(check)


# --- memory -----------------------------------------------------------------------------------------

PONG = ["env.family=atari", "env.id=pong", "algorithm.network=nature_cnn"]
SETTINGS = {
    "cartpole": [],
    "pong": [*PONG, "replay.capacity=500_000"],
    "two replay ranks": [*PONG, "replay.ranks=2", "replay.capacity=400_000", "learner.batch_size=512", "learner.prefetch=8"],
    "large batches": [*PONG, "actor.intake_batch=500", "replay.capacity=300_000", "learner.batch_size=2048"],
    "numpy index": ["replay.index=numpy", "replay.capacity=3_000_000"],
}


def rest_bytes(config, spec):
    """What all ranks need beside the replay ranks' rings."""
    topology = make(config)
    return sum(memory_module._rest_bytes(config, spec, topology.role(rank)[0]) for rank in range(topology.size))


def memory(overrides, available, monkeypatch):
    """Check against a machine with ``available`` bytes free."""
    config = load("cartpole", overrides)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: int(available))
    memory_module.check(config, env_spec(config.env), make(config))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_capacity_too_large_is_refused_with_the_largest_that_then_fits(name, share, monkeypatch):
    overrides = SETTINGS[name]
    config = load("cartpole", overrides)
    spec, unit = env_spec(config.env), config.actor.intake_batch * config.replay.ranks
    rings = memory_bytes(config, spec) * config.replay.ranks
    available = rest_bytes(config, spec) + share * rings
    message = refusal(memory, overrides, available, monkeypatch)
    assert message.startswith(f"replay.capacity = {config.replay.capacity} is too large")
    fits = int(re.search(r"the largest that fits is (\d+)", message)[1])
    memory([*overrides, f"replay.capacity={fits}"], available, monkeypatch)
    refusal(memory, [*overrides, f"replay.capacity={fits + unit}"], available, monkeypatch)


def test_what_needs_exactly_the_free_memory_fits_and_one_byte_less_does_not(monkeypatch):
    config = load("cartpole")
    spec = env_spec(config.env)
    needed = rest_bytes(config, spec) + memory_bytes(config, spec)
    memory([], needed, monkeypatch)
    refusal(memory, [], needed - 1, monkeypatch)


def test_where_the_minimum_size_does_not_fit_either_the_refusal_says_to_lower_it(monkeypatch):
    overrides = [*SETTINGS["pong"], "replay.min_size=400_000"]
    config = load("cartpole", overrides)
    spec = env_spec(config.env)
    available = rest_bytes(config, spec) + memory_bytes(config, spec) / 2
    message = refusal(memory, overrides, available, monkeypatch)
    fits, min_size = re.search(r"fits is (\d+), with --set replay.min_size=(\d+) or less", message).groups()
    memory([*overrides, f"replay.capacity={fits}", f"replay.min_size={min_size}"], available, monkeypatch)


def test_where_nothing_fits_the_refusal_says_what_else_to_lower(monkeypatch):
    assert "4 ranks are too many for this machine" in refusal(memory, [], 2**20, monkeypatch)
    config = load("cartpole")
    room = rest_bytes(config, env_spec(config.env)) + 2**10
    assert "lower actor.count, actor.envs or learner.batch_size" in refusal(memory, [], room, monkeypatch)


def test_only_the_ranks_of_this_machine_are_counted(monkeypatch):
    config = load("cartpole", [*SETTINGS["pong"], "actor.count=4"])
    spec, topology = env_spec(config.env), make(config)
    one_actor = memory_module._rest_bytes(config, spec, "actor")
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 2 * one_actor)
    memory_module.check(config, spec, topology, [3, 4])
    with pytest.raises(ConfigError, match="3 ranks are too many"):
        memory_module.check(config, spec, topology, [3, 4, 5])
    with pytest.raises(ConfigError, match=r"replay\.capacity"):
        memory_module.check(config, spec, topology, [1, 3])


@pytest.mark.parametrize("index", ["wide", "wide32", "binary", "numpy", "torch", "rank", "rank_torch"])
@pytest.mark.parametrize("capacity, batch", [(65_500, 50), (64_000, 50), (70, 7)])
def test_a_replay_rank_takes_no_more_memory_than_it_was_said_to(capacity, batch, index):
    sizes = [f"replay.capacity={capacity}", f"actor.intake_batch={batch}", "replay.min_size=1"]
    config = load("cartpole", [*sizes, f"replay.index={index}", "replay.error_band=99"])
    spec = env_spec(config.env)
    replay = Replay(config, spec, np.random.default_rng(0))
    replay.index.load(np.random.default_rng(1).random(replay.slots))
    buffers = (config.learner.prefetch + 1) * sample_layout(spec, config.learner.batch_size).nbytes
    told = memory_bytes(config, spec) - replay.store.buffer.nbytes - buffers
    assert 0.3 * told - 2**14 <= replay.index.nbytes <= told + 2**14


@pytest.mark.parametrize("batch, n_step", [(50, 3), (1, 64), (7, 7)])
def test_an_actors_pool_takes_no_more_memory_than_it_was_said_to(batch, n_step):
    overrides = [f"actor.intake_batch={batch}", f"algorithm.n_step={n_step}", f"replay.capacity={1000 * batch}"]
    counts = [1, 2]
    configs = [load("cartpole", [*overrides, f"actor.count={count}"]) for count in counts]
    spec = env_spec(configs[0].env)
    one, two = (rest_bytes(config, spec) for config in configs)
    pool = Intake(configs[0], spec, 0, initial_priority)._pool.nbytes
    assert pool <= two - one - memory_module._PROCESS_BYTES <= 1.2 * pool


def test_the_memory_free_here_is_a_sensible_number():
    assert 2**26 < memory_module.available_bytes() < 2**50
