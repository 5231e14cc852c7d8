"""Everything that cannot run is refused before it starts, in one line that names what would."""

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from actors.intake import Intake
from apex import checkpoint
from apex.algorithms.double_dqn import initial_priority
from apex.config import ConfigError, load
from apex.envs import env_spec
from apex.policy import Policy
from apex.schema import EnvSpec, aligned_bytes, sample_layout, weight_layout
from apex.topology import make
from launch.run import memory as memory_module
from launch.run import preflight
from learner.checkpointing import to_cpu
from learner.train_step import TrainStep
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
    assert check(
        "env.family=atari", "env.id=pong", "env.frame_size=42", "algorithm.network=small_cnn"
    ).frame_shape == (42, 42)


@pytest.mark.parametrize(
    "override, expected",
    [
        ("env.family=atary", "env.family = 'atary' is unknown; did you mean 'atari'?"),
        (
            "env.id=CartPol-v1",
            "env.id = 'CartPol-v1' is not a registered Gymnasium id; did you mean 'CartPole-v1'?",
        ),
        (
            "algorithm.name=double_dqm",
            "algorithm.name = 'double_dqm' is not a module of apex/algorithms; did you mean 'double_dqn'?",
        ),
        ("algorithm.name=networks", "algorithm.name = 'networks' is not a module of apex/algorithms"),
        ("replay.index=binry", "replay.index: no priority index is called 'binry'; did you mean 'binary'?"),
        ("learner.device=gpu", "learner.device = 'gpu' is not a usable device; use cpu or cuda"),
        ("learner.device=", "learner.device = '' is not a usable device"),
        ("learner.device=mps", "learner.device = 'mps' is not a usable device; use cpu or cuda"),
        ("learner.device=meta", "learner.device = 'meta' is not a usable device; use cpu or cuda"),
        ("learner.device=cuda:99", "learner.device = 'cuda:99', but torch sees"),
        ("replay.error_buffer=0.0", "replay.error_buffer = 0.0 is too narrow"),
        (
            "algorithm.network=nature_cnn",
            "algorithm.network = 'nature_cnn' needs image frames [height, width], got [4]; use 'mlp'",
        ),
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
    assert refusal(check, "replay.index_device=cuda").startswith(
        "replay.index: the priority index 'wide' lives on the cpu"
    )
    told = refusal(
        lambda: preflight.check(load("cartpole", ["replay.index=torch", "replay.index_device=cuda:3"]))
    )
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
    "two replay ranks": [
        *PONG,
        "replay.ranks=2",
        "replay.capacity=400_000",
        "learner.batch_size=512",
        "learner.prefetch=8",
    ],
    "large batches": [*PONG, "actor.intake_batch=500", "replay.capacity=300_000", "learner.batch_size=2048"],
    "numpy index": ["replay.index=numpy", "replay.capacity=3_000_000"],
}


def rest_bytes(config, spec):
    """What all ranks need beside the replay ranks' rings."""
    topology = make(config)
    ranks = (memory_module._rest_bytes(config, spec, topology.role(rank)[0]) for rank in range(topology.size))
    return memory_module._SHARED_BYTES + sum(ranks)


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
    monkeypatch.setattr(memory_module, "available_bytes", lambda: memory_module._SHARED_BYTES + 2 * one_actor)
    memory_module.check(config, spec, topology, [3, 4])
    with pytest.raises(ConfigError, match="3 ranks are too many"):
        memory_module.check(config, spec, topology, [3, 4, 5])
    with pytest.raises(ConfigError, match=r"replay\.capacity"):
        memory_module.check(config, spec, topology, [1, 3])


@pytest.mark.parametrize("index", ["wide", "wide32", "binary", "numpy", "torch", "rank", "rank_torch"])
@pytest.mark.parametrize("capacity, batch", [(65_500, 50), (64_000, 50), (70, 7)])
def test_a_replay_rank_takes_no_more_memory_than_it_was_said_to(capacity, batch, index):
    sizes = [f"replay.capacity={capacity}", f"actor.intake_batch={batch}", "replay.min_size=1"]
    config = load("cartpole", [*sizes, f"replay.index={index}", "replay.error_buffer=99"])
    spec = env_spec(config.env)
    replay = Replay(config, spec, np.random.default_rng(0))
    replay.index.load(np.random.default_rng(1).random(replay.slots))
    buffers = (config.learner.prefetch + 1) * sample_layout(spec, config.learner.batch_size).nbytes
    told = memory_bytes(config, spec) - replay.store.buffer.nbytes - buffers
    assert 0.3 * told - 2**14 <= replay.index.nbytes <= told + 2**14


@pytest.mark.parametrize("batch, n_step", [(50, 3), (1, 64), (7, 7)])
def test_an_actors_pool_takes_no_more_memory_than_it_was_said_to(batch, n_step):
    overrides = [
        f"actor.intake_batch={batch}",
        f"algorithm.n_step={n_step}",
        f"replay.capacity={1000 * batch}",
    ]
    config = load("cartpole", overrides)
    spec = env_spec(config.env)
    pool = Intake(config, spec, 0, initial_priority)._pool.nbytes
    assert pool <= memory_module._buffer_bytes(config, spec, "actor") <= 1.2 * pool


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_learners_networks_and_their_copies_take_no_more_memory_than_estimated(optimizer):
    config = load("cartpole", [f"learner.optimizer={optimizer}", "learner.batch_size=8"])
    spec = env_spec(config.env)
    train, message = (
        TrainStep(config, spec),
        aligned_bytes(weight_layout(memory_module._one_network_bytes(config, spec) // 4).nbytes),
    )
    layout = sample_layout(spec, 8)
    for _ in range(2):
        train(layout.views(np.zeros(layout.nbytes, np.uint8)), np.ones(8, np.float32))
    copy = to_cpu(train.state_dict())
    held = tensor_bytes(
        [
            train.online.state_dict(),
            [p.grad for p in train.online.parameters()],
            train.target.state_dict(),
            copy,
        ]
    )
    held += tensor_bytes([train.optimizer.state_dict(), train._before._copies]) + len(
        checkpoint.as_bytes(copy)
    )
    told = (
        memory_module._network_bytes(config, spec, "learner") - 2 * message.nbytes
    )  # of three messages one is being filled
    assert held + message.nbytes <= told + 2**15 and held + message.nbytes >= 0.9 * told
    on_gpu = dataclasses.replace(config, learner=dataclasses.replace(config.learner, device="cuda"))
    assert memory_module._network_bytes(on_gpu, spec, "learner") == 11 * memory_module._one_network_bytes(
        config, spec
    )


def tensor_bytes(value) -> int:
    """Return the bytes of the tensors in dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(tensor_bytes, items))


@pytest.mark.parametrize("role", ["actor", "evaluator"])
def test_the_network_that_acts_takes_no_more_memory_than_it_was_said_to(role):
    config = load("cartpole")
    spec = env_spec(config.env)
    policy = Policy(config, spec, port=None)
    network = tensor_bytes(dict(policy.network.state_dict()))
    held = (
        network + policy._message.nbytes + (network if role == "evaluator" else 0)
    )  # it makes best.pt in memory
    assert held - 128 <= memory_module._network_bytes(config, spec, role) <= held
    assert memory_module._network_bytes(config, spec, "replay") == 0


ENVIRONMENTS = """
import sys
from apex.config import load
from apex.envs import make_envs
def resident():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))
def play(count):
    envs = make_envs(load(sys.argv[1]).env, count, 0, evaluation=True)
    envs.reset()
    for step in range(30):
        envs.step([0] * count)
    return envs
one, before = play(1), resident()
many = play(int(sys.argv[2]))
print(resident() - before)
"""


@pytest.mark.parametrize("preset, count, least", [("pong", 30, 0.6), ("cartpole", 500, 0.0)])
def test_environments_take_no_more_memory_than_they_were_said_to(preset, count, least):
    done = subprocess.run(
        [sys.executable, "-c", ENVIRONMENTS, preset, str(count)], capture_output=True, text=True, check=True
    )
    for role, overrides in (
        ("actor", [f"actor.envs={count}"]),
        ("evaluator", [f"evaluator.episodes={count}"]),
    ):
        told = memory_module._env_bytes(load(preset, overrides), role)
        assert least * told <= int(done.stdout) <= told


def test_more_episodes_of_the_evaluator_than_there_is_memory_for_are_refused(monkeypatch):
    config = load("cartpole", SETTINGS["pong"])
    available = rest_bytes(config, env_spec(config.env)) + 2**30
    message = refusal(memory, [*SETTINGS["pong"], "evaluator.episodes=1_000"], available, monkeypatch)
    assert message.endswith("use fewer --ranks, or lower actor.envs or evaluator.episodes")


def test_the_memory_free_here_is_a_sensible_number():
    assert 2**26 < memory_module.available_bytes() < 2**50


def test_64_small_ranks_fit_into_19_gib(monkeypatch):
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 19 * 2**30)
    config = load("cartpole")
    memory_module.check(config, env_spec(config.env), make(config, 64))
