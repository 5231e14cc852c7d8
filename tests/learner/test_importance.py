"""Importance-sampling weights against their formula, term by term."""

import numpy as np
import pytest

from learner.importance import ImportanceWeights

MASS = np.array([0.5, 2.0, 0.25, 1.25])


def views(mass, rows, size=None):
    """Return the fields of a sample message that drew ``rows`` of a replay rank holding ``mass``."""
    mass = np.asarray(mass, np.float64)
    total = mass.sum()
    return {
        "size": np.array([size or len(mass)]),
        "total": np.array([total]),
        "minimum": np.array([mass.min()]),
        "probability": mass[rows] / total,
    }


def raw(mass, row, beta):
    """(1 / (size * probability))^beta in plain Python."""
    return (1.0 / (len(mass) * (mass[row] / sum(mass)))) ** beta


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_global_weights_are_the_formula_divided_by_that_of_the_smallest_mass_in_replay(beta):
    weight = ImportanceWeights(beta, "global", 1)(0, views(MASS, [0, 1, 3]))
    assert weight == pytest.approx([raw(MASS, i, beta) / raw(MASS, 2, beta) for i in (0, 1, 3)], rel=1e-6)
    assert weight.dtype == np.float32


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_batch_weights_are_the_formula_divided_by_the_largest_in_the_batch(beta):
    weight = ImportanceWeights(beta, "batch", 1)(0, views(MASS, [0, 1, 3]))
    assert weight == pytest.approx([raw(MASS, i, beta) / raw(MASS, 0, beta) for i in (0, 1, 3)], rel=1e-6)
    assert weight.dtype == np.float32 and weight.max() == 1.0


def test_a_global_weight_does_not_depend_on_the_other_rows_and_a_batch_weight_does():
    for normalizer, same in (("global", True), ("batch", False)):
        alone, together = (
            ImportanceWeights(0.4, normalizer, 1)(0, views(MASS, rows))[0] for rows in ([1], [1, 2])
        )
        assert (alone == together) == same


@pytest.mark.parametrize("normalizer", ["global", "batch"])
def test_the_smallest_mass_weighs_exactly_one_and_no_other_more(normalizer):
    rng = np.random.default_rng(0)
    for _ in range(50):
        mass = rng.exponential(size=20) ** 3
        weight = ImportanceWeights(0.4, normalizer, 1)(0, views(mass, np.arange(20)))
        assert weight[mass.argmin()] == 1.0 and (weight > 0).all() and (weight <= 1).all()


def test_larger_probability_means_smaller_weight():
    weight = ImportanceWeights(0.4, "global", 1)(0, views(MASS, np.argsort(MASS)))
    assert (np.diff(weight) < 0).all()


def drawn_raw(mass, row, beta, everything):
    """(1 / (size * probability))^beta for one of two ranks asked in turn.

    Size of both, half the rank's probability.
    """
    return (1.0 / (everything * (mass[row] / sum(mass)) / 2)) ** beta


def test_with_several_replay_ranks_weights_use_the_probability_of_being_drawn_at_all():
    other = np.array([1.0, 1.0, 0.01])
    importance = ImportanceWeights(0.4, "global", 2)
    alone = importance(0, views(MASS, [0]))[0]
    assert alone == pytest.approx(raw(MASS, 0, 0.4) / raw(MASS, 2, 0.4), rel=1e-6)
    assert importance(1, views(other, [2]))[0] == 1.0
    expected = drawn_raw(MASS, 0, 0.4, 7) / drawn_raw(other, 2, 0.4, 7)
    assert importance(0, views(MASS, [0]))[0] == pytest.approx(expected, rel=1e-6)
    # Once the rare transition is gone from rank 1, rank 0's maximum counts again.
    importance(1, views([1.0, 1.0], [0]))
    assert importance(0, views(MASS, [0]))[0] == alone


def test_a_transition_of_a_fuller_rank_is_drawn_less_often_and_weighs_more():
    importance = ImportanceWeights(1.0, "global", 2)
    full = importance(0, views(np.ones(100), [0]))[0]
    empty = importance(1, views(np.ones(4), [0]))[0]
    assert full == 1.0 and empty == pytest.approx(4 / 100)


def test_the_batch_normaliser_does_not_read_the_minimum():
    given = views(MASS, [0, 1]) | {"minimum": np.array([np.nan])}
    assert np.isfinite(ImportanceWeights(0.4, "batch", 1)(0, given)).all()
