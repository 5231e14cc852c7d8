"""Replay: what goes in comes out, byte for byte and as often as its mass says, and under no other key."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from intake_oracle import RESETS, Player, Transition, make_config, stacking_envs
from numbered_replay import Numbered, mass, update
from scipy import stats

from apex.config import EnvConfig
from apex.envs import make_envs
from apex.schema import aligned_bytes, sample_layout
from replay_rank.replay import Replay

pytestmark = pytest.mark.usefixtures("one_torch_thread")

INDEXES = ["wide", "binary", "numpy", "torch"]
BAD = [math.nan, math.inf, -math.inf, -1.0, -1e-45]


# --- from the environment through the ring ------------------------------------------------------


def read_back(replay, spec):
    """Return every stored transition by its number, gathered as a sample is, with its mass."""
    slots = np.array([p * replay.batch + r for p, count in enumerate(replay.count) for r in range(count)])
    layout = sample_layout(spec, len(slots))
    out = layout.views(aligned_bytes(layout.nbytes))
    replay.store.gather(slots, out)
    columns = (out[name].tolist() for name in ("action", "reward", "discount", "param_version"))
    rows = zip(out["obs"], out["next_obs"], replay.index.get(slots), *columns)
    return {
        number: Transition(obs.tobytes(), number, *told, then.tobytes(), leaf)
        for obs, then, leaf, number, *told in rows
    }


def check_ring(config, envs, steps):
    """Play through a ring; what it holds must be the last batches, each transition as the environment gave
    it.

    Return how often the ring was filled, the transitions seen in it and those made.
    """
    player, replay = (
        Player(config, envs),
        Replay(config, replace(envs.spec, num_actions=2**31 - 1), np.random.default_rng(0)),
    )
    held, counts = [], []
    for message in player.play(steps):
        replay.landing()[: len(message)] = message
        counts.append(replay.insert(len(message)))
        held.append(read_back(replay, envs.spec))
        assert (
            len(held[-1])
            == replay.size
            == sum(counts[-config.replay.capacity // config.actor.intake_batch :])
        )
    expected = {t.number: t for row in range(envs.num_envs) for t in player.expected(row)}
    for number, found in itertools.chain.from_iterable(found.items() for found in held):
        assert found[:-1] == expected[number][:-1]
        assert math.isclose(found.priority, mass(expected[number].priority), rel_tol=1e-14)
    envs.close()
    return (
        len(counts) * config.actor.intake_batch / config.replay.capacity,
        len(set().union(*held)),
        len(expected),
    )


@pytest.mark.parametrize("flavour", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize(
    "batch, n, stack", [(1, 1, 4), (1, 5, 4), (3, 3, 1), (3, 3, 4), (7, 5, 4), (50, 3, 4)]
)
def test_the_ring_holds_the_newest_batches_as_the_environment_gave_them(flavour, batch, n, stack):
    config = make_config(2, batch, n, capacity=3 * batch)
    turns, seen, made = check_ring(
        config, stacking_envs(flavour, 2, stack, "other"), 250 if batch == 50 else 60
    )
    assert turns > 2 and made - 2 * batch < seen <= made


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_streams_survive_the_ring(data):
    batch, envs = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    config = make_config(
        envs, batch, data.draw(st.integers(1, 5)), capacity=batch * data.draw(st.integers(1, 4))
    )
    lengths = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    flavour, stack = (
        data.draw(st.sampled_from(["next_step", "same_step", "disabled"])),
        data.draw(st.sampled_from([1, 2, 4])),
    )
    check_ring(config, stacking_envs(flavour, envs, stack, data.draw(st.sampled_from(RESETS)), lengths), 40)


def test_pong_stacks_survive_the_ring_byte_for_byte():
    env = EnvConfig(family="atari", id="pong", frame_size=42, max_episode_frames=150)
    turns, seen, made = check_ring(make_config(2, 25, 3, capacity=100), make_envs(env, 2, seed=1), 300)
    assert turns > 3 and made - 50 < seen


# --- what is drawn ---------------------------------------------------------------------------------


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("capacity, batch", [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 2), (5, 1), (8, 4)])
def test_a_small_replay_holds_and_draws_the_newest_and_no_others(capacity, batch, index):
    replay = Numbered(capacity, batch, index=index)
    for _ in range(3 * capacity // batch):
        newest = replay.put(np.ones(batch))[-1]
        expected = set(range(max(0, newest - capacity + 1), newest + 1))
        assert set(replay.draw(100 * capacity)[1]) == expected and replay.size == len(expected)
        assert len(replay.draw(1)[1]) == 1


@pytest.mark.parametrize("index", INDEXES)
def test_a_million_draws_follow_the_exact_probabilities(index):
    rng = np.random.default_rng(1)
    priority = rng.exponential(size=40).astype(np.float32)
    replay = Numbered(40, 8, index=index, seed=2)
    for part in priority.reshape(5, 8):
        replay.put(part)
    counts = np.zeros(40)
    for _ in range(1000):
        counts += np.bincount(replay.draw(1000)[1], minlength=40)
    expected = mass(priority) / mass(priority).sum()
    assert stats.chisquare(counts, 1e6 * expected).pvalue > 1e-3
    assert replay.sampled == 1_000_000


@pytest.mark.parametrize("index", INDEXES)
def test_each_stratum_is_drawn_once_and_uniformly(index):
    """Draw i falls on a transition as often as the two overlap in the total mass."""
    priority = np.array([0.1, 2.0, 0.4, 1.0, 0.0, 3.0, 0.7], np.float32)
    replay = Numbered(7, 7, index=index, alpha=1.0, eps=0.01, seed=3)
    replay.put(priority)
    draws = np.array([replay.draw(4)[1] for _ in range(3000)])
    edges = np.append(0, np.cumsum(mass(priority, 1.0, 0.01)))
    for i in range(4):
        low, high = edges[-1] * i / 4, edges[-1] * (i + 1) / 4
        share = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0, None) / (high - low)
        counts, inside = np.bincount(draws[:, i], minlength=7), share > 1e-12
        assert not counts[~inside].any()
        assert inside.sum() == 1 or stats.chisquare(counts[inside], 3000 * share[inside]).pvalue > 1e-4


def test_the_binary_tree_and_its_oracle_draw_the_same_to_the_last_bit():
    one, other = (Numbered(20, 4, index=index, seed=9) for index in ("binary", "numpy"))
    rng = np.random.default_rng(5)
    for _ in range(60):
        priorities = rng.exponential(size=4)
        one.put(priorities), other.put(priorities)
        messages = [replay.draw(33)[0] for replay in (one, other)]
        assert all(messages[0][name].tobytes() == messages[1][name].tobytes() for name in messages[0])
        new = rng.exponential(size=33)
        assert update(one, messages[0]["key"], new) == update(other, messages[1]["key"], new)
    assert one.everything() == other.everything()


def test_probabilities_over_all_transitions_sum_to_one():
    replay = Numbered(6, 2)
    replay.put([0.5, 2.0]), replay.put([1.0]), replay.put([0.25, 4.0])
    out, numbers = replay.draw(2000)
    probability = dict(zip(numbers, out["probability"].tolist()))
    assert len(probability) == 5 and sum(probability.values()) == pytest.approx(1.0, abs=1e-12)


def test_the_reply_tells_size_total_and_the_minimum_of_the_filled_slots_only():
    replay = Numbered(8, 4)
    replay.put([3.0, 0.37, 5.0])
    out, _ = replay.draw(10)
    assert out["size"][0] == 3 and out["total"][0] == pytest.approx(mass([3.0, 0.37, 5.0]).sum(), rel=1e-15)
    assert out["minimum"][0] == mass(0.37)


def test_the_size_is_of_what_is_stored_where_batches_are_short():
    replay = Numbered(6, 3)
    sizes = [(replay.put(np.ones(count)), replay.size)[1] for count in (3, 1, 2, 3, 1)]
    assert sizes == [3, 4, 3, 5, 4] and replay.inserted == 10


# --- masses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [0.0, -0.0, 1e-45, 1e-20, 0.37, 1.0, 1e12, 3e38])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_a_mass_is_priority_plus_eps_to_the_alpha_exactly_once(priority, alpha):
    replay = Numbered(2, alpha=alpha)
    replay.put(priority), replay.put(5.0)
    assert replay.index.get(np.array([0]))[0] == mass(priority, alpha)
    key = replay.slots  # of slot 0 in its first generation
    for new in (2.0, priority):
        update(replay, [key], [new])
        assert replay.index.get(np.array([0]))[0] == mass(new, alpha)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_priority_is_refused_by_row_at_insert_and_at_update_and_nothing_changes(bad, index):
    replay = Numbered(6, 3, index=index)
    replay.put([1.0, 2.0, 3.0])
    keys, priorities = replay.keys(), np.array([4.0, 5.0, bad], np.float32)
    before = replay.everything()
    with pytest.raises(ValueError, match=r"intake batch of actor 7: row 2 has priority .*finite and >= 0"):
        replay.insert(replay.land(np.array([3, 4, 5]), priorities))
    with pytest.raises(ValueError, match=r"priority update: row 2 has priority .*finite and >= 0"):
        update(replay, [keys[0], keys[1], keys[2]], priorities)
    assert replay.everything() == before
    replay.check()
    assert set(replay.draw(100)[1]) == {0, 1, 2}


def test_of_a_key_given_twice_the_last_priority_stays():
    replay = Numbered(4)
    replay.put(1.0)
    key = replay.keys()[0]
    assert update(replay, [key, key], [1.0, 9.0]) == 0
    assert replay.index.total == replay.index.minimum == mass(9.0)


# --- keys ------------------------------------------------------------------------------------------


def test_a_late_update_never_lands_on_the_transition_that_took_the_place():
    replay = Numbered(4)
    for _ in range(4):
        replay.put(1.0)
    old = replay.keys()
    for _ in range(4):
        replay.put(1.0)
    before = replay.index.get(np.arange(replay.slots)).tobytes()
    assert update(replay, list(old.values()), [100.0] * 4) == 4 == replay.stale_updates
    assert replay.index.get(np.arange(replay.slots)).tobytes() == before


def test_of_a_mixed_update_only_the_live_keys_change():
    replay = Numbered(3)
    replay.put(1.0), replay.put(1.0)
    old = replay.keys()
    replay.put(1.0), replay.put(1.0)
    new = replay.keys()
    assert set(new) == {1, 2, 3}
    assert update(replay, [old[0], new[1], old[0]], [50.0, 7.0, 50.0]) == 2
    assert replay.index.total == pytest.approx(mass(7.0) + 2 * mass(1.0), rel=1e-15)


def test_a_place_loses_its_mass_and_its_keys_before_anything_is_received_into_it():
    replay = Numbered(2)
    replay.put(1.0), replay.put(1.0)
    old = replay.keys()
    replay.put(1.0)  # the next batch will land where number 0 was
    assert set(replay.keys()) == {1, 2}
    replay.landing()[:] = 0xFF
    assert update(replay, [old[0]], [9.0]) == 1
    assert set(replay.draw(200)[1]) == {1, 2}


def test_a_key_is_never_used_twice_and_names_its_slot():
    replay, keys = Numbered(4, 2), {}
    for _ in range(20):
        replay.put([1.0, 1.0])
        keys.update(replay.keys())
    assert len(keys) == len(set(keys.values())) == 40
    assert all(key % replay.slots == number % replay.slots for number, key in keys.items())


# From the key of slot 0 of 12, in its first generation.
NEVER_GIVEN_OUT = {"negative": -13, "next generation": 12, "huge": 2**62, "generation 0": -12}
NEVER_GIVEN_OUT |= {"row not filled": 2, "landing place": 3, "place never filled": -5}


@pytest.mark.parametrize("offset", NEVER_GIVEN_OUT.values(), ids=NEVER_GIVEN_OUT)
def test_a_key_that_was_never_given_out_is_refused_and_nothing_changes(offset):
    replay = Numbered(9, 3)  # 12 slots
    replay.put([1.0, 1.0])  # place 0; the next lands in place 1
    live, before = replay.slots, replay.everything()
    with pytest.raises(ValueError, match=f"row 1 has key {live + offset}, which was never given out"):
        update(replay, [live, live + offset], [2.0, 2.0])
    assert replay.everything() == before


@pytest.mark.parametrize("wrong", ["no transitions", "too many", "frames", "length", "pointer"])
def test_a_batch_that_lies_about_itself_is_refused_and_nothing_changes(wrong):
    replay = Numbered(6, 3)
    before = replay.everything()
    nbytes = replay.land(np.arange(3), np.ones(3, np.float32))
    views = replay.store.layout.views(replay.landing())
    if wrong == "pointer":
        views["next_obs_frames"][2] = 4
    elif wrong == "length":
        nbytes += 4
    else:
        views["header"][:2] = {"no transitions": (0, 4), "too many": (4, 4), "frames": (3, 1000)}[wrong]
    with pytest.raises(ValueError, match="intake batch of actor 7"):
        replay.insert(nbytes)
    assert replay.everything() == before


# --- random operations against a dictionary ------------------------------------------------------

priorities = st.one_of(st.sampled_from([0.0, -0.0, 1e-45, 1.0]), st.floats(0.0, 1e6, width=32))


class ReplayMachine(RuleBasedStateMachine):
    """A replay against a dictionary of masses by number; keys are known only as samples tell them."""

    @initialize(batch=st.integers(1, 4), batches=st.integers(1, 4), index=st.sampled_from(INDEXES))
    def start(self, batch, batches, index):
        self.replay, self.batch, self.batches = Numbered(batch * batches, batch, index), batch, batches
        self.mass, self.order, self.key, self.stale = {}, [], {}, 0

    @rule(rows=st.lists(priorities, min_size=1, max_size=4))
    def insert(self, rows):
        rows = rows[: self.batch]
        self.order.append(self.replay.put(rows))
        self.mass.update(zip(self.order[-1], mass(rows).tolist()))
        for number in itertools.chain(*self.order[: -self.batches]):
            self.mass.pop(number, None)

    @rule()
    def sample(self):
        if not self.mass:
            return
        out, numbers = self.replay.draw(40)
        for number, key, probability in zip(numbers, out["key"].tolist(), out["probability"].tolist()):
            assert self.key.setdefault(number, key) == key
            assert probability == self.mass[number] / out["total"][0]
        assert len(set(self.key.values())) == len(self.key), "a key was used twice"

    @rule(
        rows=st.lists(st.tuples(st.integers(0, 10**6), priorities), max_size=12),
        bad=st.sampled_from([None, None, *BAD]),
    )
    def update(self, rows, bad):
        known = list(self.key)
        rows = [(known[i % len(known)], p) for i, p in rows] if known else []
        if bad is not None and rows:
            return self.refuse([*rows, (rows[0][0], bad)])
        stale = update(self.replay, [self.key[number] for number, _ in rows], [p for _, p in rows])
        live = [(number, p) for number, p in rows if number in self.mass]
        self.mass.update((number, float(mass(p))) for number, p in live)
        self.stale += len(rows) - len(live)
        assert stale == len(rows) - len(live)

    def refuse(self, rows):
        before = self.replay.everything()
        with pytest.raises(ValueError, match=f"row {len(rows) - 1} has priority"):
            update(self.replay, [self.key[number] for number, _ in rows], [p for _, p in rows])
        assert self.replay.everything() == before

    @invariant()
    def agrees_with_the_dictionary(self):
        self.replay.check()
        assert self.replay.size == len(self.mass) and self.replay.stale_updates == self.stale
        assert self.replay.index.total == pytest.approx(sum(self.mass.values()), rel=1e-12)
        assert self.replay.index.minimum == min(self.mass.values(), default=math.inf)


def test_random_operations_agree_with_a_dictionary():
    run_state_machine_as_test(
        ReplayMachine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None)
    )
