"""Garbage over real sockets of ZeroMQ, by ranks that are known, which is worse than by strangers.

Refused, counted, and survived.

A known rank's socket sends; how the receiver takes each message is foretold by ``zmq_oracle``. All of it in
order, so the count of refusals is exact.
"""

import json
import random

import numpy as np
import pytest
from mutations import EDGES, header, mutate_frames
from zmq_goes_on import WEIGHTS, goes_on, heard_all, polled, settle
from zmq_oracle import (
    ACTOR,
    EVALUATOR,
    LEARNER,
    LIMITS,
    REPLAY,
    TOPOLOGY,
    actor_takes_of_learner,
    asks_for_acknowledgement,
    learner_takes,
    parsed,
    replay_takes_of_actor,
    replay_takes_of_learner,
    report,
)

from apex.ports import LOST, REPLACED, IntakeEvent, PriorityEvent, SampleRequestEvent
from apex.refusals import KINDS
from apex.schema import aligned_bytes
from apex.transport import zmq_world
from apex.transport.wire import Kind

INPUTS = 16_000
LAST = 2**60 + 77  # number of a mark
HELLO, WELCOME, TAKEN = 101, 102, 103  # what ranks over ZeroMQ say to each other beside the table of ``wire``
ROUND = 50  # messages sent before they are read; fewer than a socket takes in unread


def control(**message) -> list[bytes]:
    """Return a control message."""
    return [header(Kind.CONTROL), json.dumps(message).encode()]


def rounds(rng, make, takes, tried, inputs=INPUTS):
    """Yield lists of messages with what each is to be taken for: mutations of what ``make()`` returns."""
    for _ in range(inputs // ROUND):
        messages = [mutate_frames(rng, make()) for _ in range(ROUND)]
        tried(len(messages))
        yield [(frames, takes(frames)) for frames in messages]


# --- to the learner ---------------------------------------------------------------------------------


def to_learner(rng, rank):
    good = [
        [header(Kind.WEIGHT_REQUEST), rng.randrange(100).to_bytes(8, "little")], control(kind="stop request"),
        control(kind="finished"),
        control(kind="report", values=np.frombuffer(report(rank)).tolist()),
        control(kind="checkpoint written", number=1, error=0, state={"counters": {"x": 1.5}}),
        [header(Kind.SAMPLE), bytes(LIMITS.sample_nbytes)], [header(Kind.SAMPLE)], [header(HELLO)],
        control(kind="report", values=[1]),
    ]  # fmt: skip
    return lambda: rng.choice(good)


@pytest.mark.parametrize("rank", [REPLAY, EVALUATOR, ACTOR], ids=TOPOLOGY.name)
def test_a_learner_takes_what_is_good_and_counts_the_rest(ranks, tried, rank, capfd):
    tried.least = INPUTS
    rng, learner, sender = random.Random(rank), ranks[LEARNER], ranks[rank].wire._links[LEARNER].socket
    for batch in rounds(rng, to_learner(rng, rank), lambda frames: learner_takes(frames, rank), tried):
        before = learner.refused
        for frames, _ in batch:
            sender.send_multipart(frames)
        sender.send_multipart(control(kind="checkpoint written", number=LAST, error=0, state={}))
        answers = []
        settle(
            lambda answers=answers: (learner.progress(), answers.extend(learner.poll_acks())),
            lambda answers=answers: bool(answers) and answers[-1].ack.number == LAST,
        )
        taken = [what for _, what in batch]
        assert learner.refused - before == taken.count(None)
        assert len(answers) - 1 == taken.count("acknowledgement") and len(
            learner.poll_reports()
        ) == taken.count("report")
        assert (
            not learner._requests
            and learner._unfinished == {1, 2, 3}
            and set(learner._weights.requests) <= {EVALUATOR, ACTOR}
        )
    assert 1 <= capfd.readouterr().err.count("apex: learner (rank 0) refused") <= len(KINDS), (
        "the first of each kind"
    )
    goes_on(ranks)


def test_a_learner_greets_only_ranks_that_have_joined_and_none_in_the_place_of_replay(
    ranks,
):
    learner, link = ranks[LEARNER], ranks[ACTOR].wire._links[LEARNER]
    learner.wire.survives = True
    learner.wire._may_lose = learner.wire._hub.may_lose = frozenset({EVALUATOR, ACTOR})
    link.send(HELLO)
    for rank, process in (
        (REPLAY, ["host", 1, 1]),
        (ACTOR, ["host", "1", 1]),
        (ACTOR, ["host", 1]),
        (ACTOR, 3),
    ):
        ranks.worlds[rank]._box.send(zmq_world._JOIN, 0, zmq_world._encoded(process))
    settle(learner.progress, lambda: heard_all(learner, 0, 5))
    assert learner.poll_changes() == []
    ranks.worlds[ACTOR]._box.send(zmq_world._JOIN, 0, zmq_world._encoded(["host", 1, 1]))
    settle(learner.progress, lambda: [change.what for change in learner._changes] == [LOST])
    link.send(HELLO)
    link.send(HELLO)
    settle(learner.progress, lambda: heard_all(learner, 0, 6))
    learner.progress()  # acts on what the last turn has found
    assert [change.what for change in learner.poll_changes()] == [LOST, REPLACED]


def test_a_refusal_of_a_sample_before_the_end_of_the_run_answers_no_request(ranks):
    learner, replay = ranks[LEARNER], ranks[REPLAY]
    learner.request_sample(0)
    for _ in range(LIMITS.prefetch):
        replay.wire._links[LEARNER].send(Kind.SAMPLE)
    settle(learner.progress, lambda: heard_all(learner, 0, LIMITS.prefetch))
    replay.wire._links[LEARNER].send(Kind.SAMPLE, 0, np.full(LIMITS.sample_nbytes, 9, np.uint8))
    settle(learner.progress, lambda: learner.poll_sample() is not None)


# --- to a replay rank -------------------------------------------------------------------------------


def test_a_replay_rank_takes_intake_that_fits_and_counts_the_rest(ranks, tried):
    tried.least = INPUTS
    rng, replay, sender = random.Random(1), ranks[REPLAY], ranks[ACTOR].wire._links[REPLAY].socket
    landing = aligned_bytes(LIMITS.intake_nbytes + 64)
    landing[LIMITS.intake_nbytes :] = 0x5A
    good = [
        [header(Kind.INTAKE, 5), rng.randbytes(n)]
        for n in (0, 1, 100, LIMITS.intake_nbytes, LIMITS.intake_nbytes + 1)
    ]
    for batch in rounds(rng, lambda: rng.choice(good), replay_takes_of_actor, tried):
        before, expected, got = replay.refused, [frames[1] for frames, what in batch if what], []
        for frames, _ in batch:
            sender.send_multipart(frames)

        bad = len(batch) - len(expected)
        settle(
            lambda got=got: take_intake(replay, landing, got),
            lambda got=got, good=expected, bad=bad, before=before: (
                len(got) == len(good) and heard_all(replay, before, bad)
            ),
        )
        assert got == expected
        told = len(got) + sum(asks_for_acknowledgement(frames) for frames, _ in batch)
        before = ranks[ACTOR].refused
        settle(
            ranks[ACTOR].progress, lambda before=before, told=told: heard_all(ranks[ACTOR], before, told)
        )  # it had sent none
    assert (landing[LIMITS.intake_nbytes :] == 0x5A).all(), "written beyond the place that intake lands in"
    assert (ranks[ACTOR].wire.open_sends(), ranks[ACTOR]._credits.in_flight) == ([], [0])
    goes_on(ranks)


def take_intake(replay, landing: np.ndarray, got: list[bytes]) -> None:
    replay.progress()
    event = replay.poll(landing[: LIMITS.intake_nbytes])
    if isinstance(event, IntakeEvent):
        got.append(landing[: event.nbytes].tobytes())


def test_a_replay_rank_takes_what_the_learner_may_send_and_counts_the_rest(ranks, tried):
    tried.least = INPUTS
    rng, replay, hub = random.Random(2), ranks[REPLAY], ranks[LEARNER].wire._hub
    good = [
        [header(Kind.SAMPLE_REQUEST)], [header(Kind.PRIORITY), rng.randbytes(LIMITS.priority_nbytes)],
        control(kind="done"),
        control(kind="checkpoint", number=3, learner_steps=9, base=2), [header(TAKEN)], [header(WELCOME)],
        control(kind="report", values=[]),
    ]  # fmt: skip
    for batch in rounds(rng, lambda: rng.choice(good), replay_takes_of_learner, tried):
        for frames, what in batch:
            if what == "stop":  # good, and the end of this test
                continue
            before, events = replay.refused, []
            hub.socket.send_multipart([hub.name_of(REPLAY), *frames])
            settle(
                lambda events=events: (replay.progress(), polled(events, lambda: replay.poll(None))),
                lambda before=before, events=events: (
                    events or replay._request is not None or replay.refused > before
                ),
            )
            kind = (
                {SampleRequestEvent: "sample request", PriorityEvent: "priorities"}.get(type(events[0]))
                if events
                else None
            )
            kind = kind or (replay.poll_request() is not None and "request") or None
            assert (kind, replay.refused - before) == (what, what is None), frames
            if kind == "sample request":
                replay.refuse_sample()
        assert not replay.stopping and not replay.finished
    ask_for_too_many(ranks)
    goes_on(ranks)


def ask_for_too_many(ranks) -> None:
    """A learner that asks for more samples than it may have in flight.

    The rest is refused, and does not pile up.
    """
    replay, hub = ranks[REPLAY], ranks[LEARNER].wire._hub
    before = replay.refused
    for _ in range(1000):
        hub.send(REPLAY, Kind.SAMPLE_REQUEST)
    asked = []
    settle(
        lambda: (replay.progress(), polled(asked, lambda: replay.poll(None))),
        lambda: heard_all(replay, before, 1000 - LIMITS.prefetch),
    )
    assert len(asked) == LIMITS.prefetch
    for _ in asked:
        replay.refuse_sample()


# --- to an actor ------------------------------------------------------------------------------------


def test_an_actor_takes_the_weights_that_it_waits_for_and_counts_the_rest(ranks, tried):
    tried.least = INPUTS
    rng, actor, hub = random.Random(3), ranks[ACTOR], ranks[LEARNER].wire._hub
    into = aligned_bytes(WEIGHTS + 64)
    into[WEIGHTS:] = 0x5A
    good = [
        [header(Kind.WEIGHTS), rng.randbytes(WEIGHTS)], [header(Kind.WEIGHTS), rng.randbytes(WEIGHTS - 1)],
        [header(Kind.WEIGHTS)],
        control(kind="checkpoint", number=3, learner_steps=9, base=2), control(kind="done"), [header(TAKEN)],
    ]  # fmt: skip
    actor.request_weights(0, into[:WEIGHTS])
    for batch in rounds(rng, lambda: rng.choice(good), lambda frames: None, tried):
        for frames, _ in batch:
            what = actor_takes_of_learner(frames, WEIGHTS)
            if what == "stop":
                continue
            before, seen = actor.refused, []
            hub.socket.send_multipart([hub.name_of(ACTOR), *frames])
            settle(
                lambda seen=seen: (actor.progress(), polled(seen, actor.poll_weights)),
                lambda before=before, seen=seen: (
                    seen or actor._request is not None or actor.refused > before or not actor._is_waiting
                ),
            )
            kind = "weights" if seen else "no weights" if not actor._is_waiting else None
            kind = kind or ("request" if actor.poll_request() is not None else None)
            assert (kind, actor.refused - before) == (what, what is None), frames
            if kind == "weights":
                assert into[:WEIGHTS].tobytes() == frames[1]
            actor.request_weights(0, into[:WEIGHTS])  # no more than before where one is open
        assert not actor.stopping and not actor.finished
    assert (into[WEIGHTS:] == 0x5A).all(), "written beyond the place that weights go to"
    hub.socket.send_multipart([hub.name_of(ACTOR), header(Kind.WEIGHTS), bytes(WEIGHTS)])
    settle(actor.progress, actor.poll_weights)
    goes_on(ranks)


def test_an_actor_gets_back_only_batches_that_are_on_their_way(ranks, tried):
    tried.least = INPUTS
    rng, actor, hub = random.Random(4), ranks[ACTOR], ranks[REPLAY].wire._hub
    for number in range(INPUTS // ROUND):
        actor.send_intake(11, np.zeros(10, np.uint8)), actor.send_intake(12, np.zeros(10, np.uint8))
        numbers, before, refused = (
            {2 * number + 1: 11, 2 * number + 2: 12},
            actor.refused,
            0,
        )  # as the wire counts what it sends
        for _ in range(ROUND):
            near = rng.choice([*numbers, *EDGES]) if rng.random() < 0.1 else rng.choice(EDGES)
            frames = mutate_frames(rng, [header(TAKEN, near)])
            kind, arg, nbytes = parsed(frames) or (None, None, None)
            taken = kind == TAKEN and nbytes is None and numbers.pop(arg, None)
            refused += not taken
            hub.socket.send_multipart([hub.name_of(ACTOR), *frames])
        tried(ROUND)
        settle(actor.progress, lambda before=before, refused=refused: heard_all(actor, before, refused))
        for left in list(numbers):
            hub.send(ACTOR, TAKEN, left)
        done = []
        settle(
            lambda done=done: (actor.progress(), done.extend(actor.completed_intake())),
            lambda done=done: len(done) == 2,
        )
        assert sorted(done) == [11, 12] and actor._credits.in_flight == [0]
    drain(ranks)
    goes_on(ranks)


def drain(ranks) -> None:
    """Have the replay rank take the batches that were only sent to use credits, and the actor refuse the
    answers: they came before.
    """
    taken, actor, before = [], ranks[ACTOR], ranks[ACTOR].refused
    landing = aligned_bytes(LIMITS.intake_nbytes)
    replay, sent = ranks[REPLAY], 2 * (INPUTS // ROUND)
    settle(
        lambda: (replay.progress(), polled(taken, lambda: replay.poll(landing))), lambda: len(taken) == sent
    )
    settle(actor.progress, lambda: heard_all(actor, before, sent))
