"""A process that takes a lost one's place asks the learner to join; what else comes there is refused."""

import threading

import pytest
from stress_base import zmq_port

from apex.processes import own_process
from apex.schema import Limits
from apex.topology import Topology
from apex.transport.zmq_world import _JOIN, World, _encoded

TOPOLOGY = Topology(4, 1)
LIMITS = Limits(sample_nbytes=1 << 10, priority_nbytes=1 << 10, prefetch=2, intake_in_flight=3)
ACTOR_RANK, REPLAY_RANK, ENDS_S = 3, 1, 20.0


@pytest.fixture
def world(tmp_path):
    """Return ``world(rank, life) -> World`` of one job; all are closed at the end."""
    made = []

    def of(rank: int, life: int = 0) -> World:
        made.append(World(rank, TOPOLOGY.size, f"ipc://{tmp_path}", b"t" * 16, life))
        return made[-1]

    yield of
    for each in made:
        each.context.destroy(0)


def in_thread(call, *args) -> list:
    """Begin a call; return the list in which its result will be."""
    results: list = []
    threading.Thread(target=lambda: results.append(call(*args)), daemon=True).start()
    return results


@pytest.fixture
def learner(world, until):
    """The learner's port of a world whose ranks have met, and which tolerates losses."""
    others = [
        in_thread(lambda rank=rank: zmq_port(world(rank), TOPOLOGY, LIMITS, ["survive"]))
        for rank in (1, 2, 3)
    ]
    port = zmq_port(world(0), TOPOLOGY, LIMITS, ["survive"])
    until(lambda: all(others))
    return port


@pytest.fixture
def until():
    """Return ``until(holds)``, which waits for it."""
    import time

    def wait(holds) -> None:
        deadline = time.monotonic() + ENDS_S
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return wait


def test_a_process_joins_and_is_told_what_the_learner_says(learner, world, until):
    newcomer = world(ACTOR_RANK, life=1)
    told = in_thread(newcomer.join)
    changes: list = []

    def hear() -> bool:
        learner.progress()
        changes.extend(learner.poll_changes())
        return bool(changes)

    until(hear)
    assert [(change.rank, change.what) for change in changes] == [(ACTOR_RANK, "lost")]
    learner.replace(ACTOR_RANK, {"life": 7})
    until(lambda: told)
    assert (told[0]["rank"], told[0]["life"]) == (ACTOR_RANK, 7)
    assert learner.wire.processes[ACTOR_RANK][1:] == [*own_process()] and learner.refused == 0


@pytest.mark.parametrize("rank, value", [
    (REPLAY_RANK, ["host", 1, 1]), (ACTOR_RANK, ["host", 1]), (ACTOR_RANK, {}), (ACTOR_RANK, None),
    (ACTOR_RANK, ["host", "1", 1]),
])  # fmt: skip
def test_a_wish_to_join_that_cannot_be_one_is_refused_and_nobody_is_lost_for_it(
    learner, world, until, rank, value
):
    world(rank, life=1)._box.send(_JOIN, 0, _encoded(value))
    processes = [list(process) for process in learner.wire.processes]
    until(lambda: learner.progress() or learner.refused)
    assert learner.poll_changes() == [] and learner.wire.processes == processes
