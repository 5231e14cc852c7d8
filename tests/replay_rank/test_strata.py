"""The random stream of draws, and the stratified targets made of it."""

import warnings

import numpy as np
import pytest
from scipy import stats

from replay_rank.strata import STATE_DTYPE, Strata

# The first numbers of SplitMix64 from seed 1234567, as published with its reference implementation.
REFERENCE = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def splitmix64(seed, k):
    """The first k numbers of the stream, in Python integers (Steele et al. 2014)."""
    numbers = []
    for n in range(1, k + 1):
        z = (seed + n * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        numbers.append(z ^ (z >> 31))
    return numbers


def test_the_reference_numbers_are_those_of_the_naive_stream():
    assert splitmix64(1234567, 5) == REFERENCE


@pytest.mark.parametrize("seed", [0, 1, 1234567, 2**63, 2**64 - 1])
def test_uniforms_are_the_upper_52_bits_of_splitmix64(seed):
    expected = [(number >> 12) * 2.0**-52 for number in splitmix64(seed, 100)]
    uniforms = Strata(seed).uniforms(100)
    assert uniforms.dtype == np.float64 and uniforms.tolist() == expected


def test_uniforms_are_below_one_and_multiples_of_two_to_the_minus_52():
    uniforms = Strata(3).uniforms(100_000)
    assert (uniforms >= 0.0).all() and (uniforms < 1.0).all()
    assert (uniforms * 2.0**52 == np.floor(uniforms * 2.0**52)).all()


def test_uniforms_are_uniform_and_one_does_not_tell_the_next():
    uniforms = Strata(4).uniforms(50_000)
    assert stats.kstest(uniforms, "uniform").pvalue > 1e-3
    pairs = np.histogram2d(uniforms[:-1:2], uniforms[1::2], bins=10)[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_neighbouring_seeds_give_unrelated_streams():
    one, other = Strata(5).uniforms(10_000), Strata(6).uniforms(10_000)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
    assert not np.intersect1d(one, other).size


@pytest.mark.parametrize("sizes", [[8], [3, 5], [1, 0, 1, 6], [0, 8]])
def test_a_stream_does_not_depend_on_how_it_is_cut(sizes):
    strata, whole = Strata(7), Strata(7)
    assert np.concatenate([strata.uniforms(k) for k in sizes]).tolist() == whole.uniforms(8).tolist()
    assert strata.state == whole.state


def test_the_state_is_one_number_with_which_a_run_is_repeated():
    strata = Strata(8)
    strata.uniforms(1000)
    saved = strata.state.copy()
    assert saved.shape == (1,) and saved.dtype == STATE_DTYPE == np.uint64
    after, resumed = strata.uniforms(10), Strata(0)
    resumed.state[:] = saved
    assert resumed.uniforms(10).tolist() == after.tolist()


def test_the_state_wraps_around_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strata = Strata(2**64 - 1)
        strata.uniforms(512)
    assert int(strata.state[0]) == (2**64 - 1 + 512 * 0x9E3779B97F4A7C15) % 2**64


@pytest.mark.parametrize("k", [1, 2, 7, 512])
@pytest.mark.parametrize("total", [1.0, 0.37, 1e-300, 1e300])
def test_each_slice_of_the_total_has_one_target(k, total):
    targets, uniforms = Strata(9).targets(k, total), Strata(9).uniforms(k)
    assert targets.dtype == np.float64
    assert targets.tolist() == [(i + u) * (total / k) for i, u in enumerate(uniforms)]
    assert np.floor(targets / (total / k)).tolist() == list(range(k))
    assert (np.diff(targets) > 0.0).all()


def test_targets_move_the_stream_as_far_as_uniforms_do():
    strata, same = Strata(10), Strata(10)
    strata.targets(5, 3.0)
    same.uniforms(5)
    assert strata.state == same.state


def test_no_targets_are_an_empty_array_and_move_nothing():
    strata = Strata(11)
    assert strata.targets(0, 1.0).shape == (0,)
    assert strata.state == Strata(11).state
