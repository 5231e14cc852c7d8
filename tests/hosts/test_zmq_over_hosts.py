"""The ZeroMQ transport between two hosts against the conformance suite of ports, one group of ranks started
on each.
"""

import pickle
import sys

import pytest
from places import HELPERS
from port_conformance import judge
from stress_over_hosts import HostsConformance
from two_hosts import crossing

from apex.topology import Topology

GROUPS = {"4 ranks, those that act on the second host": (2, 2, 1), "7 ranks, 2 of replay": (3, 4, 2)}


@pytest.fixture(scope="module", params=GROUPS.values(), ids=GROUPS)
def storm(request, hosts, zmq_groups, run_to_end, tmp_path_factory):
    """Return the outcomes, payload and traffic (see ``crossing``) of a job."""
    first, second, replay_ranks = request.param
    folder, before = tmp_path_factory.mktemp("seen"), hosts.traffic()
    program = [sys.executable, HELPERS / "stress_zmq_ports.py", replay_ranks, "scenarios", folder]
    ended = run_to_end(zmq_groups(first, second, program), timeout=200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    traffic = hosts.traffic() - before
    ranks = [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(first + second)]
    rounds = {name: list(zip(*(rank[name] for rank in ranks))) for name in ranks[0]}
    outcomes = judge(Topology(first + second, replay_ranks), rounds)
    return outcomes, crossing(outcomes, set(range(first, first + second))), traffic


class TestZmqOverHosts(HostsConformance):
    pass
