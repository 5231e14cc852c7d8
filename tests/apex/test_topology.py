"""Which rank is what, at every size."""

import pytest

from apex.config import ConfigError, from_tables
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY, ROLES, Topology, make


def config(replay_ranks=1, actors=1):
    return from_tables(
        [
            (
                "test",
                {
                    "replay": {"ranks": replay_ranks, "capacity": 50 * replay_ranks * 100},
                    "actor": {"count": actors},
                },
            )
        ]
    )


def roles(topology):
    return [topology.role(rank) for rank in range(topology.size)]


def test_the_smallest_world_has_one_of_each_role():
    assert roles(make(config(), 4)) == [(LEARNER, 0), (REPLAY, 0), (EVALUATOR, 0), (ACTOR, 0)]


def test_more_ranks_are_more_actors():
    assert roles(make(config(), 7))[3:] == [(ACTOR, 0), (ACTOR, 1), (ACTOR, 2), (ACTOR, 3)]


def test_replay_ranks_follow_the_learner():
    expected = [(LEARNER, 0), (REPLAY, 0), (REPLAY, 1), (REPLAY, 2), (EVALUATOR, 0), (ACTOR, 0), (ACTOR, 1)]
    assert roles(make(config(replay_ranks=3), 7)) == expected


@pytest.mark.parametrize("replay_ranks", [1, 2, 5])
@pytest.mark.parametrize("actors", [1, 2, 60])
def test_every_rank_has_one_role_and_every_index_one_rank(replay_ranks, actors):
    topology = make(config(replay_ranks), replay_ranks + 2 + actors)
    found = roles(topology)
    assert len(set(found)) == topology.size and topology.num_actors == actors
    assert [sum(role == r for role, _ in found) for r in ROLES] == [1, replay_ranks, 1, actors]
    by_range = {
        REPLAY: topology.replay_ranks_range,
        ACTOR: topology.actor_ranks,
        EVALUATOR: [topology.evaluator_rank],
    }
    for role, ranks in by_range.items():
        assert [topology.role(rank) for rank in ranks] == [(role, i) for i in range(len(ranks))]
    assert [topology.rank(*at) for at in found] == list(range(topology.size))


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_a_rank_outside_the_world_has_no_role(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 4"):
        make(config(), 4).role(rank)


@pytest.mark.parametrize(
    "role, index", [(LEARNER, 1), (REPLAY, 2), (EVALUATOR, 1), (ACTOR, 3), (ACTOR, -1), (LEARNER, -1)]
)
def test_a_role_has_no_rank_for_an_index_it_does_not_have(role, index):
    with pytest.raises(ValueError, match=f"{role} {index} is outside a world of 7"):
        make(config(replay_ranks=2), 7).rank(role, index)


def test_by_default_there_are_as_many_actors_as_configured():
    assert make(config(replay_ranks=2, actors=5)) == Topology(9, 2)
    assert make(config(replay_ranks=2, actors=5), 6).num_actors == 2


@pytest.mark.parametrize("replay_ranks", [1, 3])
def test_too_few_ranks_are_refused_in_one_line_with_the_least_that_is_accepted(replay_ranks):
    least = replay_ranks + 3
    assert make(config(replay_ranks), least).num_actors == 1
    for ranks in (least - 1, 1, 0, -5):
        with pytest.raises(ConfigError) as error:
            make(config(replay_ranks), ranks)
        assert str(error.value).startswith(f"{ranks} ranks are too few") and str(error.value).endswith(
            f"need {least}"
        )
        assert "\n" not in str(error.value)


def test_names_for_people_say_role_index_and_rank():
    topology = make(config(replay_ranks=2), 6)
    names = ["learner", "replay 0", "replay 1", "evaluator", "actor 0", "actor 1"]
    assert [topology.name(rank) for rank in range(6)] == [
        f"{name} (rank {rank})" for rank, name in enumerate(names)
    ]
