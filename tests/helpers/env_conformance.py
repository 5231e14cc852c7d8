"""What every environment family must do: a mixin of tests.

A new family is tested by:

    from env_conformance import EnvConformance

    class TestMyFamily(EnvConformance):
        config = EnvConfig(family="mine", id="Some-v0")

Choose an id, or settings, with which random play ends some episodes in ``steps`` steps.
"""

import zlib

import numpy as np
import pytest

from apex.envs import env_spec, make_envs
from apex.schema import EnvSpec


def play(envs, steps, action_seed=0):
    """Play at random from a reset; return the first observation, the actions and the timesteps."""
    rng = np.random.default_rng(action_seed)
    actions = rng.integers(envs.spec.num_actions, size=(steps, envs.num_envs))
    return envs.reset(), actions, [envs.step(a) for a in actions]


def same_run(a, b):
    """Whether two results of ``play`` are equal to the last bit."""
    fields = (
        np.array_equal(x, y) for s, t in zip(a[2], b[2], strict=True) for x, y in zip(s, t, strict=True)
    )
    return np.array_equal(a[0], b[0]) and all(fields)


def checksum(timestep):
    return [zlib.crc32(np.ascontiguousarray(array)) for array in timestep]


class Walk:
    """``steps`` random steps, kept: ``before[i]`` is the observation that step i was acted from."""

    def __init__(self, envs, steps):
        self.spec, self.num_envs = envs.spec, envs.num_envs
        rng = np.random.default_rng(0)
        self.before, self.timesteps, self.checksums = [envs.reset()], [], []
        self.first_checksum = zlib.crc32(self.before[0])
        for _ in range(steps):
            timestep = envs.step(rng.integers(self.spec.num_actions, size=self.num_envs))
            self.timesteps.append(timestep)
            self.checksums.append(checksum(timestep))
            self.before.append(timestep.obs)
        self.terminated, self.truncated, self.valid, self.first, self.reward = (
            np.array([getattr(t, name) for t in self.timesteps])
            for name in ("terminated", "truncated", "valid", "first", "reward")
        )
        self.done = self.terminated | self.truncated


class EnvConformance:
    """Tests of one family through ``apex.envs`` alone. Set ``config``; the rest has defaults."""

    config = None
    num_envs = 3
    steps = 600  # of the walk that most tests look at
    short = 150  # steps of a run that is played more than once

    def make(self, num_envs=None, seed=11, **options):
        return make_envs(self.config, num_envs or self.num_envs, seed, **options)

    @pytest.fixture(scope="class")
    @classmethod
    def walk(cls):
        envs = make_envs(cls.config, cls.num_envs, 11)
        yield Walk(envs, cls.steps)
        envs.close()

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls):
        return play(make_envs(cls.config, cls.num_envs, 11), cls.short)

    def test_the_spec_is_plain_and_agrees_with_the_environments(self):
        spec, envs = env_spec(self.config), self.make()
        assert isinstance(spec, EnvSpec) and spec == envs.spec
        assert envs.num_envs == self.num_envs
        assert spec.stack >= 1 and spec.num_actions >= 1 and spec.env_frames_per_step >= 1
        assert all(
            type(n) is int
            for n in (*spec.frame_shape, spec.stack, spec.num_actions, spec.env_frames_per_step)
        )
        assert spec.frame_dtype in ("uint8", "float32")

    def test_observations_have_the_specs_shape_and_dtype(self, walk):
        shape = (walk.num_envs, *walk.spec.observation_shape)
        for obs in (walk.before[0], *(a for t in walk.timesteps for a in (t.obs, t.last_obs))):
            assert obs.shape == shape and obs.dtype == walk.spec.frame_dtype and obs.flags.c_contiguous

    def test_flags_are_bools_and_rewards_float32_of_one_per_row(self, walk):
        for t in walk.timesteps:
            assert t.reward.dtype == np.float32 and t.reward.shape == (walk.num_envs,)
            for flag in (t.terminated, t.truncated, t.valid, t.first):
                assert flag.dtype == np.bool_ and flag.shape == (walk.num_envs,)

    def test_the_walk_ends_episodes_in_every_row(self, walk):
        assert walk.done.any(axis=0).all(), "choose settings with which random play ends some episodes"

    def test_a_games_end_ends_an_episode_and_the_score_is_what_the_reward_is_made_of(self, walk):
        for t in walk.timesteps:
            assert (
                t.game_over.dtype == np.bool_
                and t.score.dtype == np.float32
                and t.score.shape == (walk.num_envs,)
            )
            assert not (t.game_over & ~(t.terminated | t.truncated)).any()
            assert np.array_equal(np.sign(t.score), np.sign(t.reward))

    def test_termination_and_truncation_exclude_each_other(self, walk):
        assert not (walk.terminated & walk.truncated).any()

    def test_a_row_that_only_carried_a_reset_has_no_reward_and_no_end_and_starts_an_episode(self, walk):
        resets = ~walk.valid
        assert not walk.reward[resets].any() and not walk.done[resets].any() and walk.first[resets].all()

    def test_an_episode_begins_right_after_each_end_and_nowhere_else(self, walk):
        owed = np.zeros(walk.num_envs, bool)  # an end whose next episode has not begun
        for t in walk.timesteps:
            assert not (owed & t.valid).any(), "a step was made in an episode that had ended"
            owed |= t.terminated | t.truncated
            assert not (t.first & ~owed).any(), "an episode began without the last one ending"
            owed &= ~t.first

    def test_last_obs_differs_from_obs_only_where_an_episode_began(self, walk):
        for t in walk.timesteps:
            assert np.array_equal(t.obs[~t.first], t.last_obs[~t.first])
            if np.array_equal(t.obs, t.last_obs):
                assert t.obs is t.last_obs

    def test_within_an_episode_the_stack_shifts_by_one_frame_to_the_end(self, walk):
        for before, t in zip(walk.before, walk.timesteps, strict=False):
            assert np.array_equal(before[t.valid, 1:], t.last_obs[t.valid, :-1])

    def test_arrays_are_never_written_to_again(self, walk):
        assert zlib.crc32(walk.before[0]) == walk.first_checksum
        assert [checksum(t) for t in walk.timesteps] == walk.checksums

    def test_the_same_seed_and_actions_repeat_the_same_run(self, run):
        assert same_run(play(self.make(), self.short), run)

    def test_another_seed_gives_another_run(self, run):
        assert not same_run(play(self.make(seed=12), self.short), run)

    def test_rows_are_different_runs(self, run):
        assert any(not np.array_equal(t.obs[0], t.obs[1]) for t in run[2])

    @pytest.mark.parametrize("evaluation", [False, True])
    def test_reset_starts_the_same_run_again(self, evaluation):
        envs = self.make(evaluation=evaluation)
        assert same_run(play(envs, self.short // 2 + 1), play(envs, self.short // 2 + 1))

    def test_an_evaluation_episode_depends_only_on_its_own_seed_and_actions(self):
        first, actions, together = play(self.make(seed=20, evaluation=True), self.short)
        for row in range(self.num_envs):
            envs = self.make(num_envs=1, seed=20 + row, evaluation=True)
            assert np.array_equal(envs.reset()[0], first[row])
            for a, t in zip(actions, together, strict=True):
                alone = envs.step(a[row : row + 1])
                assert np.array_equal(alone.last_obs[0], t.last_obs[row]) and alone.reward[0] == t.reward[row]
                if t.terminated[row] or t.truncated[row]:
                    break

    def test_rendering_shows_a_picture_and_changes_nothing(self):
        plain = play(self.make(num_envs=1, evaluation=True), 60)
        envs = self.make(num_envs=1, evaluation=True, render=True)
        obs, pictures, timesteps = envs.reset(), [envs.render()], []
        for a in plain[1]:
            timesteps.append(envs.step(a))
            pictures.append(envs.render())
        envs.close()
        assert same_run(plain, (obs, plain[1], timesteps))
        assert all(p.dtype == np.uint8 and p.ndim == 3 and p.shape[2] == 3 for p in pictures)
        assert any(not np.array_equal(pictures[0], p) for p in pictures)

    def test_render_without_asking_for_it_at_the_start_is_refused(self):
        envs = self.make(num_envs=1)
        envs.reset()
        with pytest.raises(RuntimeError, match="render=True"):
            envs.render()
