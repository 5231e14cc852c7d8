"""Games, lives, scores and no-ops of the Atari family; evaluations that are one episode."""

import numpy as np
import pytest

from actors.actor import Actor
from actors.evaluator import Evaluator
from apex.config import EnvConfig, load
from apex.envs import env_spec, make_envs
from launch.run import preflight


def atari(rom, **options):
    return EnvConfig(family="atari", id=rom, **{"frame_size": 42, **options})


class NoPort:
    """What roles ask of a port before anything is sent."""

    stopping, finished, handover = False, False, None
    intake_memory = staticmethod(lambda rows, nbytes: np.zeros((rows, nbytes), np.uint8))
    completed_intake = staticmethod(lambda: [])
    poll_weights = staticmethod(lambda: True)
    request_weights = staticmethod(lambda steps, into: None)


def test_after_a_lost_life_the_game_goes_on_with_the_lives_that_are_left():
    """Against the same game without episodes of lives, to the last bit: only the flags differ."""
    lives, whole = (make_envs(atari("breakout", episodic_life=by), 1, 1) for by in (True, False))
    assert np.array_equal(lives.reset(), whole.reset())
    ends = []
    for action in np.random.default_rng(0).integers(4, size=(600, 1)):
        a, b = lives.step(action), whole.step(action)
        assert np.array_equal(a.obs, b.obs) and np.array_equal(a.last_obs, b.last_obs)
        assert a.score == b.score and a.game_over == b.game_over
        if a.terminated[0]:
            ends.append("game" if b.terminated[0] else "life")
            assert a.first[0]
        assert b.terminated[0] <= a.terminated[0]
    assert ends[:10] == ["life"] * 4 + ["game"] + ["life"] * 4 + ["game"], "a game of breakout has five lives"


def test_the_score_is_full_where_the_reward_is_clipped():
    envs = make_envs(atari("space_invaders"), 1, 0)
    envs.reset()
    steps = [envs.step(a) for a in np.random.default_rng(0).integers(6, size=(300, 1))]
    score, reward = (np.concatenate([getattr(t, name) for t in steps]) for name in ("score", "reward"))
    assert score.max() >= 5 and np.array_equal(np.sign(score), reward)


@pytest.mark.parametrize("rom", ["pong", "freeway"])  # with FIRE after the no-ops, and without
@pytest.mark.parametrize("most", [0, 3])
def test_zero_to_noop_max_no_ops_are_drawn_both_ends_included(rom, most):
    envs = make_envs(atari(rom, frame_skip=1, noop_max=most), 16, 0)
    _, info = envs._env.reset(
        seed=np.arange(16)
    )  # one frame a no-op; the same number of frames is added to all
    frames = info["episode_frame_number"]
    assert set(frames - frames.min()) == set(range(most + 1))


def test_the_return_of_training_is_the_full_score_of_a_whole_game(monkeypatch):
    rows = ["env.id=space_invaders", "env.episodic_life=true", "actor.envs=1", "actor.epsilon_base=1.0"]
    config = load("pong-small", rows)
    actor = Actor(config, env_spec(config.env), NoPort, 0, 1)
    score, lives, step = 0.0, 0, actor.envs.step

    def watched(actions):
        nonlocal score, lives
        timestep = step(actions)
        score, lives = score + timestep.score[0], lives + int(timestep.terminated[0])
        return timestep

    monkeypatch.setattr(actor.envs, "step", watched)
    while actor.counters["episodes"] == 0:
        actor._step()
        while actor.intake.ready:
            actor.intake.recycle(actor.intake.ready.popleft())
    assert lives >= 3 and actor.counters["episodes"] == 1
    assert actor.counters["return_sum"] == score >= 5 and score % 5 == 0, "space invaders scores in fives"
    actor.close()


STILL = ["env.noop_max=0", "evaluator.episodes=3"]


@pytest.mark.parametrize(
    "more, told", [([], True), (["env.sticky_actions=0.25"], False), (["evaluator.epsilon=0.1"], False)]
)
def test_evaluations_that_are_one_episode_are_told_of_before_the_start(more, told, capsys):
    preflight._tell_of_equal_episodes(load("pong-small", [*STILL, *more]))
    err = capsys.readouterr().err
    assert ("3 episodes of an evaluation will be identical" in err) is told and err.count("\n") == int(told)


@pytest.mark.parametrize("noop_max, alike", [(0, True), (30, False)])
def test_an_evaluation_that_was_one_episode_is_told_of_once(noop_max, alike, capsys, tmp_path):
    config = load(
        "pong-small", [f"env.noop_max={noop_max}", "env.max_episode_frames=40", "evaluator.episodes=3"]
    )
    evaluator = Evaluator(config, env_spec(config.env), NoPort, tmp_path)
    for _ in range(2):
        evaluator.work()  # takes weights
        while evaluator._episodes is not None:
            evaluator.work()
        evaluator._unreported = False
    assert capsys.readouterr().err.count("were identical") == int(alike)
    evaluator.close()
