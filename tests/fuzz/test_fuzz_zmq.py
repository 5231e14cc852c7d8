"""Garbage over real sockets of ZeroMQ, by ranks that are known, which is worse than by strangers: refused, counted, and survived.

A known rank's socket sends; how the receiver takes each message is foretold by ``zmq_oracle``. All of it in order, so
the count of refusals is exact.
"""

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
    learner_takes,
    replay_takes_of_actor,
    replay_takes_of_learner,
    report,
)

from apex.ports import LOST, REPLACED, WORDS, IntakeEvent, PriorityEvent, SampleRequestEvent
from apex.schema import aligned_bytes
from apex.transport import zmq_port as kinds
from apex.transport import zmq_world

INPUTS = 16_000
ROUND = 50  # messages sent before they are read; fewer than a socket takes in unread


def rounds(rng, make, takes, tried, inputs=INPUTS):
    """Yield lists of messages with what each is to be taken for: mutations of what ``make()`` returns."""
    for _ in range(inputs // ROUND):
        messages = [mutate_frames(rng, make()) for _ in range(ROUND)]
        tried(len(messages))
        yield [(frames, takes(frames)) for frames in messages]


# --- to the learner ---------------------------------------------------------------------------------


def to_learner(rng, rank):
    good = [
        [header(kinds.WEIGHT_REQUEST, rng.randrange(100))], [header(kinds.STOP_REQUEST)], [header(kinds.NO_SAMPLE)],
        [header(kinds.FINISHED)], [header(kinds.REPORT), report(rank)], [header(kinds.ANSWER), bytes(8 * WORDS)],
        [header(kinds.SAMPLE), bytes(LIMITS.sample_nbytes)], [header(kinds.HELLO)],
    ]  # fmt: skip
    return lambda: rng.choice(good)


@pytest.mark.parametrize("rank", [REPLAY, EVALUATOR, ACTOR], ids=TOPOLOGY.name)
def test_a_learner_takes_what_is_good_and_counts_the_rest(ranks, tried, rank, capfd):
    tried.least = INPUTS
    rng, learner, sender = random.Random(rank), ranks[LEARNER], ranks[rank]._links[LEARNER].socket
    for batch in rounds(rng, to_learner(rng, rank), lambda frames: learner_takes(frames, rank), tried):
        before = learner.refused
        for frames, _ in batch:
            sender.send_multipart(frames)
        sender.send_multipart([header(kinds.ANSWER), b"last one" * WORDS])
        answers = []
        settle(lambda answers=answers: (learner.progress(), answers.extend(learner.poll_answers())),
               lambda answers=answers: bool(answers) and answers[-1].words.tobytes() == b"last one" * WORDS)
        taken = [what for _, what in batch]
        assert learner.refused - before == taken.count(None)
        assert len(answers) - 1 == taken.count("answer") and len(learner.poll_reports()) == taken.count("report")
        assert not learner._requests and learner._unfinished == {1, 2, 3} and set(learner._weight_requests) <= {EVALUATOR, ACTOR}
    assert capfd.readouterr().err.count("apex: learner (rank 0) refused") == 1
    goes_on(ranks)


def test_a_learner_that_survives_losses_greets_nobody_who_has_not_joined_and_lets_nobody_join_in_the_place_of_replay(ranks):
    learner, world = ranks[LEARNER], ranks.worlds[LEARNER]
    learner.tolerate(world)
    ranks[ACTOR]._learner.send(kinds.HELLO)
    for rank, process in ((REPLAY, ["host", 1, 1]), (ACTOR, ["host", "1", 1]), (ACTOR, ["host", 1]), (ACTOR, 3)):
        ranks.worlds[rank]._box.send(zmq_world._JOIN, 0, zmq_world._encoded(process))
    settle(learner.progress, lambda: (learner.refused, world._box.refused) == (2 + 3, 3))
    assert learner.poll_changes() == []
    ranks.worlds[ACTOR]._box.send(zmq_world._JOIN, 0, zmq_world._encoded(["host", 1, 1]))
    settle(learner.progress, lambda: [change.what for change in learner._changes] == [LOST])
    ranks[ACTOR]._learner.send(kinds.HELLO)
    ranks[ACTOR]._learner.send(kinds.HELLO)
    settle(learner.progress, lambda: learner.refused == 3 + 3)
    assert [change.what for change in learner.poll_changes()] == [LOST, REPLACED]


def test_a_refusal_of_a_sample_before_the_end_of_the_run_answers_no_request(ranks):
    learner, replay = ranks[LEARNER], ranks[REPLAY]
    learner.request_sample(0)
    for _ in range(LIMITS.prefetch):
        replay._learner.send(kinds.NO_SAMPLE)
    settle(learner.progress, lambda: heard_all(learner, 0, LIMITS.prefetch))
    replay._learner.send(kinds.SAMPLE, 0, np.full(LIMITS.sample_nbytes, 9, np.uint8))
    settle(learner.progress, lambda: learner.poll_sample() is not None)


# --- to a replay rank -------------------------------------------------------------------------------


def test_a_replay_rank_takes_intake_that_fits_and_counts_the_rest(ranks, tried):
    tried.least = INPUTS
    rng, replay, sender = random.Random(1), ranks[REPLAY], ranks[ACTOR]._links[REPLAY].socket
    landing = aligned_bytes(LIMITS.intake_nbytes + 64)
    landing[LIMITS.intake_nbytes :] = 0x5A
    good = [[header(kinds.INTAKE, 5), rng.randbytes(n)] for n in (0, 1, 100, LIMITS.intake_nbytes, LIMITS.intake_nbytes + 1)]
    for batch in rounds(rng, lambda: rng.choice(good), replay_takes_of_actor, tried):
        before, expected, got = replay.refused, [frames[1] for frames, what in batch if what], []
        for frames, _ in batch:
            sender.send_multipart(frames)

        bad = len(batch) - len(expected)
        settle(
            lambda got=got: take_intake(replay, landing, got),
            lambda got=got, good=expected, bad=bad, before=before: len(got) == len(good) and heard_all(replay, before, bad),
        )
        assert got == expected
        before = ranks[ACTOR].refused
        settle(ranks[ACTOR].progress, lambda before=before, got=got: heard_all(ranks[ACTOR], before, len(got)))  # it had sent none
    assert (landing[LIMITS.intake_nbytes :] == 0x5A).all(), "written beyond the place that intake lands in"
    assert (ranks[ACTOR]._in_flight, ranks[ACTOR]._credits.in_flight) == ([type(ranks[ACTOR]._in_flight[0])()], [0])
    goes_on(ranks)


def take_intake(replay, landing: np.ndarray, got: list[bytes]) -> None:
    event = replay.poll(landing[: LIMITS.intake_nbytes])
    if isinstance(event, IntakeEvent):
        got.append(landing[: event.nbytes].tobytes())


def test_a_replay_rank_takes_what_the_learner_may_send_and_counts_the_rest(ranks, tried):
    tried.least = INPUTS
    rng, replay, hub = random.Random(2), ranks[REPLAY], ranks[LEARNER]._hub
    good = [
        [header(kinds.SAMPLE_REQUEST)], [header(kinds.PRIORITY), rng.randbytes(LIMITS.priority_nbytes)], [header(kinds.DONE)],
        [header(kinds.ANNOUNCEMENT), bytes(8 * WORDS)], [header(kinds.REPORT_TAKEN)], [header(kinds.WELCOME)],
    ]  # fmt: skip
    for batch in rounds(rng, lambda: rng.choice(good), replay_takes_of_learner, tried):
        for frames, what in batch:
            if what == "stop":  # good, and the end of this test
                continue
            before, events = replay.refused, []
            hub.socket.send_multipart([hub.name_of(REPLAY), *frames])
            settle(lambda events=events: (replay.progress(), polled(events, lambda: replay.poll(None))),
                   lambda before=before, events=events: events or replay._announcement is not None or replay.refused > before)
            kind = {SampleRequestEvent: "sample request", PriorityEvent: "priorities"}.get(type(events[0])) if events else None
            kind = kind or (replay.poll_announcement() is not None and "announcement") or None
            assert (kind, replay.refused - before) == (what, what is None), frames
            if kind == "sample request":
                replay.refuse_sample()
        assert not replay.stopping and not replay.finished
    ask_for_too_many(ranks)
    goes_on(ranks)


def ask_for_too_many(ranks) -> None:
    """A learner that asks for more samples than it may have in flight: the rest is refused, and does not pile up."""
    replay, hub = ranks[REPLAY], ranks[LEARNER]._hub
    before = replay.refused
    for _ in range(1000):
        hub.send(REPLAY, kinds.SAMPLE_REQUEST)
    settle(replay.progress, lambda: heard_all(replay, before, 1000 - LIMITS.prefetch))
    while replay.poll(None) is not None:
        replay.refuse_sample()


# --- to an actor ------------------------------------------------------------------------------------


def test_an_actor_takes_the_weights_that_it_waits_for_and_counts_the_rest(ranks, tried):
    tried.least = INPUTS
    rng, actor, hub = random.Random(3), ranks[ACTOR], ranks[LEARNER]._hub
    into = aligned_bytes(WEIGHTS + 64)
    into[WEIGHTS:] = 0x5A
    good = [
        [header(kinds.WEIGHTS), rng.randbytes(WEIGHTS)], [header(kinds.WEIGHTS), rng.randbytes(WEIGHTS - 1)], [header(kinds.NO_WEIGHTS)],
        [header(kinds.ANNOUNCEMENT), bytes(8 * WORDS)], [header(kinds.DONE)], [header(kinds.REPORT_TAKEN)],
    ]  # fmt: skip
    actor.request_weights(0, into[:WEIGHTS])
    for batch in rounds(rng, lambda: rng.choice(good), lambda frames: None, tried):
        for frames, _ in batch:
            what = actor_takes_of_learner(frames, WEIGHTS)
            if what == "stop":
                continue
            before, seen = actor.refused, []
            hub.socket.send_multipart([hub.name_of(ACTOR), *frames])
            settle(lambda seen=seen: (actor.progress(), polled(seen, actor.poll_weights)),
                   lambda before=before, seen=seen: seen or actor._announcement is not None or actor.refused > before)
            kind = "weights" if seen else "announcement" if actor.poll_announcement() is not None else None
            assert (kind, actor.refused - before) == (what, what is None), frames
            if kind == "weights":
                assert into[:WEIGHTS].tobytes() == frames[1]
                actor.request_weights(0, into[:WEIGHTS])
        assert not actor.stopping and not actor.finished
    assert (into[WEIGHTS:] == 0x5A).all(), "written beyond the place that weights go to"
    hub.socket.send_multipart([hub.name_of(ACTOR), header(kinds.WEIGHTS), bytes(WEIGHTS)])
    settle(actor.progress, actor.poll_weights)
    goes_on(ranks)


def test_an_actor_gets_back_only_batches_that_are_on_their_way_and_the_oldest_first(ranks, tried):
    tried.least = INPUTS
    rng, actor, hub = random.Random(4), ranks[ACTOR], ranks[REPLAY]._hub
    good = [[header(kinds.INTAKE_TAKEN, token)] for token in (11, 12)]
    for _ in range(INPUTS // ROUND):
        actor.send_intake(11, np.zeros(10, np.uint8)), actor.send_intake(12, np.zeros(10, np.uint8))
        tokens, before, refused = [11, 12], actor.refused, 0
        for _ in range(ROUND):
            frames = mutate_frames(rng, rng.choice(good) if rng.random() < 0.1 else [header(kinds.INTAKE_TAKEN, rng.choice(EDGES))])
            if tokens and frames == [header(kinds.INTAKE_TAKEN, tokens[0])]:
                tokens.pop(0)
            else:
                refused += 1
            hub.socket.send_multipart([hub.name_of(ACTOR), *frames])
        tried(ROUND)
        settle(actor.progress, lambda before=before, refused=refused: heard_all(actor, before, refused))
        for token in tokens:
            hub.send(ACTOR, kinds.INTAKE_TAKEN, token)
        done = []
        settle(lambda done=done: (actor.progress(), done.extend(actor.completed_intake())), lambda done=done: len(done) == 2)
        assert done == [11, 12] and actor._credits.in_flight == [0]
    drain(ranks)
    goes_on(ranks)


def drain(ranks) -> None:
    """Have the replay rank take the batches that were only sent to use credits, and the actor refuse the answers: they came before."""
    taken, actor, before = [], ranks[ACTOR], ranks[ACTOR].refused
    landing = aligned_bytes(LIMITS.intake_nbytes)
    settle(lambda: polled(taken, lambda: ranks[REPLAY].poll(landing)), lambda: len(taken) == 2 * (INPUTS // ROUND))
    settle(actor.progress, lambda: heard_all(actor, before, 2 * (INPUTS // ROUND)))
