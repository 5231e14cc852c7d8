"""A storm without end, as one of its ranks.

The other half of the suite ``disturbance``, whose test looks on from outside.

The rank goes on until there is a file ``end`` in the folder. All the while it tells what it has done in
``status-RANK``, and in the end it leaves its ledger in ``rank-RANK``.
"""

import json
import pickle
import time
from pathlib import Path

from ledger import NEVER, REPORT, Scenario
from stress_base import until, used_publishes
from stress_roles import stormer

from apex.schema import Limits
from apex.topology import ACTOR, LEARNER, LEARNER_RANK, REPLAY, Topology

SCENARIO = Scenario(
    0, NEVER, 0, 1, 1 << 18, 2 << 20, Limits(4 << 20, 96 << 10, 3, 3, 1 << 18), delay_s=0.0005
)
LONGEST_S = 900.0  # of a whole storm, on a machine where others compute
_TELLS_EVERY_S = 0.1


def play(port, topology: Topology, rank: int, folder: Path) -> None:
    """Play ``rank`` to the end."""
    storm = _EndlessStorm(port, topology, rank, folder)
    until(lambda: storm.role.finished, storm.step, port, topology.name(rank), LONGEST_S)
    outcome = {"ledger": storm.role.close(), "refused": port.refused}
    write(folder / f"rank-{rank}", pickle.dumps(outcome))


def write(path: Path, data: bytes) -> None:
    """Write a file that is read at the same time."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    temporary.replace(path)


class _EndlessStorm:
    def __init__(self, port, topology: Topology, rank: int, folder: Path):
        self.role = stormer(topology, rank, port, SCENARIO, 0)
        self.port, self.rank, self.folder = port, rank, folder
        self._steps, self._next_look = 0, 0.0

    def step(self) -> bool:
        """Do one thing; look and tell now and then."""
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _TELLS_EVERY_S
            ending = (self.folder / "end").exists()
            if ending:
                self.port.request_stop()
            write(
                self.folder / f"status-{self.rank}", json.dumps(self._status() | {"ending": ending}).encode()
            )
        self._steps += 1
        return self.role.step()

    def _status(self) -> dict:
        ledger = self.role.ledger
        return {
            "steps": self._steps,
            "received": sum(map(len, ledger.received.values())) + len(ledger.weights),
            "sent": sum(map(len, ledger.sent.values())),
            "reports": sum(len(seals) for (kind, *_), seals in ledger.sent.items() if kind == REPORT),
            "published": len(ledger.published),
            "publish buffers": used_publishes(self.port) if self.port.rank == LEARNER_RANK else 0,
            "full": self._is_full(),
            "stopping": self.port.stopping,
        }

    def _is_full(self) -> bool:
        """Whether all that this rank may have open, but for a report, is."""
        role = self.role
        if role.role == LEARNER:
            return len(role.requested) == SCENARIO.limits.prefetch
        if role.role == REPLAY:
            return True
        return role.asked is not None and (role.role != ACTOR or len(role.in_flight) >= role.credits)
