"""A tolerant world whose last actor is late, or is killed, between its word that it is through and the
learner's that all is done.

The learner prints as one line of JSON whose loss it saw. Usage: stress_leaving.py sleeps|dies|stops
"""

import json
import os
import signal
import sys
import time

from mpi4py import MPI
from stress_base import mpi_port, until

from apex.schema import Limits
from apex.topology import LEARNER, REPLAY, Topology
from apex.transport import mpi_world

LIMITS = Limits(sample_nbytes=1 << 10, priority_nbytes=1 << 10, prefetch=2, intake_in_flight=3)
LATE_S, LAST = 3.0, 4


def is_late(how: str) -> None:
    """Have this rank be elsewhere while all others leave."""
    if how == "sleeps":
        time.sleep(LATE_S)
    else:
        os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[how])


def play(port, role: str, how: str) -> list:
    """Play a rank until the end; return what it saw of losses."""
    begun, changes, was_late = time.monotonic(), [], False

    def step() -> bool:
        nonlocal was_late
        port.progress()
        if role == REPLAY:
            port.poll(None)
        if port.rank == LAST and port._sent_finished and not was_late:
            was_late = True
            is_late(how)
        if port.stopping:
            port.finish()
        elif role == LEARNER:
            port.stop()
        if role == LEARNER:
            changes.extend(port.poll_changes())
            if how == "stops" and time.monotonic() > begun + LATE_S:
                for rank in port.awaited():
                    port.kill(rank)
        return False

    until(lambda: port.finished, step, port, f"rank {port.rank}", 300.0)
    return changes


def main() -> None:
    """Be one rank."""
    comm, topology = MPI.COMM_WORLD, Topology(5, 1)
    port = mpi_port(comm, topology, LIMITS, command=["/nonexistent/program"])
    role = topology.role(comm.rank)[0]
    changes = play(port, role, sys.argv[1])
    if role == LEARNER:
        print(json.dumps({"lost": [change.rank for change in changes]}), flush=True)
    print(f"rank {comm.rank} has left", flush=True)
    mpi_world.leave(True)


if __name__ == "__main__":
    main()
