"""What endpoints do beyond what the conformance suite of ports shows."""

from collections import deque

import numpy as np

from apex.control import CheckpointAck, as_json
from apex.schema import Limits
from apex.topology import Topology
from apex.transport.local import LocalWire, LocalWorld
from apex.transport.weights import request_message
from apex.transport.wire import Held, Kind
from launch.run.world import make_port

TOPOLOGY, ACTOR_RANK = Topology(4, 1), 3
LIMITS = Limits(sample_nbytes=64, priority_nbytes=64, prefetch=2, intake_in_flight=2)


class OneSocket(LocalWire):
    """A wire on which control and data messages come one after another, as over one socket of ZeroMQ."""

    def __init__(self):
        super().__init__(LocalWorld(TOPOLOGY.size), 0, TOPOLOGY.size)
        self.line = deque()

    def poll_control(self):
        return (ACTOR_RANK, self.line.popleft()) if self.line and isinstance(self.line[0], dict) else None

    def receive(self, kinds):
        return self.line.popleft() if self.line and not isinstance(self.line[0], dict) else None


def test_control_and_data_that_alternate_on_one_socket_are_all_taken_in_one_turn():
    wire = OneSocket()
    learner = make_port(wire, TOPOLOGY, LIMITS)
    for number in range(20):
        wire.line.append(as_json(CheckpointAck(number, 0, {})))
        wire.line.append(Held(ACTOR_RANK, Kind.WEIGHT_REQUEST, request_message(number)))
    learner.progress()
    assert not wire.line
    assert [acknowledged.ack.number for acknowledged in learner.poll_acks()] == list(range(20))
    assert learner.wants_weights(19) and not learner.wants_weights(18)


def test_a_flood_of_messages_does_not_keep_a_rank_from_its_work():
    wire = OneSocket()
    learner = make_port(wire, TOPOLOGY, LIMITS)
    wire.line.extend(as_json(CheckpointAck(number, 0, {})) for number in range(1000))
    learner.progress()
    assert 900 < len(wire.line) < 1000


def test_a_due_publish_goes_before_an_older_one_to_whoever_has_just_asked():
    world = LocalWorld(TOPOLOGY.size)
    learner, actor = (
        make_port(world.wires[0], TOPOLOGY, LIMITS),
        make_port(world.wires[ACTOR_RANK], TOPOLOGY, LIMITS),
    )

    def publish(steps: int) -> None:
        learner.publish_buffer(16)[:] = np.array([steps, steps], np.int64).view(np.uint8)
        learner.publish()

    publish(10)
    into = np.zeros(16, np.uint8)
    actor.request_weights(5, into)
    learner.progress()
    assert learner.wants_weights(20), "the request is not answered before the learner could publish"
    publish(20)
    actor.progress()
    assert actor.poll_weights() and into.view(np.int64).tolist() == [20, 20]
    actor.request_weights(5, into)
    learner.progress(), learner.progress(), actor.progress()
    assert actor.poll_weights(), "nothing newer was due"
