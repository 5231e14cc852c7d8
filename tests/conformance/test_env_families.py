"""The environment families of this project against the conformance suite."""

import gymnasium
import numpy as np
import pytest

pytest.register_assert_rewrite("env_conformance")

from env_conformance import EnvConformance  # noqa: E402

from apex.config import EnvConfig  # noqa: E402


class TestCartPole(EnvConformance):  # a vector implementation of its own; NEXT_STEP; terminations
    config = EnvConfig(family="gymnasium", id="CartPole-v1")


class TestMountainCar(EnvConformance):  # one copy per row; NEXT_STEP; truncations
    config = EnvConfig(family="gymnasium", id="MountainCar-v0")
    num_envs = 2


class CutInInfo(gymnasium.Wrapper):
    """Cuts an episode after ten steps as environments made for Gym before 0.26 do.

    Only ``info`` tells it from an end.
    """

    def reset(self, **options):
        self.steps = 0
        return self.env.reset(**options)

    def step(self, action):
        obs, reward, terminated, _, info = self.env.step(action)
        self.steps += 1
        cut = self.steps == 10 and not terminated
        return obs, reward, terminated or cut, False, info | {"TimeLimit.truncated": cut}


gymnasium.register(
    "CutInInfo-v0", lambda **options: CutInInfo(gymnasium.make("CartPole-v1", **options).unwrapped)
)


class TestTruncationToldInInfo(EnvConformance):
    config = EnvConfig(family="gymnasium", id="CutInInfo-v0")

    def test_what_info_calls_cut_is_truncated_and_what_ends_by_itself_terminated(self, walk):
        assert walk.truncated.any() and walk.terminated.any()
        for row in range(walk.num_envs):
            ends = np.flatnonzero(walk.done[:, row])
            lengths = [walk.valid[a + 1 : b + 1, row].sum() for a, b in zip((-1, *ends), ends, strict=False)]
            cut = walk.truncated[ends, row]
            assert max(lengths) == 10 and all(
                length == 10 for length, c in zip(lengths, cut, strict=True) if c
            )
            assert not cut[np.array(lengths) < 10].any()


class Atari(EnvConformance):
    num_envs = 2
    short = 80

    def test_a_first_observation_is_all_zero_but_for_its_newest_frame(self, walk):
        firsts = [walk.before[0], *(t.obs[t.first] for t in walk.timesteps)]
        for obs in firsts:
            assert not obs[:, :-1].any() and obs[:, -1].any(axis=(1, 2)).all()


class TestBreakout(Atari):  # terminations, FIRE at reset, sticky actions
    config = EnvConfig(family="atari", id="breakout", frame_size=42, sticky_actions=0.25)


class TestBreakoutLives(Atari):  # an episode per life
    config = EnvConfig(family="atari", id="breakout", frame_size=42, stack=2, episodic_life=True)

    def test_a_first_observation_is_all_zero_but_for_its_newest_frame(self, walk):
        """Or, after a lost life, the very observation that ended the last episode: the game goes on."""
        lives = 0
        for t in walk.timesteps:
            assert not t.obs[t.game_over, :-1].any()
            lost = t.first & ~t.game_over
            assert np.array_equal(t.obs[lost], t.last_obs[lost])
            lives += lost.sum()
        assert lives >= 2 * walk.num_envs


class TestPong(Atari):  # truncations, the paper's frames
    config = EnvConfig(family="atari", id="pong", max_episode_frames=400)

    def test_the_cap_counts_emulator_frames_and_truncates(self, walk):
        assert walk.truncated.any() and not walk.terminated.any()
        ends = np.flatnonzero(walk.truncated[:, 0])
        assert np.diff(ends).tolist() == [100] * 5
