"""The MPI transport between two hosts against the conformance suite of ports.

And that what is sent there really goes there.
"""

import json
import sys
from collections import defaultdict

import pytest
from mpi_launches import ALL_EAGER, NOTHING_EAGER, outcome_of
from places import HELPERS
from stress_over_hosts import HostsConformance
from two_hosts import crossing

PUBLISHES = HELPERS / "stress_publishes.py"
BY_SLOT, IN_TURN = (
    ("--map-by", "slot"),
    ("--map-by", "node"),
)  # the last ranks on the second host, or every other
# Ranks on each host, replay ranks, how they are spread, environment.
LAUNCHES = {
    "4 ranks, those that act on the second host": ((2, 2), 1, BY_SLOT, {}),
    "4 ranks, in turn, all eager": ((2, 2), 1, IN_TURN, ALL_EAGER),
    "7 ranks, 2 of replay, in turn": ((4, 3), 2, IN_TURN, {}),
    "4 ranks, in turn, nothing eager": ((2, 2), 1, IN_TURN, NOTHING_EAGER),
}


@pytest.fixture(scope="module", params=LAUNCHES.values(), ids=LAUNCHES)
def storm(request, hosts, mpirun_command, ssh, run_to_end):
    """Return the outcomes, payload and traffic (see ``crossing``) of a launch."""
    slots, replay_ranks, how, env = request.param
    before = hosts.traffic()
    command = [
        *mpirun_command(slots, *how),
        sys.executable,
        HELPERS / "stress_mpi_ports.py",
        replay_ranks,
        "scenarios",
        "lend",
    ]
    outcomes = outcome_of(run_to_end(command, ssh | env, timeout=200))
    for outcome in outcomes.values():
        outcome["counts"] = defaultdict(int, outcome["counts"])
    on_second = {rank for rank in range(sum(slots)) if (rank % 2 if how == IN_TURN else rank >= slots[0])}
    return outcomes, crossing(outcomes, on_second), hosts.traffic() - before


class TestMpiOverHosts(HostsConformance):
    pass


@pytest.mark.parametrize("actors", [1, 3])
def test_a_publish_crosses_the_link_once_however_many_actors_take_it(
    hosts, mpirun_command, ssh, run_to_end, actors
):
    before, publishes, nbytes = hosts.traffic(), 20, 1 << 20
    command = [
        *mpirun_command((3, actors), *BY_SLOT),
        sys.executable,
        "-m",
        "mpi4py",
        PUBLISHES,
        publishes,
        nbytes,
    ]
    ended = run_to_end(command, ssh, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [0, 0, 0, *[publishes] * actors]
    copies = (hosts.traffic() - before).sent / (publishes * nbytes)
    assert 1 < copies < 1.1
