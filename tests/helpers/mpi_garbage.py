"""One rank of an MPI job in which every rank sends garbage to every other, beside all that it has to do.

Usage: mpi_garbage.py (lend | send) GARBAGE The first rank prints, as JSON, what the ledgers of all good
messages say, and for every rank what was thrown at it and refused.
"""

import json
import random
import sys
import traceback

import numpy as np
from mpi4py import MPI
from port_conformance import SCENARIOS, judge_rounds
from stress_base import mpi_port, until
from stress_roles import stormer

from apex.metrics import REPORT_FIELDS
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY, Topology
from apex.transport.mpi_comm import CONTROL, HELD, MESSAGES
from apex.transport.wire import Kind

TOPOLOGY, SCENARIO = Topology(4, 1), SCENARIOS["storm"]
LIMITS = SCENARIO.limits
MOST_OPEN = 8  # of one rank's garbage
LONGEST_S = 120.0
EXACT = [
    0,
    1,
    8,
    256,
    LIMITS.sample_nbytes,
    LIMITS.priority_nbytes,
    SCENARIO.weight_nbytes,
    SCENARIO.intake_nbytes,
]
EXACT += [8 * len(names) for names in REPORT_FIELDS.values()]


def is_good(channel: int, source: str, dest: str, tag: int, nbytes: int) -> bool:
    """Whether such a message, from role to role, might be taken for a good one, then or later."""
    if channel == HELD:
        return (source, dest, tag) == (ACTOR, REPLAY, Kind.INTAKE) and nbytes <= SCENARIO.intake_nbytes
    if channel == CONTROL:
        return False  # noise is no JSON object
    to_learner = {
        Kind.WEIGHT_REQUEST: {8} if source in (EVALUATOR, ACTOR) else set(),
        Kind.SAMPLE: {0, LIMITS.sample_nbytes} if source == REPLAY else set(),
    }
    from_learner = {
        Kind.SAMPLE_REQUEST: {0},
        Kind.PRIORITY: {LIMITS.priority_nbytes},
        Kind.WEIGHTS: {0, SCENARIO.weight_nbytes},
    }
    table = to_learner if dest == LEARNER else from_learner if source == LEARNER else {}
    return nbytes in table.get(tag, ())


class Garbage:
    """Throws so many bad messages of random kind, length and content at the other ranks."""

    def __init__(self, port, rank: int, count: int):
        self.port, self.rank, self.left = port, rank, count
        self.rng = random.Random(f"garbage {rank}")
        self.noise = np.frombuffer(self.rng.randbytes(12 << 20), np.uint8)
        self.thrown = [0] * TOPOLOGY.size
        self.open: list[MPI.Request] = []

    def throw(self) -> None:
        """Throw one, unless too many are on their way."""
        self.open = [request for request in self.open if not request.Test()]
        if not self.left or len(self.open) >= MOST_OPEN or self.port.stopping:
            return
        channel = self.rng.choices([MESSAGES, HELD, CONTROL], [8, 2, 1])[0]
        dest = self.rng.choice([rank for rank in range(TOPOLOGY.size) if rank != self.rank])
        tag = self.rng.choice([*range(17), 77, 32_000])
        if channel != CONTROL and dest == TOPOLOGY.replay_ranks_range[0] and self.rng.random() < 0.5:
            channel, tag = HELD, int(Kind.INTAKE)
        nbytes = self._length()
        if is_good(channel, TOPOLOGY.role(self.rank)[0], TOPOLOGY.role(dest)[0], tag, nbytes):
            return
        start = self.rng.randrange(len(self.noise) - nbytes)
        comm, number = self.port.wire.comms.to(dest, channel)
        request = comm.Issend([self.noise[start : start + nbytes], MPI.BYTE], number, tag)
        self.port.wire._sends.append(
            (request, dest, Kind.CONTROL, 0, self.noise)
        )  # the end of the run waits for it
        self.open.append(request)
        self.thrown[dest] += 1
        self.left -= 1

    def _length(self) -> int:
        how = self.rng.random()
        if how < 0.5:
            return self.rng.randrange(300)
        if how < 0.8:
            return max(0, self.rng.choice(EXACT) + self.rng.choice([-1, 0, 1, 8]))
        return self.rng.randrange(1 << 16) if how < 0.97 else self.rng.randrange(8 << 20)


def play(comm, share: bool, count: int) -> dict | None:
    """Play this rank's part of the storm, with garbage; return the outcome on the first rank."""
    port = mpi_port(comm, TOPOLOGY, LIMITS, share)
    role, garbage = stormer(TOPOLOGY, comm.rank, port, SCENARIO, 0), Garbage(port, comm.rank, count)
    wants_to_stop = port.request_stop
    port.request_stop = lambda: None if garbage.left and not port.stopping else wants_to_stop()

    def step() -> bool:
        garbage.throw()
        return role.step()

    until(lambda: role.finished, step, port, TOPOLOGY.name(comm.rank), LONGEST_S)
    told = comm.gather((role.close(), garbage.thrown, port.refused))
    if comm.rank == 0:
        outcome = judge_rounds(TOPOLOGY, SCENARIO, [[ledger for ledger, _, _ in told]])
        return {
            "problems": {kind: texts for kind, texts in outcome["problems"].items() if texts},
            "good": sum(outcome["counts"].values()),
            "thrown": np.sum([thrown for _, thrown, _ in told], axis=0).tolist(),
            "refused": [refused for _, _, refused in told],
        }


def main() -> None:
    """Play what the arguments say; any exception ends the job."""
    try:
        outcome = play(MPI.COMM_WORLD, sys.argv[1] == "lend", int(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    if outcome is not None:
        print(json.dumps(outcome))


if __name__ == "__main__":
    main()
