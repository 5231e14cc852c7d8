"""What an actor says of its transitions: the learner's |TD error|, and the weights it acted with."""

from collections import Counter

import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from actors.actor import Actor
from apex import weights
from apex.algorithms.double_dqn import initial_priority, make_network, td_error
from apex.config import load
from apex.envs import VectorEnv, env_spec
from apex.schema import aligned_bytes, limits, sample_layout, weight_layout
from apex.topology import make
from launch.run.local import make_ports
from replay_rank.replay import Replay

SMALL = [
    "actor.envs=4",
    "actor.intake_batch=10",
    "algorithm.hidden=32",
    "replay.capacity=5000",
    "actor.refresh_period=2",
    "run.seed=5",
]
GAMMA = 0.99


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost more than they save on matrices this small, most of all on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Played:
    """A real actor in a world of its own, with this test in the learner's and the replay rank's place."""

    def __init__(self, *overrides):
        self.config = load("cartpole", [*SMALL, *overrides])
        self.spec, topology = env_spec(self.config.env), make(self.config)
        self.ports = make_ports(topology, limits(self.config, self.spec))
        self.learner, self.replay_port = self.ports[0], self.ports[1]
        self.replay = Replay(self.config, self.spec, np.random.default_rng(0))
        self.networks = {}
        self.actor = Actor(self.config, self.spec, self.ports[3], 0, 1)

    def publish(self, version):
        """Publish a network like no other.

        Its weights are enlarged so that observations and versions matter.
        """
        torch.manual_seed(version)
        network = self.networks[version] = make_network(self.config, self.spec)
        layout = weight_layout(weights.size(network))
        message = aligned_bytes(layout.nbytes)
        views = layout.views(message)
        views["header"][:] = version, version
        weights.flatten(network, views["vector"])
        views["vector"] *= 3
        weights.unflatten(network, views["vector"])
        self.learner.publish_buffer(len(message))[:] = message
        self.learner.publish()

    def play(self, steps, publish_every=None):
        for i in range(steps):
            if publish_every and i % publish_every == 0:
                self.publish(1 + i // publish_every)
            for port in self.ports:
                port.progress()
            self.actor.work()
            while (event := self.replay_port.poll(self.replay.landing())) is not None:
                self.replay.insert(event.nbytes)
        return self

    def transitions(self):
        """Return all that arrived, with its initial priority, as one batch."""
        slots = np.array(
            [p * self.replay.batch + r for p, count in enumerate(self.replay.count) for r in range(count)]
        )
        layout = sample_layout(self.spec, len(slots))
        views = layout.views(aligned_bytes(layout.nbytes))
        self.replay.store.gather(slots, views)
        place, row = np.divmod(slots, self.replay.batch)
        views["priority"] = self.replay.store.views["priority"][place, row]
        return views


def cartpole_with_a_time_limit(mode, steps):
    """Return a ``make_envs`` of real CartPoles whose episodes are cut off, in one autoreset mode."""

    def make_envs(env, num_envs, seed):
        made = SyncVectorEnv([lambda: TimeLimit(CartPoleEnv(), steps)] * num_envs, autoreset_mode=mode)
        return VectorEnv(made, env_spec(env), seed)

    return make_envs


def td_errors(played, batch, version=1):
    """The learner's |TD error| with online and target weights equal to the actor's, row by row."""
    tensors = {
        name: torch.from_numpy(batch[name]) for name in ("obs", "next_obs", "action", "reward", "discount")
    }
    network = played.networks[version]
    with torch.no_grad():
        return td_error(network, network, tensors, played.config)[0].abs().numpy()


def check_priorities(played, least):
    batch = played.transitions()
    assert len(batch["priority"]) >= least
    expected = td_errors(played, batch)
    assert np.abs(batch["priority"] - expected).max() < 1e-5 * max(1.0, expected.max())
    assert len(np.unique(batch["priority"])) > 0.5 * len(batch["priority"])
    return Counter(np.round(batch["discount"].astype(np.float64), 4).tolist())


@pytest.mark.parametrize("double", ["true", "false"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_over_real_cartpole_initial_priorities_are_the_learners_td_errors(n_step, double):
    played = Played(f"algorithm.n_step={n_step}", f"algorithm.double={double}")
    played.publish(1)
    ends = check_priorities(played.play(150), 400)
    assert ends[0.0] >= 5 * n_step, "too few episodes ended for this to test anything"


@pytest.mark.parametrize("limit", [1, 2, 7])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_after_a_time_limit_initial_priorities_bootstrap_from_the_observation_it_cut_off_at(
    mode, limit, monkeypatch
):
    monkeypatch.setattr("actors.actor.make_envs", cartpole_with_a_time_limit(mode, limit))
    played = Played()
    played.publish(1)
    discounts = check_priorities(played.play(90), 120)
    tails = sum(discounts[round(GAMMA**k, 4)] for k in (1, 2))
    assert tails > 20 and discounts[0.0] == 0


def test_on_real_pong_initial_priorities_are_the_learners_td_errors_across_forced_ends():
    atari = [
        "env.family=atari",
        "env.id=pong",
        "env.frame_size=42",
        "env.max_episode_frames=80",
        "algorithm.network=small_cnn",
    ]
    played = Played(*atari, "actor.envs=2")
    played.publish(1)
    discounts = check_priorities(played.play(120), 180)
    assert discounts[0.0] == 0 and discounts[0.99] > 6


def test_every_transition_tells_the_version_of_the_weights_that_chose_its_action():
    """Without exploration, the action is the best one by that version's network, and often by no other's."""
    played = Played("actor.epsilon_base=0").play(200, publish_every=3)
    batch = played.transitions()
    versions = batch["param_version"]
    assert len(np.unique(versions)) > 30
    best = {
        v: net(torch.from_numpy(batch["obs"])).argmax(dim=1).numpy() for v, net in played.networks.items()
    }
    chosen = np.array([best[version][i] for i, version in enumerate(versions.tolist())])
    assert (batch["action"] == chosen).all()
    later = np.array([best.get(version + 1, best[version])[i] for i, version in enumerate(versions.tolist())])
    assert (batch["action"] != later).mean() > 0.1


def test_the_initial_priority_is_the_formula():
    rng = np.random.default_rng(0)
    q_taken, reward, discount, bootstrap = rng.normal(size=(4, 50)).astype(np.float32)
    priority = initial_priority(q_taken, reward, discount, bootstrap)
    expected = [
        abs(float(r) + float(d) * float(b) - float(q))
        for q, r, d, b in zip(q_taken, reward, discount, bootstrap)
    ]
    assert priority == pytest.approx(expected, abs=1e-6) and priority.dtype == np.float32
    assert initial_priority(q_taken[:0], reward[:0], discount[:0], bootstrap[:0]).shape == (0,)
