"""One rank of a test over ZeroMQ: plays what it is told, and writes what it saw into a file of its own.

Usage: stress_zmq_ports.py REPLAY_RANKS PART FOLDER; the parts are the functions of ``PARTS``.
"""

import pickle
import sys
import traceback
from pathlib import Path

import stress_endless
from ledger import Ledger
from port_conformance import SCENARIOS
from stress_base import until, zmq_port
from stress_roles import stormer

from apex.topology import Topology
from apex.transport.zmq_world import abort, world
from launch.run.world import from_environment

LONGEST_ROUND_S = 300.0


def scenarios(job, topology: Topology, folder: Path) -> None:
    """Play all scenarios of the conformance suite; leave the ledgers of this rank."""
    ledgers = {
        name: [_round(job, topology, name, seed) for seed in range(s.rounds)] for name, s in SCENARIOS.items()
    }
    stress_endless.write(folder / f"rank-{job.rank}", pickle.dumps(ledgers))


def _round(job, topology: Topology, name: str, seed: int) -> Ledger:
    port = zmq_port(job, topology, SCENARIOS[name].limits)
    role = stormer(topology, job.rank, port, SCENARIOS[name], seed)
    until(lambda: role.finished, role.step, port, topology.name(job.rank), LONGEST_ROUND_S)
    port.close()
    return role.close()


def endless(job, topology: Topology, folder: Path) -> None:
    """Play a rank of the suite ``disturbance``; tell also where it can be connected to."""
    port = zmq_port(job, topology, stress_endless.SCENARIO.limits)
    if port.wire._hub is not None:
        stress_endless.write(folder / f"endpoint-{job.rank}", port.wire._hub.endpoint.encode())
    stress_endless.play(port, topology, job.rank, folder)


PARTS = {"scenarios": scenarios, "endless": endless}


def main() -> None:
    """Play what the arguments say; any exception ends the job."""
    _, size = from_environment()
    job, folder = world(size), Path(sys.argv[3])
    try:
        PARTS[sys.argv[2]](job, Topology(size, int(sys.argv[1])), folder)
    except BaseException:
        traceback.print_exc()
        abort(False)


if __name__ == "__main__":
    main()
