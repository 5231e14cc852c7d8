"""Environments that fail: made anew a bounded number of times, and nothing from before joined to what comes
after.
"""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from intake_oracle import Player, check_delivery, decode, make_config, stacking_envs

from actors.actor import Actor
from actors.evaluator import Episodes, Evaluator
from apex.config import load
from apex.control import CheckpointRequest
from apex.envs import EnvironmentFailure, GuardedEnvs, env_spec, make_envs
from apex.policy import Policy

NOWHERE = Path("/nowhere/checkpoints")  # where no best weights can be kept, which costs one warning
FLAVOURS = ("next_step", "same_step", "disabled")


def raising(raw):
    raise OSError("the emulator is gone")


def with_reward(value):
    return lambda raw: (raw[0], np.full(2, value), *raw[2:])


WAYS = {
    "raises": (raising, "OSError: the emulator is gone"),
    "NaN reward": (with_reward(np.nan), "are not 2 finite numbers"),
    "infinite reward": (with_reward(np.inf), "are not 2 finite numbers"),
    "reward too large for float32": (with_reward(1e300), "are not 2 finite numbers"),
    "one reward too many": (lambda raw: (raw[0], np.ones(3), *raw[2:]), "ValueError"),
    "one observation too few": (lambda raw: (raw[0][:1], *raw[1:]), "observations of shape"),
    "frames too small": (lambda raw: (raw[0][..., :1], *raw[1:]), "ValueError"),
}


def failing(flavour, way, at, made=None):
    """Return ``make(attempt)`` of stacking environments whose vector step number ``at`` (by attempt) goes
    wrong.
    """

    def make(attempt):
        envs, count = stacking_envs(flavour, 2, 4), [0]
        whole = envs._env.step

        def step(actions):
            count[0] += 1
            raw = whole(actions)
            return WAYS[way][0](raw) if count[0] == at[attempt] else raw

        envs._env.step = step
        if made is not None:
            made.append(attempt)
        return envs

    return make


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_all_transitions_but_the_open_windows_come_once_and_none_joins_two_attempts(flavour, way, capsys):
    envs = GuardedEnvs(failing(flavour, way, {0: 12, 1: 1, 2: 30, 3: 10**9}), 3, "actor 5")
    player = Player(make_config(2, 7, 3), envs)
    batches = [decode(player.config, envs.spec, message) for message in player.play(120)]
    check_delivery(player, [t for _, transitions in batches for t in transitions])
    assert envs.restarts == 3
    told = capsys.readouterr().err
    assert WAYS[way][1] in told
    assert [
        f"apex: actor 5: its environments failed and are made anew ({n} of 3)" in told for n in (1, 2, 3)
    ] == [True] * 3


def test_a_failure_beyond_the_last_restart_ends_it_and_says_why():
    made = []
    envs = GuardedEnvs(failing("same_step", "raises", {0: 2, 1: 3, 2: 1}, made), 2, "actor 5")
    with pytest.raises(
        EnvironmentFailure, match=r"actor 5: its environments failed 3 times; env.max_restarts = 2"
    ) as failure:
        for _ in range(10):
            envs.step(np.zeros(2, np.int64))
    assert made == [0, 1, 2] and isinstance(failure.value.__cause__, OSError)


def test_a_reset_that_fails_counts_too():
    def make(attempt):
        envs = stacking_envs("same_step", 2, 4)
        if attempt < 2:
            envs._env.reset = lambda **options: 1 / 0
        return envs

    envs = GuardedEnvs(make, 2, "actor 5")
    assert envs.reset().shape == (2, 4, 2, 2) and envs.restarts == 2
    with pytest.raises(EnvironmentFailure, match="failed 2 times"):
        GuardedEnvs(make, 1, "actor 5").reset()


class Breaking(gymnasium.Env):
    """A CartPole whose every twentieth step, of all of them, raises; rewards tell which step it is."""

    steps = 0

    def __init__(self, **options):
        self.inner = gymnasium.make("CartPole-v1").unwrapped
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space

    def reset(self, **options):
        return self.inner.reset(**options)

    def step(self, action):
        Breaking.steps += 1
        if Breaking.steps % 20 == 0:
            raise RuntimeError("every twentieth step")
        return self.inner.step(action)


@pytest.fixture
def breaking():
    gymnasium.register("Breaking-v0", Breaking)
    Breaking.steps = 0
    yield load(
        "cartpole", ["env.id=Breaking-v0", "env.max_restarts=5", "actor.envs=2", "evaluator.episodes=1"]
    )
    del gymnasium.registry["Breaking-v0"]


class NoPort:
    """What roles ask of a port before anything is sent."""

    stopping, finished, handover = False, False, None
    intake_memory = staticmethod(lambda rows, nbytes: np.zeros((rows, nbytes), np.uint8))
    completed_intake = staticmethod(lambda: [])
    can_send_intake = staticmethod(lambda: False)
    poll_weights = staticmethod(lambda: False)
    request_weights = staticmethod(lambda steps, into: None)
    send_report = staticmethod(lambda vector: True)
    poll_refusals = staticmethod(dict)


def test_an_actor_goes_on_and_counts_and_forgets_what_the_cut_episodes_had_earned(breaking):
    actor = Actor(breaking, env_spec(breaking.env), NoPort, 0, 1)
    steps = 0
    while actor.envs.restarts < 4:
        actor._step()
        steps += 1
    assert actor.counters["env_restarts"] == 4
    assert actor.counters["agent_steps"] <= 2 * (steps - 4), "a step that failed is none"
    assert actor._return.sum() == 0.0 and 0 <= actor.counters["return_sum"] < actor.counters["agent_steps"]
    actor.close()


def test_an_evaluation_in_which_environments_failed_starts_again(breaking, monkeypatch):
    evaluator = Evaluator(breaking, env_spec(breaking.env), NoPort, NOWHERE)
    monkeypatch.setattr(
        Policy, "q_values", lambda policy, obs: np.tile([1.0, 0.0], (len(obs), 1))
    )  # falls within 8 to 10 steps
    evaluator._episodes = Episodes(evaluator._envs, 0.0, 0, 1000)
    Breaking.steps = 15
    while evaluator._episodes is not None:
        evaluator.work()
    evaluator.update_counters()  # as before every report
    assert evaluator.counters["env_restarts"] == 1
    assert evaluator.counters["evaluations"] == 1
    assert 8 <= evaluator.counters["eval_return"] <= 10, "the return of one whole episode"
    evaluator.close()


def test_an_evaluators_restarts_are_in_checkpoints_and_counted_on_from_there(breaking):
    told = []
    port = NoPort()
    port.acknowledge = told.append
    evaluator = Evaluator(breaking, env_spec(breaking.env), port, NOWHERE)
    while evaluator._envs.restarts < 2:
        evaluator._envs.step(np.zeros(1, np.int64))
    evaluator.on_checkpoint(CheckpointRequest(1, 0, 0))
    evaluator.close()
    resumed = Evaluator(breaking, env_spec(breaking.env), port, NOWHERE)
    resumed.load_state_dict(told[0].state)
    resumed.report()
    assert resumed.counters["env_restarts"] == 2
    while resumed._envs.restarts < 1:
        resumed._envs.step(np.zeros(1, np.int64))
    resumed.report()
    assert resumed.counters["env_restarts"] == 3
    resumed.close()


# --- episodes that never end ------------------------------------------------------------------------


class Endless(gymnasium.Env):
    """It gives a reward of 1 for ever."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (3,)), gymnasium.spaces.Discrete(2)

    def __init__(self, **options):
        pass

    def reset(self, **options):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, False, {}


@pytest.fixture
def endless():
    gymnasium.register("Endless-v0", Endless)
    yield load("cartpole", ["env.id=Endless-v0", "env.max_episode_frames=40", "evaluator.episodes=2"])
    del gymnasium.registry["Endless-v0"]


def evaluate(evaluator):
    """Make one whole evaluation."""
    evaluator._begin()
    for _ in range(1000):
        if evaluator._episodes is None:
            return
        evaluator.work()


def test_evaluation_episodes_that_never_end_are_cut_and_one_line_says_so_once(endless, monkeypatch, capsys):
    evaluator = Evaluator(endless, env_spec(endless.env), NoPort, NOWHERE)
    monkeypatch.setattr(Policy, "q_values", lambda policy, obs: np.tile([1.0, 0.0], (len(obs), 1)))
    evaluate(evaluator), evaluate(evaluator)
    assert evaluator.counters["evaluations"] == 2 and evaluator.counters["eval_return"] == 41
    told = [
        line for line in capsys.readouterr().err.splitlines() if "cut" in line
    ]  # the two are identical, which it says too
    assert told == [
        "apex: evaluator: 2 of 2 episodes did not end within 41 steps and were cut (env.max_episode_frames; "
        "the return up to there counts)"
    ]
    evaluator.close()


def test_episodes_that_end_are_not_said_to_be_cut():
    env = load("cartpole", ["env.id=CartPole-v1"]).env
    episodes = Episodes(make_envs(env, 3, 0, evaluation=True), 0.0, 0, 500)
    while not episodes.done:
        episodes.step(lambda obs: np.tile([1.0, 0.0], (len(obs), 1)))
    assert episodes.complaint() is None and episodes.lengths.max() < 20
