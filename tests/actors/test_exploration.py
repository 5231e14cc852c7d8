"""The epsilon ladder and epsilon-greedy choice."""

import numpy as np
import pytest

from actors.exploration import actor_epsilons, epsilon_greedy, epsilon_ladder
from apex.config import ActorConfig


def test_the_ladder_is_the_papers_formula():
    expected = [0.4 ** (1 + 7 * i / 7) for i in range(8)]
    assert np.allclose(epsilon_ladder(0.4, 7.0, 8), expected, rtol=1e-15)


def test_the_ladder_falls_from_base_to_base_to_the_one_plus_alpha():
    ladder = epsilon_ladder(0.4, 7.0, 360)
    assert ladder[0] == 0.4 and ladder[-1] == pytest.approx(0.4**8)
    assert (np.diff(ladder) < 0).all() and ladder.dtype == np.float64


def test_a_single_environment_explores_with_base():
    assert epsilon_ladder(0.4, 7.0, 1).tolist() == [0.4]


def test_a_ladder_over_no_environments_is_refused():
    with pytest.raises(ValueError, match="num_total"):
        epsilon_ladder(0.4, 7.0, 0)


def test_the_actors_parts_together_are_the_whole_ladder():
    actor = ActorConfig(envs=5)
    parts = [actor_epsilons(actor, i, 3) for i in range(3)]
    assert [len(part) for part in parts] == [5, 5, 5]
    assert np.concatenate(parts).tolist() == epsilon_ladder(0.4, 7.0, 15).tolist()


@pytest.mark.parametrize("index", [-1, 3])
def test_an_actor_index_outside_the_run_is_refused(index):
    with pytest.raises(ValueError, match="actor_index"):
        actor_epsilons(ActorConfig(), index, 3)


def q_values(num_envs=1000, num_actions=4):
    return np.random.default_rng(0).normal(size=(num_envs, num_actions)).astype(np.float32)


def test_without_exploration_every_row_takes_its_best_action():
    q = q_values()
    actions = epsilon_greedy(q, np.zeros(1000), np.random.default_rng(1))
    assert actions.tolist() == q.argmax(1).tolist()
    assert actions.dtype == np.int64


def test_among_equal_values_the_lowest_action_is_taken():
    q = np.array([[1, 2, 2], [0, 0, 0], [3, 1, 3]], np.float32)
    assert epsilon_greedy(q, np.zeros(3), np.random.default_rng(0)).tolist() == [1, 0, 0]


def test_full_exploration_takes_all_actions_alike_whatever_their_value():
    q = np.tile(np.array([[9, 0, 0, -9]], np.float32), (40_000, 1))
    actions = epsilon_greedy(q, np.ones(40_000), np.random.default_rng(0))
    assert np.allclose(np.bincount(actions, minlength=4) / 40_000, 0.25, atol=0.01)


def test_every_row_explores_at_its_own_rate():
    q = np.tile(np.array([[0, 1]], np.float32), (3, 1))
    rng, epsilons = np.random.default_rng(0), np.array([0.0, 0.2, 1.0])
    rate = np.mean([epsilon_greedy(q, epsilons, rng) == 0 for _ in range(8_000)], axis=0)
    assert rate[0] == 0 and np.allclose(rate, epsilons / 2, atol=0.02)


def test_rows_explore_independently_of_each_other():
    q = np.tile(np.array([[0, 1]], np.float32), (10_000, 1))
    explored = epsilon_greedy(q, np.full(10_000, 0.5), np.random.default_rng(0)) == 0
    assert explored.mean() == pytest.approx(0.25, abs=0.02)
    assert (explored[1:] & explored[:-1]).mean() == pytest.approx(0.25**2, abs=0.02)


def test_the_random_numbers_drawn_do_not_depend_on_values_or_epsilons():
    first, second = np.random.default_rng(5), np.random.default_rng(5)
    epsilon_greedy(q_values(), np.zeros(1000), first)
    epsilon_greedy(-q_values(), np.ones(1000), second)
    assert first.random() == second.random()


def test_the_same_generator_state_gives_the_same_actions():
    q, epsilons = q_values(), np.full(1000, 0.5)
    a = epsilon_greedy(q, epsilons, np.random.default_rng(3))
    b = epsilon_greedy(q, epsilons, np.random.default_rng(3))
    assert a.tolist() == b.tolist() and a.tolist() != q.argmax(1).tolist()
