"""Intake batches and priority updates that something has happened to.

A replay rank takes the good ones whole and nothing of the others.
"""

import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mutations import EDGES, flip_bits, mutate, overwrite, resize

from apex.config import from_tables
from apex.schema import EnvSpec, aligned_bytes, intake_layout, intake_nbytes, limits, sample_layout
from apex.topology import Topology
from apex.transport.wire import Kind
from launch.run.local import make_ports
from replay_rank.replay import Replay
from replay_rank.service import ReplayService

SPECS = {"float32 vectors": EnvSpec((3,), "float32", 2, 4), "uint8 images": EnvSpec((5, 5), "uint8", 4, 3)}
INTAKE, UPDATES, HYPOTHESIS = 12_000, 12_000, 300
BATCH, N_STEP = 8, 2


def config(index="wide"):
    tables = {
        "replay": {"capacity": 8 * BATCH, "min_size": BATCH, "index": index, "samples_per_insert": 0.0},
        "actor": {"intake_batch": BATCH}, "algorithm": {"n_step": N_STEP},
        "learner": {"batch_size": 16, "prefetch": 2},
    }  # fmt: skip
    return from_tables([("test", tables)])


def good_batch(rng: np.random.Generator, spec: EnvSpec) -> bytes:
    """Return an intake batch as an actor might send it."""
    layout = intake_layout(spec, BATCH, N_STEP)
    message = aligned_bytes(layout.nbytes)
    views, count = layout.views(message), int(rng.integers(1, BATCH + 1))
    frames = int(rng.integers(1, layout.fields["frames"].shape[0] + 1))
    views["header"][:] = count, frames, 0, 0
    views["frames"][:frames] = rng.integers(0, 200, (frames, *spec.frame_shape))
    for name in ("obs_frames", "next_obs_frames"):
        views[name][:count] = rng.integers(-1, frames, (count, spec.stack))
    views["action"][:count] = rng.integers(0, spec.num_actions, count)
    for name in ("reward", "discount", "priority"):
        views[name][:count] = rng.random(count)
    return message[: intake_nbytes(layout, spec, frames)].tobytes()


def fuzzed_batch(rng: random.Random, good: bytes, spec: EnvSpec) -> bytes:
    """Return a batch after something has happened to it, mostly to its fields in front of the frames."""
    front = intake_layout(spec, BATCH, N_STEP).fields["frames"].offset
    how = rng.random()
    if how < 0.3:
        return mutate(rng, good)
    if how < 0.5:
        return resize(rng, good)
    if how < 0.6:  # the header alone
        return b"".join(struct.pack("<q", rng.choice([*EDGES, 2, 3, 8, 9])) for _ in range(2)) + good[16:]
    change = rng.choice([flip_bits, lambda r, d: overwrite(r, d, 4), lambda r, d: overwrite(r, d, 8)])
    return change(rng, good[:front]) + good[front:]


def is_good(message: bytes, spec: EnvSpec) -> bool:
    """Whether it is a batch, read with nothing but the layout's offsets, in plain Python."""
    layout = intake_layout(spec, BATCH, N_STEP)
    if len(message) < layout.fields["frames"].offset:
        return False
    count, frames, _, _ = struct.unpack_from("<4q", message, layout.fields["header"].offset)
    most = layout.fields["frames"].shape[0]
    if not (
        1 <= count <= BATCH
        and 0 <= frames <= most
        and len(message) == layout.fields["frames"].offset + frames * spec.frame_nbytes
    ):
        return False
    read = {
        name: struct.unpack_from(f"<{n}{code}", message, layout.fields[name].offset)
        for name, code, n in (
            ("obs_frames", "h", count * spec.stack),
            ("next_obs_frames", "h", count * spec.stack),
            ("action", "i", count),
            ("reward", "f", count),
            ("discount", "f", count),
            ("priority", "f", count),
        )
    }
    inside = all(
        -1 <= pointer < frames for name in ("obs_frames", "next_obs_frames") for pointer in read[name]
    )
    actions = all(0 <= action < spec.num_actions for action in read["action"])
    numbers = [*read["reward"], *read["discount"]]
    if spec.frame_dtype == "float32":
        numbers += np.frombuffer(message, np.float32, offset=layout.fields["frames"].offset).tolist()
    finite = all(abs(number) < float("inf") for number in [*numbers, *read["priority"]])
    return inside and actions and finite and all(priority >= 0 for priority in read["priority"])


class Rank:
    """A real replay service in a world of one process, with its inputs put into its mailbox."""

    def __init__(self, spec: EnvSpec, index="wide"):
        self.config, self.spec = config(index), spec
        self.ports = make_ports(Topology(4, 1), limits(self.config, spec))
        self.service = ReplayService(self.config, spec, self.ports[1], 0)
        self.replay: Replay = self.service.replay
        self.layout = sample_layout(spec, self.config.learner.batch_size)

    @property
    def refused(self) -> int:
        return self.ports[1].refused

    def send(self, message: bytes) -> bool:
        """Have it take an intake batch; return whether it was refused."""
        before = self.refused
        self.ports[3].send_intake(0, np.frombuffer(message[: len(self.replay.landing())], np.uint8))
        self.service.step(), self.ports[3].progress()
        assert self.ports[3].completed_intake() == [0], "its sender waits for it"
        return self.refused > before

    def update(self, message: bytes) -> bool:
        """Have it take a priority message; return whether it was refused."""
        before = self.refused
        self.ports[0].wire.send(1, Kind.PRIORITY, np.frombuffer(message, np.uint8))
        self.service.step()
        return self.refused > before

    def state(self) -> bytes:
        """Return all that must not change when something is refused."""
        r = self.replay
        numbers = np.array(
            [r.index.total, r.index.minimum, r.size, r.inserted, r.stale_updates, r.landing_place]
        )
        stored = np.concatenate(
            [r.store.buffer[place] for place in np.flatnonzero(r.count)] or [np.zeros(0, np.uint8)]
        )
        return b"".join(
            a.tobytes() for a in (r.index.get(np.arange(r.slots)), numbers, r.generation, r.count, stored)
        )

    def check(self) -> None:
        """Draw a batch by request; all of it must be stored transitions, none empty, each as it was sent."""
        self.replay.check()
        if self.replay.size < BATCH:
            return
        self.ports[0].request_sample(0)
        self.service.step(), self.ports[0].progress()
        _, message = self.ports[0].poll_sample()
        views, r = self.layout.views(message), self.replay
        generation, slot = np.divmod(views["key"], r.slots)
        place, row = np.divmod(slot, BATCH)
        assert (generation == r.generation[place]).all() and (row < r.count[place]).all()
        assert ((views["probability"] > 0) & (views["probability"] <= 1)).all()
        assert ((views["action"] >= 0) & (views["action"] < self.spec.num_actions)).all()
        held = r.store.views
        for i, (p, q) in enumerate(zip(place, row)):
            for name, stack in (("obs_frames", views["obs"][i]), ("next_obs_frames", views["next_obs"][i])):
                frames = [
                    held["frames"][p, at] if at >= 0 else np.zeros_like(held["frames"][p, 0])
                    for at in held[name][p, q]
                ]
                assert np.array_equal(stack, np.stack(frames)), "a frame that is not the transition's"


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("index", ["wide", "numpy"])
def test_an_intake_batch_is_taken_if_it_is_good_and_else_nothing_changes(spec, index, tried):
    tried.least = INTAKE
    rng, nprng, rank = random.Random(1), np.random.default_rng(1), Rank(spec, index)
    good = [good_batch(nprng, spec) for _ in range(50)]
    accepted = 0
    for number in range(INTAKE):
        message, before = fuzzed_batch(rng, rng.choice(good), spec), rank.state()
        message = message[
            : rank.replay.store.layout.nbytes
        ]  # a longer one has no place to land: the ports refuse it
        refused, fine = rank.send(message), is_good(message, spec)
        assert refused != fine, number
        assert (rank.state() == before) == refused, number
        accepted += fine
        tried()
        if number % 20 == 0:
            rank.check()
    assert INTAKE / 100 < accepted < INTAKE / 2
    assert rank.replay.size > 0 and not rank.send(good[0])
    rank.check()


def fuzzed_update(rng: random.Random, replay: Replay, size: int) -> bytes:
    """Return a priority message.

    Of keys that were given out, some of them long ago, and what happens to such.
    """
    live = np.flatnonzero(replay.count)
    place = np.array(rng.choices(live.tolist(), k=size))
    row = np.array([rng.randrange(int(replay.count[p])) for p in place])
    generation = replay.generation[place] - np.array([rng.choice([0, 0, 0, 1]) for _ in place])
    keys = np.maximum(generation, 1) * replay.slots + place * BATCH + row
    message = keys.astype(np.int64).tobytes() + np.array([rng.random() for _ in place], np.float32).tobytes()
    return (
        message
        if rng.random() < 0.2
        else rng.choice([mutate, overwrite, lambda r, d: overwrite(r, d, 4)])(rng, message)
    )


def update_is_good(message: bytes, replay: Replay, size: int) -> bool:
    """Whether every key was given out once, and every priority is a finite number that is not negative."""
    if len(message) != 12 * size:
        return False
    keys, priorities = (
        struct.unpack_from(f"<{size}q", message),
        struct.unpack_from(f"<{size}f", message, 8 * size),
    )
    for key in keys:
        generation, slot = divmod(key, replay.slots)
        now, count = int(replay.generation[slot // BATCH]), int(replay.count[slot // BATCH])
        if not (1 <= generation < now or (generation == now and slot % BATCH < count)):
            return False
    return all(0 <= priority < float("inf") for priority in priorities)


@pytest.mark.parametrize("index", ["wide", "binary", "rank"])
def test_a_priority_update_is_taken_if_all_of_it_is_good_and_else_nothing_changes(index, tried):
    tried.least = UPDATES
    spec = SPECS["float32 vectors"]
    rng, nprng, rank = random.Random(2), np.random.default_rng(2), Rank(spec, index)
    size = rank.config.learner.batch_size
    accepted = 0
    for number in range(UPDATES):
        if number % 10 == 0:
            assert not rank.send(good_batch(nprng, spec))
        message, before = fuzzed_update(rng, rank.replay, size), rank.state()
        fine = update_is_good(message, rank.replay, size)
        assert rank.update(message) != fine, number
        assert fine or rank.state() == before, number
        accepted += fine
        tried()
        if number % 20 == 0:
            rank.check()
    assert UPDATES / 20 < accepted < UPDATES * 0.9


@settings(max_examples=HYPOTHESIS, deadline=None)
@given(data=st.data())
def test_columns_of_any_numbers_leave_a_replay_rank_whole(data):
    spec = SPECS["float32 vectors"]
    layout, rank = intake_layout(spec, BATCH, N_STEP), Rank(spec)
    for _ in range(3):
        message = aligned_bytes(layout.nbytes)
        message[:] = np.frombuffer(
            good_batch(np.random.default_rng(3), spec).ljust(layout.nbytes, b"\0"), np.uint8
        )
        views = layout.views(message)
        name = data.draw(st.sampled_from(sorted(layout.fields)))
        field = layout.fields[name]
        views[name][...] = data.draw(arrays.arrays(field.dtype, field.shape))
        fits = intake_nbytes(layout, spec, max(0, min(int(views["header"][1]), 9)))
        sent = message[: data.draw(st.sampled_from([layout.nbytes, fits]))].tobytes()
        assert rank.send(sent) != is_good(sent, spec)
    rank.check()
