"""The transport within one process against the conformance suite of ports (for MPI see
``tests/apex/transport``).
"""

import gc

import pytest
from ledger import Scenario
from port_conformance import SCENARIOS, PortConformance, judge
from stress_roles import stormer

from apex.topology import Topology
from launch.run.local import make_ports

_MOST_STEPS = 20_000


def play(topology: Topology, scenario: Scenario, seed: int):
    """Play one round with all ranks in this process; return their ledgers."""
    ports = make_ports(topology, scenario.limits)
    roles = [stormer(topology, rank, port, scenario, seed) for rank, port in enumerate(ports)]
    for _ in range(_MOST_STEPS):
        if all(role.finished for role in roles):
            return [role.close() for role in roles]
        for role in roles:
            role.step()
    pytest.fail(f"no end: {roles[0].port.waits_for()}")


@pytest.fixture(scope="module", params=[(4, 1), (7, 2)], ids=["4 ranks", "7 ranks, 2 of replay"])
def outcomes(request):
    topology = Topology(*request.param)
    scenarios = {name: scenario._replace(delay_s=0.0) for name, scenario in SCENARIOS.items()}
    gc.freeze()  # the storm collects garbage all the time: only its own
    yield judge(
        topology,
        {name: [play(topology, s, seed) for seed in range(s.rounds)] for name, s in scenarios.items()},
    )
    gc.unfreeze()


class TestLocalWorld(PortConformance):
    pass
