"""What the tests with four ranks over ZeroMQ share.

To wait for what is on its way, and whether all four still work afterwards.
"""

import time

import numpy as np
from stress_base import publish, send_priorities
from zmq_oracle import EVALUATOR, LEARNER, LIMITS, report

from apex.ports import IntakeEvent, PriorityEvent, SampleRequestEvent
from apex.schema import aligned_bytes

WEIGHTS = 4000  # bytes
_MARK = 250  # a kind that no message has


def settle(step, done) -> None:
    """Step until ``done()``; what is on its way on this host takes moments."""
    deadline = time.monotonic() + 300
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


def read_away(ranks) -> None:
    """Read all that is still on its way, up to a mark from each side.

    Answers, for ranks that have asked for nothing.
    """
    for port in ranks.ports:
        port.wire._heads.clear()  # what is here already
        for link in port.wire._links.values():
            link.send(_MARK)
    hubs = [
        (port.wire._hub, list(port.wire._hub._life_of)) for port in ranks.ports if port.wire._hub is not None
    ]
    for hub, callers in hubs:
        _read_to_marks(hub, callers)
    ranks.ports[LEARNER].progress()  # answers who has asked for weights
    ranks.ports[LEARNER].poll_reports()
    for hub, callers in hubs:
        for rank in callers:
            hub.send(rank, _MARK)
    for port in ranks.ports:
        for peer, link in port.wire._links.items():
            _read_to_marks(link, [peer])


def _read_to_marks(box, senders: list[int]) -> None:
    """Read messages, of which none counts, until each sender's mark has come."""
    missing = set(senders)

    def read():
        message = box.receive()
        if message is not None:
            missing.difference_update({message.rank} if message.kind == _MARK else ())
            box.refuse()

    settle(read, lambda: not missing)


def goes_on(ranks) -> None:
    """Check that all four ranks work.

    Intake, a sample with priorities, weights, reports, and an end in order; nothing good is refused.
    """
    learner, replay, evaluator, actor = ranks.ports
    weights = np.full(WEIGHTS, 1, np.uint8)
    weights[:16].view(np.int64)[1] = 2**63 - 1  # learner steps: as many as anybody asked for
    publish(learner, weights)
    read_away(ranks)
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
            send_priorities(learner, 0, np.full(LIMITS.priority_nbytes, 3, np.uint8))
        seen.update(
            ["weights"] if actor.poll_weights() else [], ["taken"] if actor.completed_intake() == [7] else []
        )
        seen.update("report" for _ in learner.poll_reports())

    settle(step, lambda: seen == {"intake", "priorities", "weights", "taken", "report"})
    assert np.array_equal(into, weights)
    learner.stop()
    settle(step, lambda: all(port.stopping for port in ranks.ports))
    for port in ranks.ports:
        port.finish()
    settle(step, lambda: all(port.finished for port in ranks.ports))
    assert [port.refused for port in ranks.ports] == before
