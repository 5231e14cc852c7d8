"""One rank of a test: the learner publishes, and goes on when every actor has it.

The first rank prints how many each has had.

Usage: stress_publishes.py PUBLISHES NBYTES
"""

import sys

import numpy as np
from mpi4py import MPI
from stress_base import mpi_port, publish

from apex.loop import Wait
from apex.schema import Limits, aligned_bytes, weight_header
from apex.topology import ACTOR, LEARNER, REPLAY, Topology

PUBLISHES, NBYTES = int(sys.argv[1]), int(sys.argv[2])
LIMITS = Limits(1 << 12, 1 << 12, prefetch=1, intake_in_flight=1)


class Part:
    """What one rank does."""

    def __init__(self, comm):
        self.comm, self.topology = comm, Topology(comm.size, 1)
        self.role, _ = self.topology.role(comm.rank)
        self.port, self.weights = mpi_port(comm, self.topology, LIMITS), aligned_bytes(NBYTES)

    def play(self) -> int:
        """Play all of it; return how many publishes came."""
        came = sum(self._one(version) for version in range(1, PUBLISHES + 1))
        if self.role == LEARNER:
            self.port.stop()
        self.port.finish()
        self._until(lambda: self.port.finished)
        return came

    def _one(self, version: int) -> bool:
        """Publish, or take what is published; return whether it came, once it has come everywhere."""
        if self.role == LEARNER:
            self.weights[:16].view(np.int64)[:] = version, version
            publish(self.port, self.weights)
        elif self.role == ACTOR:
            self.port.request_weights(version, self.weights)
            self._until(self.port.poll_weights)
        everywhere = self.comm.Ibarrier()
        self._until(everywhere.Test)
        return self.role == ACTOR and weight_header(self.weights)[0] == version

    def _until(self, holds) -> None:
        wait = Wait()
        while not holds():
            self.port.progress()
            if self.role == REPLAY:
                self.port.poll(None)  # the learner's messages are heard here
            wait.idle()


def main() -> None:
    """Any exception ends the job, by ``python -m mpi4py``."""
    counts = MPI.COMM_WORLD.gather(Part(MPI.COMM_WORLD).play())
    if counts:
        print(counts)


if __name__ == "__main__":
    main()
