"""Intake batches: frames rebuilt from shared storage equal the environment's stacks byte for byte."""

import numpy as np
import pytest
from counting_env import FLAVOURS, CountingEnv, counting_envs, wrapped
from gymnasium.wrappers import TimeLimit
from hypothesis import given, settings
from hypothesis import strategies as st
from intake_oracle import RESETS, Player, check_delivery, decode, make_config, stacking_envs

from actors.intake import Intake
from apex.algorithms.double_dqn import initial_priority
from apex.config import EnvConfig
from apex.envs import Timestep, make_envs
from apex.schema import EnvSpec, frame_rows

MODES = ("next_step", "same_step", "disabled")
ENDS = ("terminated", "truncated", "both")


def check_play(config, envs, steps):
    """Play; check every transition against the oracle; return the batches as (header, transitions)."""
    player = Player(config, envs)
    batches = [decode(config, envs.spec, message) for message in player.play(steps)]
    check_delivery(player, [t for _, transitions in batches for t in transitions])
    check_headers(config, envs, batches)
    envs.close()
    return batches


def check_headers(config, envs, batches):
    rows = frame_rows(envs.spec, config.actor.intake_batch, config.algorithm.n_step)
    for sequence, ((count, frames, actor, number), transitions) in enumerate(batches):
        assert 1 <= count <= config.actor.intake_batch and 0 <= frames <= rows
        assert (actor, number) == (5, sequence)
        assert len({t.number % envs.num_envs for t in transitions}) == 1, "a batch holds two environments"


# --- the central property ------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("batch", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("flavour", MODES)
def test_every_step_starts_one_transition_that_comes_once_in_order_and_byte_for_byte(
    flavour, batch, n, stack
):
    steps = 150 if batch == 50 else 50
    batches = check_play(make_config(2, batch, n), stacking_envs(flavour, 2, stack), steps)
    assert len(batches) >= 4


@st.composite
def streams(draw):
    """Return a configuration and environments with random episode lengths, ends, resets and settings."""
    envs, batch = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    config = make_config(envs, batch, draw(st.integers(1, 5)), draw(st.integers(1, 3)))
    lengths = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=6)))
    ends = tuple(draw(st.lists(st.sampled_from(ENDS), min_size=1, max_size=4)))
    flavour, stack, resets = (
        draw(st.sampled_from(sorted(FLAVOURS))),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from(RESETS)),
    )
    return config, stacking_envs(flavour, envs, stack, resets, lengths, ends)


@settings(max_examples=120, deadline=None)
@given(stream=streams())
def test_random_streams_are_delivered_once_in_order_and_byte_for_byte(stream):
    check_play(*stream, steps=45)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_unstacked_float_observations_survive_in_every_autoreset_mode(flavour):
    envs = counting_envs(flavour, 3, lengths=(5, 1, 2, 7), ends=("terminated", "truncated", "truncated"))
    batches = check_play(make_config(3, 4, 3), envs, 60)
    ends = {
        np.frombuffer(t.next_obs, np.float32)[1:].tobytes()
        for _, transitions in batches
        for t in transitions
        if t.discount == 0
    }
    assert len(ends) > 5


@pytest.mark.parametrize("flavour", MODES)
def test_a_time_limit_keeps_the_discount_and_the_terminal_observation(flavour):
    envs = wrapped(flavour, [lambda: TimeLimit(CountingEnv(lengths=(10**9,)), 4)] * 2)
    batches = check_play(make_config(2, 3, 3), envs, 30)
    transitions = [t for _, found in batches for t in found]
    assert all(t.discount > 0 for t in transitions)
    assert {np.frombuffer(t.next_obs, np.float32)[2] for t in transitions} == {3.0, 4.0}


@pytest.mark.parametrize("flavour", MODES)
def test_a_stream_of_one_step_episodes_is_one_transition_each(flavour):
    batches = check_play(make_config(2, 3, 5), stacking_envs(flavour, 2, 4, "other", lengths=(1,)), 40)
    transitions = [t for _, found in batches for t in found]
    assert len({t.obs for t in transitions}) == len(transitions) > 15


# --- frames -------------------------------------------------------------------------------------


def test_a_batch_that_runs_out_of_frame_rows_goes_out_short_and_complete():
    """Episodes of one step that start with four frames of their own use five rows a transition."""
    config = make_config(1, 50, 3)
    batches = check_play(config, stacking_envs("same_step", 1, 4, "other", lengths=(1,)), 200)
    rows = frame_rows(EnvSpec((2, 2), "uint8", 4, 2), 50, 3)
    assert len(batches) > 10
    for (count, frames, *_), _ in batches[:-1]:
        assert rows - 4 <= frames <= rows and rows // 5 <= count < 16


@pytest.mark.parametrize("n", [1, 3, 5])
def test_within_a_long_episode_batches_are_full_and_store_each_frame_once(n):
    batches = check_play(make_config(1, 50, n), stacking_envs("same_step", 1, 4, lengths=(1000,)), 300)
    assert len(batches) >= 5
    for (count, frames, *_), _ in batches:
        assert count == 50 and frames <= 50 + n + 4 - 1


@pytest.mark.parametrize("resets, stored", [("zero", 1), ("repeat", 1), ("other", 4)])
def test_a_first_observation_stores_only_the_frames_it_does_not_share(resets, stored):
    batches = check_play(make_config(1, 1, 1), stacking_envs("same_step", 1, 4, resets, lengths=(50,)), 1)
    (count, frames, *_), _ = batches[0]
    assert (count, frames) == (1, stored + 1)


def first_observation_as_stored(obs):
    """Return the bytes of ``obs`` [stack, *frame_shape] after a round through an intake batch."""
    spec = EnvSpec(obs.shape[1:], obs.dtype.name, len(obs), 2)
    config = make_config(1, 1, 1)
    intake = Intake(config, spec, 0, initial_priority)
    intake.begin(obs[None])
    one = np.ones(1, np.float32)
    after = np.concatenate([obs[1:], obs[:1]])[None]
    intake.add(timestep(after), np.array([0]), one, 0, one)
    _, transitions = decode(config, spec, intake.message(intake.ready[0]))
    return transitions[0].obs


def timestep(obs):
    yes, no = np.ones(1, bool), np.zeros(1, bool)
    none = np.zeros(1, np.float32)
    return Timestep(obs, obs, none, yes, no, yes, no, none, yes)


@pytest.mark.parametrize(
    "frames", [[-0.0], [0.0, -0.0, 0.0, -0.0], [np.nan, np.nan, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0]]
)
def test_minus_zero_and_nan_are_kept_to_the_bit(frames):
    obs = np.repeat(np.array(frames, np.float32)[:, None], 3, axis=1)
    assert first_observation_as_stored(obs) == obs.tobytes()


def test_frames_without_any_dimension_are_kept():
    obs = np.array([0, 3, 3, 7], np.uint8)
    assert first_observation_as_stored(obs) == obs.tobytes()


# --- the pool of batches ------------------------------------------------------------------------


@pytest.mark.parametrize("batch, n", [(1, 1), (1, 5), (2, 3), (7, 3)])
def test_an_intake_whose_batches_nobody_takes_says_so_before_it_runs_out(batch, n):
    config = make_config(3, batch, n)
    envs = stacking_envs("same_step", 3, 4, "other", lengths=(4, 1, 6))
    player = Player(config, envs)
    while player.intake.has_room():
        player._step()
    waiting = list(player.intake.ready)
    assert len(set(waiting)) == len(waiting) > config.actor.in_flight
    delivered = [t for message in player._send() for t in decode(config, envs.spec, message)[1]]
    check_delivery(player, delivered)
    assert player.intake.has_room()


def test_the_first_batches_of_the_environments_do_not_all_close_at_once():
    player = Player(make_config(5, 10, 1, in_flight=9), stacking_envs("same_step", 5, 4, lengths=(1000,)))
    closed_at = [player.time for _ in player.play(10)]
    assert closed_at == [2, 4, 6, 8, 10]


def test_more_environments_than_rows_in_a_batch_are_all_delivered():
    check_play(make_config(9, 2, 3), stacking_envs("next_step", 9, 1), 20)


def test_transitions_counts_what_a_ready_batch_holds():
    config, envs = make_config(1, 3, 1), stacking_envs("same_step", 1, 4, lengths=(100,))
    player = Player(config, envs)
    for _ in range(3):
        player._step()
    assert [player.intake.transitions(row) for row in player.intake.ready] == [3]


# --- real Atari ----------------------------------------------------------------------------------


def test_pong_stacks_come_back_byte_for_byte_across_forced_ends_of_episodes():
    env = EnvConfig(family="atari", id="pong", frame_size=42, max_episode_frames=150)
    config = make_config(2, 50, 3)
    batches = check_play(config, make_envs(env, 2, seed=3), 350)
    transitions = [t for _, found in batches for t in found]
    assert len(transitions) >= 500 and len({t.obs for t in transitions}) > 300
    assert sum(len(t.obs) == 4 * 42 * 42 and not any(t.obs[: 3 * 42 * 42]) for t in transitions) >= 10
