"""Replay by rank and uniformly: how often each transition is drawn, and the weights that go with it."""

import numpy as np
import pytest
from numbered_replay import Numbered, update
from scipy import stats

from learner.importance import ImportanceWeights

pytestmark = pytest.mark.usefixtures("one_torch_thread")
INDEXES = ["wide", "wide32", "binary", "numpy", "torch", "rank", "rank_torch"]


@pytest.mark.parametrize("index", ["rank", "rank_torch"])
def test_by_rank_a_transition_is_drawn_in_proportion_to_its_rank_to_the_minus_alpha(index):
    priority = np.random.default_rng(1).permutation(40).astype(np.float32)  # 0 is a priority too
    replay = Numbered(40, 8, index=index, seed=2, alpha=0.7)
    for part in priority.reshape(5, 8):
        replay.put(part)
    out, _ = replay.draw(1000)
    expected = (40.0 - priority.astype(np.float64)) ** -0.7 / np.sum(np.arange(1, 41) ** -0.7)
    assert out["probability"] == pytest.approx(expected[out["action"]], rel=1e-12)
    assert out["minimum"][0] / out["total"][0] == pytest.approx(expected.min(), rel=1e-12)
    counts = np.bincount(np.concatenate([replay.draw(1000)[1] for _ in range(200)]), minlength=40)
    assert stats.chisquare(counts, 200_000 * expected).pvalue > 1e-3


@pytest.mark.parametrize("index", ["rank", "rank_torch"])
def test_by_rank_an_updated_priority_moves_its_transition_to_its_new_rank(index):
    replay = Numbered(4, 4, index=index, alpha=1.0)
    replay.put([4.0, 3.0, 2.0, 1.0])
    update(replay, [replay.keys()[3]], [3.5])
    out, numbers = replay.draw(100)
    ranks = {0: 1, 3: 2, 1: 3, 2: 4}
    assert out["probability"] == pytest.approx(
        [1 / ranks[n] / (1 + 1 / 2 + 1 / 3 + 1 / 4) for n in numbers], rel=1e-12
    )


@pytest.mark.parametrize("index", INDEXES)
def test_with_alpha_zero_every_transition_is_as_likely_and_all_weights_are_one(index):
    replay = Numbered(30, 10, index=index, alpha=0.0)
    for _ in range(3):
        replay.put(np.random.default_rng(3).exponential(size=10))
    out, _ = replay.draw(500)
    assert out["probability"] == pytest.approx(np.full(500, 1 / 30), rel=1e-12)
    assert ImportanceWeights(0.4, "global", 1)(0, out) == pytest.approx(np.ones(500), rel=1e-6)
    counts = np.bincount(np.concatenate([replay.draw(1000)[1] for _ in range(100)]), minlength=30)
    assert stats.chisquare(counts).pvalue > 1e-3
