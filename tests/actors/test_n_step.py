"""n-step transitions against a plain-Python oracle, and through real environments in every autoreset mode."""

import numpy as np
import pytest
from counting_env import FLAVOURS, CountingEnv, counting_envs, reward_of, wrapped
from gymnasium.wrappers import TimeLimit
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.n_step import NStep

GO, TERMINATED, TRUNCATED, RESET = "go", "terminated", "truncated", "reset"


def oracle(stream, n, gamma):
    """All transitions of one environment: {(step they end at, age): (return, discount)}, and those pending.

    ``stream`` is its list of (reward, event). Slow and obvious: each start looks ahead in its episode.
    """
    ended, pending, episode = {}, 0, []
    for time, (reward, event) in enumerate(stream):
        if event == RESET:
            continue
        episode.append((time, reward))
        if event != GO:
            for start in range(len(episode)):
                add_transition(ended, episode, start, n, gamma, event)
            episode = []
    for start in range(len(episode)):
        if start + n <= len(episode):
            add_transition(ended, episode, start, n, gamma, GO)
        else:
            pending += 1
    return ended, pending


def add_transition(ended, episode, start, n, gamma, event):
    window = episode[start : start + n]
    total = 0.0
    for k, (_, reward) in enumerate(window):
        total += reward * gamma**k
    last = window[-1][0]
    over = event == TERMINATED and last == episode[-1][0]
    discount = 0.0 if over else gamma ** len(window)
    ended[last, len(window) - 1] = (np.float32(total), np.float32(discount))


def run(n_step, streams):
    """Feed one stream per environment; return the oracle's dictionary per environment."""
    results = [{} for _ in streams]
    for time, rows in enumerate(zip(*streams, strict=True)):
        reward = np.array([r for r, _ in rows], np.float32)
        event = np.array([e for _, e in rows])
        emitted = n_step.step(reward, event == TERMINATED, event == TRUNCATED, event != RESET)
        for env, age, ret, discount in zip(*emitted, strict=True):
            assert (time, age) not in results[env], "the same transition came twice"
            results[env][time, age] = (ret, discount)
    return results


@st.composite
def stream_sets(draw):
    """Up to five streams of one length; some with a reset row after each end (NEXT_STEP), some without."""
    num_envs, steps = draw(st.integers(1, 5)), draw(st.integers(1, 25))
    rewards = st.floats(-1e3, 1e3, width=32)
    events = st.sampled_from([GO, GO, GO, TERMINATED, TRUNCATED])
    streams = []
    for _ in range(num_envs):
        stream, reset_rows = [], draw(st.booleans())
        while len(stream) < steps:
            stream.append((draw(rewards), draw(events)))
            if reset_rows and stream[-1][1] != GO:
                stream.append((0.0, RESET))
        streams.append(stream[:steps])
    return streams


@settings(max_examples=300, deadline=None)
@given(streams=stream_sets(), n=st.integers(1, 6), gamma=st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_every_transition_of_random_streams_is_the_oracles_to_the_last_bit(streams, n, gamma):
    n_step = NStep(len(streams), n, gamma)
    results = run(n_step, streams)
    expected = [oracle(stream, n, gamma) for stream in streams]
    assert results == [ended for ended, _ in expected]
    assert n_step.state_dict()["length"].tolist() == [pending for _, pending in expected]


@settings(max_examples=50, deadline=None)
@given(streams=stream_sets(), n=st.integers(1, 4))
def test_windows_emptied_by_a_reset_leave_nothing_behind(streams, n):
    n_step = NStep(len(streams), n, 0.9)
    run(n_step, streams)
    run(n_step, [[(0.0, RESET)]] * len(streams))
    assert run(n_step, streams) == run(NStep(len(streams), n, 0.9), streams)


def single(rewards, last, n, gamma):
    """Run one episode of one environment; return the transitions in the order they came.

    (age, ret, discount).
    """
    n_step, out = NStep(1, n, gamma), []
    for i, reward in enumerate(rewards):
        event = last if i == len(rewards) - 1 else GO
        flags = [np.array([event == TERMINATED]), np.array([event == TRUNCATED]), np.array([True])]
        _, age, ret, discount = n_step.step(np.array([reward], np.float32), *flags)
        out += zip(age.tolist(), ret.tolist(), discount.tolist(), strict=True)
    return out


def test_the_first_three_step_return_sums_three_rewards_not_four():
    assert single([1, 2, 4, 8], GO, n=3, gamma=1.0) == [(2, 7.0, 1.0), (2, 14.0, 1.0)]


def test_five_steps_with_n_three_are_five_transitions():
    transitions = single([1, 2, 4, 8, 16], TERMINATED, n=3, gamma=1.0)
    assert transitions == [(2, 7.0, 1.0), (2, 14.0, 1.0), (2, 28.0, 0.0), (1, 24.0, 0.0), (0, 16.0, 0.0)]


def test_an_episode_of_one_step_is_one_transition():
    assert single([3], TERMINATED, n=3, gamma=0.5) == [(0, 3.0, 0.0)]
    assert single([3], TRUNCATED, n=3, gamma=0.5) == [(0, 3.0, 0.5)]


def test_discounts_are_not_reversed():
    assert single([1, 0, 0], GO, n=3, gamma=0.5) == [(2, 1.0, 0.125)]
    assert single([0, 0, 1], GO, n=3, gamma=0.5) == [(2, 0.25, 0.125)]


def test_a_truncated_tail_keeps_the_discount_of_the_rewards_it_sums():
    assert single([1, 1], TRUNCATED, n=3, gamma=0.5) == [(1, 1.5, 0.25), (0, 1.0, 0.5)]


def test_termination_wins_where_an_episode_is_both_terminated_and_truncated():
    yes = np.array([True])
    assert NStep(1, 3, 0.9).step(np.ones(1, np.float32), yes, yes, yes)[3].tolist() == [0.0]


def test_transitions_come_by_descending_age_and_then_by_environment():
    n_step, no, yes = NStep(3, 2, 1.0), np.zeros(3, bool), np.ones(3, bool)
    n_step.step(np.zeros(3, np.float32), no, no, yes)
    env, age, ret, discount = n_step.step(np.zeros(3, np.float32), np.array([True, False, True]), no, yes)
    assert age.tolist() == [1, 1, 1, 0, 0] and env.tolist() == [0, 1, 2, 0, 2]
    assert [a.dtype for a in (env, age, ret, discount)] == [np.int64, np.int64, np.float32, np.float32]


def test_a_full_window_and_an_empty_step_return_the_same_dtypes():
    n_step, no, yes = NStep(2, 2, 0.9), np.zeros(2, bool), np.ones(2, bool)
    for count in (0, 2):
        arrays = n_step.step(np.zeros(2, np.float32), no, no, yes)
        assert [len(a) for a in arrays] == [count] * 4
        assert [a.dtype for a in arrays] == [np.int64, np.int64, np.float32, np.float32]


def test_impossible_settings_are_refused():
    for arguments in ((0, 3, 0.9), (1, 0, 0.9), (1, 3, 1.1), (1, 3, float("nan"))):
        with pytest.raises(ValueError):
            NStep(*arguments)


def play(envs, n, gamma, steps):
    """Step for a while; return (start observation, end observation, return, discount) per transition, and
    steps made.

    Observations are the counting environment's (row, episode, t).
    """
    n_step, acted_from, transitions, made = NStep(envs.num_envs, n, gamma), [], [], []
    obs = envs.reset()
    for now in range(steps):
        acted_from.append(obs)
        step = envs.step(np.zeros(envs.num_envs, np.int64))
        made += [as_place(obs[v]) for v in np.flatnonzero(step.valid)]
        emitted = n_step.step(step.reward, step.terminated, step.truncated, step.valid)
        for v, age, ret, discount in zip(*emitted, strict=True):
            transitions.append(
                (as_place(acted_from[now - age][v]), as_place(step.last_obs[v]), ret, discount)
            )
        obs = step.obs
    return transitions, made


def as_place(observation):
    return tuple(int(x) for x in observation[0])


LENGTHS = (5, 1, 2, 4, 7, 3)
ENDS = ("terminated", "truncated", "terminated", "terminated", "truncated")


def length_of(row, episode):
    return LENGTHS[(row + episode) % len(LENGTHS)]


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("flavour", FLAVOURS)
class TestRealEnvironments:
    def transitions(self, flavour, n):
        return play(counting_envs(flavour, 4, lengths=LENGTHS, ends=ENDS), n, 0.5, steps=80)

    def test_no_transition_joins_two_episodes(self, flavour, n):
        transitions, _ = self.transitions(flavour, n)
        assert len({start[1] for start, *_ in transitions}) > 10
        for (row, episode, t), (end_row, end_episode, end_t), *_ in transitions:
            assert (row, episode) == (end_row, end_episode)
            assert end_t == min(t + n, length_of(row, episode))

    def test_every_step_of_a_finished_episode_starts_exactly_one_transition(self, flavour, n):
        transitions, made = self.transitions(flavour, n)
        latest = {row: max(e for r, e, _ in made if r == row) for row in range(4)}
        finished = [place for place in made if place[1] < latest[place[0]]]
        whole = [(r, e, t) for r in range(4) for e in range(latest[r]) for t in range(length_of(r, e))]
        assert sorted(finished) == whole
        assert sorted(start for start, *_ in transitions if start[1] < latest[start[0]]) == whole

    def test_returns_sum_the_rewards_between_start_and_end(self, flavour, n):
        transitions, _ = self.transitions(flavour, n)
        for (row, episode, t), (_, _, end_t), ret, _ in transitions:
            assert ret == sum(reward_of(row, episode, t + k) * 0.5**k for k in range(end_t - t))

    def test_the_discount_is_zero_only_after_termination(self, flavour, n):
        transitions, _ = self.transitions(flavour, n)
        for (row, episode, t), (_, _, end_t), _, discount in transitions:
            over = end_t == length_of(row, episode) and ENDS[episode % len(ENDS)] == "terminated"
            assert discount == (0.0 if over else 0.5 ** (end_t - t))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_time_limit_keeps_the_discount_above_zero(flavour):
    limited = wrapped(flavour, [lambda: TimeLimit(CountingEnv(lengths=(10**9,)), 4)] * 2)
    transitions, _ = play(limited, 3, 0.5, steps=20)
    assert {end[2] for _, end, *_ in transitions} == {3, 4}
    assert all(discount > 0 for *_, discount in transitions)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_rewards_one_two_four_eight_give_seven_first_in_a_real_environment(flavour):
    envs = counting_envs(flavour, 1, lengths=(4,), rewards=[1, 2, 4, 8])
    transitions, _ = play(envs, 3, 1.0, steps=4)
    assert [(ret, discount) for _, _, ret, discount in transitions] == [(7, 1), (14, 0), (12, 0), (8, 0)]
