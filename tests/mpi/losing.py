"""A world that loses its first actor and cannot replace it; the learner prints as one line of JSON what it saw, then all end.

Usage: losing.py COMMAND...   (what is started in place of the actor)
       losing.py late         (nobody is lost, but the actors hear late that all is done: the replay rank has left by then)
"""

import json
import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI
from storm_base import until

from apex.metrics import REPORT_FIELDS
from apex.ports import LOST
from apex.schema import Limits
from apex.topology import ACTOR, LEARNER, REPLAY, Topology
from apex.transport import mpi_replace, mpi_world
from apex.transport.mpi import make_port

LATE_S = 2.0
LIMITS = Limits(sample_nbytes=1 << 10, priority_nbytes=1 << 10, prefetch=2, intake_in_flight=3)
mpi_replace.PATIENCE_S = 3.0


def play(port, topology: Topology, rank: int) -> list | None:
    """Play a rank until the end; return what the learner saw."""
    role, index = topology.role(rank)
    is_late, slept = sys.argv[1:] == ["late"], False
    if (role, index) == (ACTOR, 0) and not is_late:
        os.kill(os.getpid(), signal.SIGKILL)
    changes: list = []

    def step() -> bool:
        nonlocal slept
        if is_late and role == ACTOR and port._told_finished and not slept:
            slept = True
            time.sleep(LATE_S)
        port.progress()
        if is_late and role == LEARNER:
            port.stop()
        if role == REPLAY:
            port.poll(None)
        if port.stopping:
            port.finish()
        elif role == LEARNER:
            watch(port, changes)
        elif role == ACTOR:
            port.send_report(np.zeros(len(REPORT_FIELDS[ACTOR])))
        return False

    until(lambda: port.finished, step, port, topology.name(rank), 60.0)
    return changes + port.poll_changes() if role == LEARNER else None


def watch(port, changes: list) -> None:
    """Have who is lost replaced; stop once it is told that nobody can be."""
    new, reports = port.poll_changes(), port.poll_reports()
    changes += new
    for change in new:
        if change.what == LOST:
            port.replace(change.rank, {})
    if reports and len(changes) == 2:
        changes.append(("reports", len(reports)))
        port.stop()


def main() -> None:
    """Be one rank."""
    comm, topology = MPI.COMM_WORLD, Topology(5, 1)
    port = make_port(comm, topology, LIMITS, command=sys.argv[1:])
    changes = play(port, topology, comm.rank)
    if changes is not None:
        print(json.dumps(changes), flush=True)
    os.write(1, b"ended in order\n")
    mpi_world.leave(True)


if __name__ == "__main__":
    main()
