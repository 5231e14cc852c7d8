"""A world that loses its first actor and cannot replace it.

The learner prints as one line of JSON what it saw, then all end.

Usage: stress_losing.py goes-on|ends COMMAND...   (whether the run ends at once, and what is started in place
of the actor)
"""

import json
import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI
from stress_base import mpi_port, until

from apex.metrics import REPORT_FIELDS
from apex.ports import LOST
from apex.schema import Limits
from apex.topology import ACTOR, LEARNER, REPLAY, Topology
from apex.transport import mpi_spawn, mpi_world

LIMITS = Limits(sample_nbytes=1 << 10, priority_nbytes=1 << 10, prefetch=2, intake_in_flight=3)
ENDS = sys.argv[1] == "ends"
if not ENDS:
    mpi_spawn.PATIENCE_S = 3.0
STARTS_S = 1.0  # in this time a process is being started
ends_at: list[float] = []


def play(port, topology: Topology, rank: int) -> list | None:
    """Play a rank until the end; return what the learner saw."""
    role, index = topology.role(rank)
    if (role, index) == (ACTOR, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    changes: list = []

    def step() -> bool:
        port.progress()
        if role == REPLAY:
            port.poll(None)
        if port.stopping:
            port.finish()
            changes.extend(port.poll_changes() if role == LEARNER else [])
        elif role == LEARNER:
            watch(port, changes)
        elif role == ACTOR:
            port.send_report(np.zeros(len(REPORT_FIELDS[ACTOR])))
        return False

    until(lambda: port.finished, step, port, topology.name(rank), 40.0)
    return changes if role == LEARNER else None


def watch(port, changes: list) -> None:
    """Have who is lost replaced; stop once it is told that nobody can be."""
    new, reports = port.poll_changes(), port.poll_reports()
    if ENDS and ends_at and time.monotonic() > ends_at[0]:
        port.stop()
    changes += new
    for change in new:
        if change.what == LOST:
            port.replace(change.rank, {})
            ends_at.append(time.monotonic() + STARTS_S)
    if reports and len(changes) == 2 and not ENDS:
        changes.append(("reports", len(reports)))
        port.stop()


def main() -> None:
    """Be one rank."""
    comm, topology = MPI.COMM_WORLD, Topology(5, 1)
    port = mpi_port(comm, topology, LIMITS, command=sys.argv[2:])
    changes = play(port, topology, comm.rank)
    if changes is not None:
        print(json.dumps(changes), flush=True)
    mpi_world.leave(True)


if __name__ == "__main__":
    main()
