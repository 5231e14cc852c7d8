"""Where an actor's next intake batch goes: in turn, but never to a replay rank that takes nothing."""

import numpy as np
import pytest

from apex.ports import IntakeEvent
from apex.schema import Limits
from apex.topology import Topology
from apex.transport.endpoints import IntakeCredits
from apex.transport.wire import Kind
from launch.run.local import make_ports


def test_replay_ranks_take_turns_from_the_actors_own_first():
    credits = IntakeCredits(3, first=4, limit=2)
    assert [credits.take() for _ in range(6)] == [1, 2, 0, 2, 0, 1]
    assert not credits.free()
    with pytest.raises(RuntimeError, match="without a free credit"):
        credits.take()


def test_a_rank_without_a_free_credit_is_passed_over_until_it_has_one():
    credits = IntakeCredits(2, first=0, limit=1)
    assert [credits.take(), credits.take()] == [0, 1]
    for _ in range(3):
        credits.give_back(1)
        assert credits.take() == 1
    credits.give_back(0)
    assert credits.take() == 0


def test_one_replay_rank_that_takes_nothing_does_not_starve_the_other():
    ports = make_ports(Topology(5, 2), Limits(1, 1, 1, intake_in_flight=2))
    actor, taking = ports[4], ports[2]
    message, landing, taken = np.zeros(8, np.uint8), np.zeros(8, np.uint8), 0
    for token in range(100):
        if actor.can_send_intake():
            actor.send_intake(token, message)
        taken += isinstance(taking.poll(landing), IntakeEvent)
        actor.progress(), actor.completed_intake()
    assert actor.wire.open_sends().count((1, Kind.INTAKE)) == 2, (
        "the blocked rank holds its own credits and no more"
    )
    assert taken >= 90


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("envs", [1, 2, 3, 4, 5, 6, 8, 12, 16])
def test_every_environment_meets_all_replay_ranks_alike_whatever_the_two_numbers(envs, ranks):
    credits, met = IntakeCredits(ranks, first=1, limit=4), np.zeros((envs, ranks))
    for batch in range(envs * 1024):
        replay = credits.take()
        met[batch % envs, replay] += 1
        credits.give_back(replay)
    assert np.abs(met / 1024 - 1 / ranks).max() < 0.03


def test_every_round_of_batches_goes_to_all_replay_ranks():
    credits = IntakeCredits(3, first=2, limit=99)
    sent = [credits.take() for _ in range(99)]
    assert all(sorted(sent[i : i + 3]) == [0, 1, 2] for i in range(0, 99, 3))
