"""One rank of a test over ZeroMQ: plays what it is told, and writes what it saw into a file of its own.

Usage: port_storm.py REPLAY_RANKS PART FOLDER; the parts are the functions of ``PARTS``.
"""

import sys
import time
import traceback
from pathlib import Path

from ledger import REPORT, Ledger, Scenario
from port_conformance import SCENARIOS
from stormers import stormer

from apex.schema import Limits
from apex.topology import Topology
from apex.transport.drive import Wait
from apex.transport.zmq import make_port
from apex.transport.zmq_world import abort, world
from launch.world import from_environment

LONGEST_ROUND_S = 60.0


def until(holds, step, port, name: str) -> None:
    """Call ``step`` until ``holds()``; whoever waits too long says for what, and ends the job."""
    wait, deadline = Wait(), time.monotonic() + LONGEST_ROUND_S
    while not holds():
        if step():
            wait.reset()
        else:
            wait.idle()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} waits for {port.waits_for()}")


def scenarios(job, topology: Topology, folder: Path) -> dict:
    """Play all scenarios of the conformance suite; return the ledgers of this rank."""
    return {name: [_round(job, topology, name, seed) for seed in range(s.rounds)] for name, s in SCENARIOS.items()}


def _round(job, topology: Topology, name: str, seed: int) -> dict:
    port = make_port(job, topology, SCENARIOS[name].limits)
    role = stormer(topology, job.rank, port, SCENARIOS[name], seed)
    until(lambda: role.finished, role.step, port, topology.name(job.rank))
    port.close()
    return _plain(role.close())


def _plain(ledger: Ledger) -> dict:
    """Return a ledger as plain dictionaries."""
    ledger = vars(ledger)
    return ledger | {"sent": dict(ledger["sent"]), "received": dict(ledger["received"])}


PUMP = Scenario(0, 10**9, 0, 1, 1 << 18, 2 << 20, Limits(4 << 20, 96 << 10, 3, 3, 1 << 18), delay_s=0.0005)


class Pump:
    """A storm without end, until there is a file ``end``; tells all the while how many messages have come."""

    def __init__(self, job, topology: Topology, folder: Path):
        self.port = make_port(job, topology, PUMP.limits)
        self.role = stormer(topology, job.rank, self.port, PUMP, 0)
        self.name, self.folder, self.rank = topology.name(job.rank), folder, job.rank
        self._next_look = 0.0
        if self.port._hub is not None:
            _write(folder / f"endpoint-{job.rank}", self.port._hub.endpoint)

    def play(self) -> dict:
        """Return the ledger, and what was refused."""
        until(lambda: self.role.finished, self._step, self.port, self.name)
        return _plain(self.role.close()) | {"refused": self.port.refused}

    def _step(self) -> bool:
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + 0.1
            sent_reports = sum(len(seals) for (kind, *_), seals in self.role.ledger.sent.items() if kind == REPORT)
            _write(self.folder / f"counts-{self.rank}", f"{sum(map(len, self.role.ledger.received.values()))} {sent_reports}")
            if (self.folder / "end").exists():
                self.port.request_stop()
        return self.role.step()


def _write(path: Path, text: str) -> None:
    """Write a file that is read at the same time."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def pump(job, topology: Topology, folder: Path) -> dict:
    """Play :class:`Pump`."""
    return Pump(job, topology, folder).play()


PARTS = {"scenarios": scenarios, "pump": pump}


def main() -> None:
    """Play what the arguments say; any exception ends the job."""
    rank, size = from_environment()
    job, folder = world(size), Path(sys.argv[3])
    try:
        seen = PARTS[sys.argv[2]](job, Topology(size, int(sys.argv[1])), folder)
        (folder / f"rank-{rank}").write_text(repr(seen))
    except BaseException:
        traceback.print_exc()
        abort(job)


if __name__ == "__main__":
    main()
