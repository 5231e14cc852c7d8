"""The rate limiter: its equation, and that both sides never wait for each other."""

import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from apex.config import Config, ConfigError, LearnerConfig, ReplayConfig, from_tables
from apex.schema import EnvSpec, intake_nbytes, limits
from apex.topology import make
from launch.run.local import make_ports
from replay_rank.rate_limit import RateLimiter
from replay_rank.service import ReplayService


def limiter(samples_per_insert, min_size, error_buffer, batch_size, ranks=1):
    replay = ReplayConfig(
        ranks, samples_per_insert=samples_per_insert, min_size=min_size, error_buffer=error_buffer
    )
    return RateLimiter(Config(replay=replay, learner=LearnerConfig(batch_size)))


def suggested(error):
    """Return the error_buffer that a refusal names; it must be one line that names the setting."""
    message = str(error.value)
    assert "\n" not in message and message.startswith("replay.error_buffer = ")
    return float(re.search(r"the least is (\S+) with", message)[1])


# --- the equation -------------------------------------------------------------------------------


def test_nothing_is_sampled_before_the_minimum_size():
    limit = limiter(0.0, 100, 0.1, 32)
    limit.count(inserted=99)
    assert not limit.may_sample(32) and limit.may_insert()
    limit.count(inserted=1)
    assert limit.may_sample(32)


def test_without_a_ratio_neither_side_ever_waits_after_the_minimum_size():
    limit = limiter(0.0, 1, 0.0, 512)
    limit.count(inserted=1, sampled=10**9)
    assert limit.may_sample(512) and limit.may_insert()
    limit.count(inserted=10**12)
    assert limit.may_sample(512) and limit.may_insert()


@settings(max_examples=300, deadline=None)
@given(
    ratio=st.sampled_from([0.5, 1.0, 4.0, 8.0]), inserted=st.integers(0, 500), sampled=st.integers(0, 3000)
)
def test_each_side_is_blocked_exactly_where_the_documented_equation_says(ratio, inserted, sampled):
    min_size, band, batch = 100, 0.5, 32
    limit = limiter(ratio, min_size, band, batch)
    limit.count(inserted=inserted, sampled=sampled)
    owed, m = ratio * inserted - sampled, ratio * min_size
    e = band * m
    assert limit.may_sample(batch) == (inserted >= min_size and owed - batch >= m - e)
    assert limit.may_insert() == (inserted < min_size or owed <= m + e)


def test_the_minimum_size_is_shared_out_over_the_replay_ranks():
    limit = limiter(0.0, 100, 0.1, 32, 3)
    limit.count(inserted=33)
    assert not limit.may_sample(1)
    limit.count(inserted=1)
    assert limit.may_sample(1)


# --- both sides at once ---------------------------------------------------------------------------

ratios = st.one_of(st.sampled_from([0.1, 0.5, 1.0, 4.0, 8.0]), st.floats(0.01, 64.0))
bands = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.floats(0.0, 3.0))


@settings(max_examples=300, deadline=None)
@given(ratio=ratios, min_size=st.integers(1, 5000), band=bands, batch=st.integers(1, 512), data=st.data())
def test_with_accepted_settings_both_sides_are_never_blocked_at_once(ratio, min_size, band, batch, data):
    try:
        limit = limiter(ratio, min_size, band, batch)
    except ConfigError:
        assume(False)
    inserted = data.draw(st.integers(min_size, 4 * min_size))
    owed = data.draw(
        st.one_of(st.floats(limit.low - 1, limit.high + batch + 1), st.sampled_from([limit.low, limit.high]))
    )
    sampled = max(0, round(ratio * inserted - owed))
    for near in (sampled - 1, sampled, sampled + 1):
        limit.inserted, limit.sampled = inserted, max(0, near)
        assert limit.may_insert() or limit.may_sample(batch)


@settings(max_examples=300, deadline=None)
@given(ratio=ratios, min_size=st.integers(1, 5000), band=bands, batch=st.integers(1, 2048))
def test_a_band_that_could_block_both_sides_is_refused_with_one_that_is_accepted(
    ratio, min_size, band, batch
):
    too_narrow = 2 * band * (ratio * min_size) < batch * (1 - 1e-12)
    try:
        limiter(ratio, min_size, band, batch)
        assert not too_narrow
    except ConfigError:
        with pytest.raises(ConfigError) as error:
            limiter(ratio, min_size, band, batch)
        least = suggested(error)
        limiter(ratio, min_size, least, batch)
        assert band < least <= 1.002 * batch / (2 * ratio * min_size)


def test_the_narrowest_accepted_band_is_as_wide_as_one_sample_batch():
    limiter(1.0, 1000, 0.256, 512)
    with pytest.raises(ConfigError) as error:
        limiter(1.0, 1000, 0.2559, 512)
    assert suggested(error) == 0.256


@pytest.mark.parametrize("ratio, min_size", [(1.0, 4001), (3.0, 7), (0.1, 1234)])
def test_the_band_named_is_never_rounded_below_what_is_accepted(ratio, min_size):
    """The least band is B / (2 r m); its nearest four digits may lie below it."""
    for batch in range(1, 600):
        with pytest.raises(ConfigError) as error:
            limiter(ratio, min_size, 0.0, batch)
        limiter(ratio, min_size, suggested(error), batch)


# --- over a run -----------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", ["actors", "learner", "both"])
@pytest.mark.parametrize(
    "ratio, min_size, band, batch, intake",
    [(8.0, 100, 0.5, 64, 50), (0.5, 200, 1.0, 32, 7), (1.3, 50, 0.5, 16, 1)],
)
def test_the_ratio_of_samples_to_inserts_stays_in_the_band_whoever_is_faster(
    eager, ratio, min_size, band, batch, intake
):
    limit, rng = limiter(ratio, min_size, band, batch), np.random.default_rng(0)
    chance = {"actors": 0.95, "learner": 0.05, "both": 0.5}[eager]
    for _ in range(30_000):
        if rng.random() < chance and limit.may_insert():
            limit.count(inserted=int(rng.integers(1, intake + 1)))
        elif limit.may_sample(batch):
            limit.count(sampled=batch)
        if limit.sampled:
            assert (
                limit.low - 1e-6
                <= ratio * limit.inserted - limit.sampled
                <= limit.high + ratio * intake + 1e-6
            )
    assert limit.sampled / limit.inserted == pytest.approx(
        ratio, abs=(limit.high + ratio * intake) / limit.inserted
    )
    assert limit.inserted > 20 * min_size


def service(samples_per_insert):
    """Return a replay rank that gets batches of two transitions, with all ports of its world."""
    replay = {"samples_per_insert": samples_per_insert, "min_size": 4, "error_buffer": 1.0, "capacity": 20}
    tables = {
        "replay": replay,
        "learner": {"batch_size": 4, "prefetch": 4},
        "actor": {"intake_batch": 2, "in_flight": 99},
    }
    config, spec = from_tables([("test", tables)]), EnvSpec((1,), "float32", 1, 2)
    topology = make(config)
    ports = make_ports(topology, limits(config, spec))
    return ReplayService(config, spec, ports[1], 0), ports[0], ports[3]


def send(rank, actor, batches):
    layout = rank.replay.store.layout
    message = np.zeros(layout.nbytes, np.uint8)
    views = layout.views(message)
    views["header"][:], views["priority"][:] = (2, 1, 0, 0), 1.0
    for _ in range(batches):
        actor.send_intake(0, message[: intake_nbytes(layout, rank.replay.store.spec, 1)])


def test_a_replay_rank_takes_no_intake_and_answers_no_request_while_the_limiter_says_no():
    rank, learner, actor = service(2.0)  # M = E = 8: insert while 2 * inserted - sampled <= 16
    learner.request_sample(0)
    send(rank, actor, 20)
    while rank.work():
        pass
    # After 4 inserts the first request is answered; without another, 10 + 2 more make 20 owed.
    assert (rank.limiter.inserted, rank.limiter.sampled) == (12, 4)
    learner.progress(), rank.port.progress()
    assert learner.poll_sample() is not None and learner.poll_sample() is None
    rank.port.progress()
    for _ in range(4):
        learner.request_sample(0)
    while rank.work():
        pass
    assert (rank.limiter.inserted, rank.limiter.sampled) == (20, 20)


def test_a_request_before_the_minimum_size_waits_and_is_then_answered():
    rank, learner, actor = service(0.0)
    learner.request_sample(0)
    send(rank, actor, 1)
    for _ in range(5):
        rank.work()
    learner.progress()
    assert learner.poll_sample() is None and "2 transitions stored" in rank.waiting_for()
    send(rank, actor, 1)
    for _ in range(5):
        rank.work()
    learner.progress()
    assert learner.poll_sample() is not None
