"""Garbage over real sockets of ZeroMQ, by ranks that are known, which is worse than by strangers: refused, counted, and survived.

A known rank's socket sends; how the receiver takes each message is foretold by ``zmq_oracle``. All of it in order, so
the count of refusals is exact.
"""

import random
import time

import numpy as np
import pytest
import zmq
from mutations import EDGES, header, mutate, mutate_frames
from zmq_oracle import (
    ACTOR,
    EVALUATOR,
    LARGEST,
    LEARNER,
    LIMITS,
    REPLAY,
    TOPOLOGY,
    FourRanks,
    actor_takes_of_learner,
    learner_takes,
    memory,
    replay_takes_of_actor,
    replay_takes_of_learner,
    report,
)

from apex.ports import WORDS, IntakeEvent, PriorityEvent, SampleRequestEvent
from apex.schema import aligned_bytes
from apex.transport import zmq_port as kinds
from apex.transport.zmq_link import Hub, Link, name
from apex.transport.zmq_world import _encoded, _read

INPUTS = 16_000
ROUND = 50  # messages sent before they are read; fewer than a socket takes in unread
WEIGHTS = 4000


@pytest.fixture
def ranks(tmp_path):
    four = FourRanks(tmp_path)
    yield four
    four.close()


def settle(step, done) -> None:
    """Step until ``done()``; what is on its way on this host takes moments."""
    deadline = time.monotonic() + 30
    while True:
        step()
        if done():
            return
        assert time.monotonic() < deadline, "it has not come"


def polled(seen: list, poll) -> None:
    """Append what ``poll`` returns, if anything."""
    event = poll()
    if event is not None and event is not False:
        seen.append(event)


def heard_all(port, before: int, refused: int) -> bool:
    assert port.refused <= before + refused, "something good was refused"
    return port.refused == before + refused


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

        def take(got=got):
            event = replay.poll(landing[: LIMITS.intake_nbytes])
            if isinstance(event, IntakeEvent):
                got.append(landing[: event.nbytes].tobytes())

        settle(take, lambda: len(got) == len(expected) and heard_all(replay, before, len(batch) - len(expected)))
        assert got == expected
        before = ranks[ACTOR].refused
        settle(ranks[ACTOR].progress, lambda before=before, n=len(got): heard_all(ranks[ACTOR], before, n))  # it had sent none
    assert (landing[LIMITS.intake_nbytes :] == 0x5A).all(), "written beyond the place that intake lands in"
    assert (ranks[ACTOR]._in_flight, ranks[ACTOR]._credits.in_flight) == ([type(ranks[ACTOR]._in_flight[0])()], [0])
    goes_on(ranks)


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
            hub.socket.send_multipart([hub._name_of[REPLAY], *frames])
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
            hub.socket.send_multipart([hub._name_of[ACTOR], *frames])
            settle(lambda seen=seen: (actor.progress(), polled(seen, actor.poll_weights)),
                   lambda before=before, seen=seen: seen or actor._announcement is not None or actor.refused > before)
            kind = "weights" if seen else "announcement" if actor.poll_announcement() is not None else None
            assert (kind, actor.refused - before) == (what, what is None), frames
            if kind == "weights":
                assert into[:WEIGHTS].tobytes() == frames[1]
                actor.request_weights(0, into[:WEIGHTS])
        assert not actor.stopping and not actor.finished
    assert (into[WEIGHTS:] == 0x5A).all(), "written beyond the place that weights go to"
    hub.socket.send_multipart([hub._name_of[ACTOR], header(kinds.WEIGHTS), bytes(WEIGHTS)])
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
            elif not frames[1:] and frames[0][:8] == header(kinds.INTAKE_TAKEN)[:8] and tokens and frames[0][8:] == tokens[0].to_bytes(8, "little"):
                tokens.pop(0)
            else:
                refused += 1
            hub.socket.send_multipart([hub._name_of[ACTOR], *frames])
        tried(ROUND)
        settle(actor.progress, lambda before=before, refused=refused: heard_all(actor, before, refused))
        for token in tokens:
            hub.send(ACTOR, kinds.INTAKE_TAKEN, token)
        done = []
        settle(lambda: (actor.progress(), done.extend(actor.completed_intake())), lambda: len(done) == 2)
        assert done == [11, 12] and actor._credits.in_flight == [0]
    drain(ranks)
    goes_on(ranks)


def drain(ranks) -> None:
    """Have the replay rank take the batches that were only sent to use credits, and the actor refuse the answers: they came before."""
    taken, actor, before = [], ranks[ACTOR], ranks[ACTOR].refused
    landing = aligned_bytes(LIMITS.intake_nbytes)
    settle(lambda: polled(taken, lambda: ranks[REPLAY].poll(landing)), lambda: len(taken) == 2 * (INPUTS // ROUND))
    settle(actor.progress, lambda: heard_all(actor, before, 2 * (INPUTS // ROUND)))


# --- strangers, oversized, floods -------------------------------------------------------------------


def test_strangers_are_refused_whatever_they_call_themselves(ranks, tried):
    tried.least = INPUTS
    rng = random.Random(5)
    with zmq.Context() as context:
        for rank in (LEARNER, REPLAY):
            port = ranks[rank]
            for wrong in [None, b"r", name(b"x" * 16, 3), name(b"t" * 15, 3), name(b"t" * 16, 77), rng.randbytes(255)]:
                stranger = context.socket(zmq.DEALER)
                if wrong is not None:
                    stranger.routing_id = wrong
                stranger.connect(port._hub.endpoint)
                count = INPUTS // 12 + 1
                before, sent = port.refused, 0
                while sent < count:
                    few = min(ROUND, count - sent)
                    for _ in range(few):
                        stranger.send_multipart(mutate_frames(rng, [header(rng.randrange(1, 20)), rng.randbytes(rng.randint(0, 500))]))
                    sent += few
                    settle(lambda: port._hub.receive(), lambda: port.refused >= before + sent)
                tried(count)
                stranger.close(0)
                settle(port._hub.count_cuts, lambda: port.refused == before + count + 1)  # it has gone
    goes_on(ranks)


@pytest.mark.parametrize("nbytes", [LARGEST + 1000, 16 << 20, 256 << 20], ids=lambda n: f"{n} bytes")
def test_an_oversized_message_costs_its_sender_the_connection_is_counted_and_takes_no_memory(ranks, tried, nbytes):
    tried.least = 4
    before = memory()
    with zmq.Context() as context:
        for rank in (LEARNER, REPLAY):
            port, refused = ranks[rank], ranks[rank].refused
            for frames in ([bytes(nbytes)], [header(kinds.INTAKE), bytes(nbytes)]):
                stranger = context.socket(zmq.DEALER)
                stranger.linger = 0
                stranger.connect(port._hub.endpoint)
                stranger.send_multipart(frames, copy=False)
                tried()
                settle(port._hub.count_cuts, lambda port=port, refused=refused: port.refused > refused)
                refused = port.refused
                stranger.close(0)
    assert memory() - before < nbytes // 2 + (64 << 20)
    goes_on(ranks)


def test_one_that_is_only_a_little_too_large_is_refused_and_keeps_its_connection(ranks, tried):
    tried.least = 3
    replay, sender = ranks[REPLAY], ranks[ACTOR]._links[REPLAY].socket
    landing, before = aligned_bytes(LIMITS.intake_nbytes), ranks[REPLAY].refused
    for nbytes in (LIMITS.intake_nbytes + 1, 1 << 20, LARGEST):
        sender.send_multipart([header(kinds.INTAKE), bytes(nbytes)])
        tried()
    settle(lambda: replay.poll(landing), lambda: heard_all(replay, before, 3))
    goes_on(ranks)


def test_a_rank_that_sends_without_end_to_one_that_does_not_read_makes_it_take_in_only_so_much(tmp_path, tried):
    tried.least = 2000
    context = zmq.Context()
    hub = Hub(context, f"ipc://{tmp_path}/hub", b"t" * 16, [3], "the hub", 1 << 20)
    there = zmq.Context()  # as in another process: what waits at the sender is the sender's
    link = Link(there, hub.endpoint, b"t" * 16, 3, 0, "the link")
    link.socket.sndhwm = 1
    flood = there.socket(zmq.DEALER)
    flood.routing_id, flood.sndhwm, flood.linger = name(b"t" * 16, 3), 1, 0
    link.close()
    flood.connect(hub.endpoint)
    payload, sent = bytes(1 << 19), 0
    while sent < 2000 and flood.poll(500, zmq.POLLOUT):
        flood.send_multipart([header(kinds.INTAKE), payload])
        sent += 1
    tried(2000)
    assert sent < 200, "a socket that nobody reads takes in without end"
    got = 0
    while hub.socket.poll(500):
        message = hub.receive()
        got += message is not None and hub.take(len(payload)) is not None
    assert got >= sent - 1
    flood.close(0)
    hub.close()
    context.destroy(0), there.destroy(0)


# --- the values of a world --------------------------------------------------------------------------


def test_values_that_are_none_are_refused_while_a_world_starts(tmp_path, tried):
    tried.least = 20_000
    rng = random.Random(6)
    good = [bytes(_encoded(value)) for value in ({"a": [1, 2.5, None, "x"]}, ["ipc:///x/1-0", None, "é"], 17)]
    good += [b'{"Path": "/a"}', b'{"EnvSpec": {"frame_shape": [4], "frame_dtype": "float32", "stack": 1, "num_actions": 2}}']
    odd = [b"[" * 100_000, b"9" * 5000, b"NaN", b'{"Path": 5}', b'{"EnvSpec": 5}', b'{"EnvSpec": {"frame_shape": 3}}', b'"\xff"', b"1e999"]
    with zmq.Context() as context:
        hub = Hub(context, f"ipc://{tmp_path}/hub", b"t" * 16, [1], "the hub", 1 << 20)
        link = Link(context, hub.endpoint, b"t" * 16, 1, 0, "the link")
        for number in range(20_000):
            payload = rng.choice(odd) if number % 20 == 0 else mutate(rng, rng.choice(good))
            before = hub.refused
            link.socket.send_multipart([header(rng.choice([1, 1, 1, 2])), payload])
            hub.socket.poll(10_000)
            message = hub.receive()
            value = _read(hub, message)
            assert (type(value) is object) == (hub.refused == before + 1) and hub.refused - before <= 1
            tried()
        link.send(1, 0, _encoded({"still": "here"}))
        hub.socket.poll(10_000)
        assert _read(hub, hub.receive()) == {"still": "here"}
        hub.close(), link.close()


# --- afterwards -------------------------------------------------------------------------------------


def goes_on(ranks) -> None:
    """Check that all four ranks work: intake, a sample with priorities, weights, reports, and an end in order; nothing good is refused."""
    learner, replay, evaluator, actor = ranks.ports
    learner.publish(np.full(WEIGHTS, 1, np.uint8))
    for port in ranks.ports:  # first the answers to what was good, for ranks that have asked for nothing
        for _ in range(2000):
            port.progress()
        port.completed_intake() if port is actor else None
    learner.poll_reports()
    before = [port.refused for port in ranks.ports]
    landing, into = aligned_bytes(LIMITS.intake_nbytes), aligned_bytes(WEIGHTS)
    seen: set[str] = set()
    actor.send_intake(7, np.full(100, 7, np.uint8))
    learner.request_sample(0)
    actor.request_weights(0, into)
    evaluator.send_report(np.frombuffer(report(EVALUATOR)))

    def step():
        for port in ranks.ports:
            port.progress()
        event = replay.poll(landing)
        if isinstance(event, IntakeEvent):
            assert event == (100, 0) and (landing[:100] == 7).all()
            seen.add("intake")
        elif isinstance(event, SampleRequestEvent):
            buffer = replay.sample_buffer()
            buffer[:] = 9
            replay.send_sample(buffer)
        elif isinstance(event, PriorityEvent):
            assert (event.message == 3).all()
            seen.add("priorities")
        sample = learner.poll_sample()
        if sample is not None:
            assert sample[0] == 0 and (sample[1] == 9).all()
            learner.send_priorities(0, np.full(LIMITS.priority_nbytes, 3, np.uint8))
        seen.update(["weights"] if actor.poll_weights() else [], ["taken"] if actor.completed_intake() == [7] else [])
        seen.update("report" for _ in learner.poll_reports())

    settle(step, lambda: seen == {"intake", "priorities", "weights", "taken", "report"})
    assert (into == 1).all()
    learner.stop()
    settle(step, lambda: all(port.stopping for port in ranks.ports))
    for port in ranks.ports:
        port.finish()
    settle(step, lambda: all(port.finished for port in ranks.ports))
    assert [port.refused for port in ranks.ports] == before
