"""The MPI transport against the conformance suite of ports, at 4 and at 7 ranks and with either protocol for
any size.
"""

import sys
from collections import defaultdict

import pytest
from disturbance import RANKS, Disturbance, EndlessStorm
from mpi_launches import ALL_EAGER, NOTHING_EAGER, outcome_of
from places import HELPERS
from port_conformance import PortConformance

from launch.run.launchers import find_mpirun

PROGRAM = HELPERS / "stress_mpi_ports.py"

# Without copies straight from the sender's memory, as between two nodes: large messages then need both sides'
# help.
IN_PIECES = {"OMPI_MCA_smsc": "^cma"}
LITTLE_EAGER_IN_PIECES = IN_PIECES | {
    "OMPI_MCA_btl_sm_eager_limit": "80",
    "OMPI_MCA_btl_sm_rndv_eager_limit": "80",
}
LAUNCHES = {
    "lent, 4 ranks": (4, 1, "lend", {}),
    "lent, 7 ranks, 2 of replay, nothing eager": (7, 2, "lend", NOTHING_EAGER),
    "lent on two hosts and sent between them, 9 ranks, 2 of replay": (9, 2, "mixed", {}),
    "sent, 4 ranks": (4, 1, "send", {}),
    "sent, 7 ranks, 2 of replay, nothing eager": (7, 2, "send", NOTHING_EAGER),
    "sent, 4 ranks, all eager": (4, 1, "send", ALL_EAGER),
    "sent, 4 ranks, in small pieces": (4, 1, "send", LITTLE_EAGER_IN_PIECES),
}


@pytest.fixture(scope="module", params=LAUNCHES.values(), ids=LAUNCHES)
def outcomes(request, mpirun):
    ranks, replay_ranks, how, env = request.param
    outcomes = outcome_of(mpirun(ranks, [PROGRAM, replay_ranks, "scenarios", how], env))
    for outcome in outcomes.values():
        outcome["counts"] = defaultdict(int, outcome["counts"])
    return outcomes


class TestMpi(PortConformance):
    pass


class TestStalledPeers:
    """Three seconds in which replay takes no intake, all actors but one sleep, and the learner publishes 200
    times.
    """

    @pytest.fixture(scope="class", params=["lend", "send"])
    @staticmethod
    def seen(request, mpirun):
        return outcome_of(mpirun(7, [PROGRAM, 2, "stall", request.param], IN_PIECES)) | {"how": request.param}

    def test_a_sleeping_receiver_of_weights_costs_the_learner_one_buffer(self, seen):
        asleep, others = (
            2,
            4,
        )  # the newest, the one being written, and the last two that the evaluator was given
        buffers = seen["learner"][0]["publishes"]
        assert asleep < buffers <= asleep + others

    def test_whoever_is_awake_still_gets_the_newest_weights(self, seen):
        versions = seen["evaluator"][0]["versions"]
        assert versions == sorted(set(versions))
        assert versions[-1] == 200
        assert len(versions) > 1

    def test_who_slept_gets_the_weights_that_were_newest_when_it_asked(self, seen):
        first, second = (actor["slept_over"] for actor in seen["actor"][:2])
        assert 0 < first <= second < 200
        assert all(actor["whole"] for actor in seen["actor"][:2])

    def test_an_actor_stops_at_its_credits_while_replay_takes_nothing(self, seen):
        sender = seen["actor"][-1]
        assert sender["sent_in_stall"] == 3 * 2, "three to each of two replay ranks"
        assert sender["sent"] > 50

    def test_replay_never_waits_for_a_learner_that_trains(self, seen):
        assert [replay["priorities"] for replay in seen["replay"]] == [1, 1]
        assert seen["learner"][0]["polled"] == [True, True]


@pytest.fixture(params=["lend", "send"])
def storm(request, start, tmp_path):
    program = [sys.executable, PROGRAM, 1, "endless", request.param]
    return EndlessStorm(
        start, tmp_path / "storm", lambda folder: [find_mpirun(), "-n", RANKS, *program, folder], IN_PIECES
    )


class TestMpiDisturbed(Disturbance):
    pass
