"""One rank of an MPI test: plays what it is told, and the first rank prints what came of it as one line of
JSON.

Usage: stress_mpi_ports.py REPLAY_RANKS (scenarios | stall) (lend | send | mixed)
       stress_mpi_ports.py REPLAY_RANKS endless (lend | send) FOLDER
"""

import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np
import stress_endless
from mpi4py import MPI
from port_conformance import SCENARIOS, judge
from stress_base import mpi_port, publish, send_priorities, until, used_publishes
from stress_roles import stormer

from apex.schema import Limits, aligned_bytes, weight_header
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY, Topology
from apex.transport import shared_memory

LONGEST_ROUND_S = 300.0
SHARE = sys.argv[3] != "send"
if sys.argv[3] == "mixed":  # ranks of either parity are a host
    shared_memory.identity = lambda of_host=shared_memory.identity: f"{of_host()} {MPI.COMM_WORLD.rank % 2}"
STALL_S = 3.0
FOLDER = Path(tempfile.gettempdir())  # the job's own
PUBLISHES = 200
POLLS = 100  # of a replay rank, while the learner makes one training step
STALL_LIMITS = Limits(sample_nbytes=1 << 10, priority_nbytes=1 << 20, prefetch=2, intake_in_flight=3)
WEIGHT_NBYTES = 2 << 20


def scenarios(comm, topology: Topology) -> dict | None:
    """Play all scenarios of the conformance suite; return their outcomes on the first rank."""
    ledgers = {
        name: [_round(comm, topology, name, seed) for seed in range(s.rounds)]
        for name, s in SCENARIOS.items()
    }
    gathered = comm.gather(ledgers)
    if comm.rank == 0:
        return judge(topology, {name: list(zip(*(ranks[name] for ranks in gathered))) for name in SCENARIOS})


def _round(comm, topology: Topology, name: str, seed: int):
    port = mpi_port(comm, topology, SCENARIOS[name].limits, SHARE)
    role = stormer(topology, comm.rank, port, SCENARIOS[name], seed)
    until(lambda: role.finished, role.step, port, topology.name(comm.rank), LONGEST_ROUND_S)
    return role.close()


class Stall:
    """For three seconds replay takes no intake, all actors but the last sleep with weights on their way, and
    the learner publishes.
    """

    def __init__(self, comm, topology: Topology):
        self.topology = topology
        self.role, self.index = topology.role(comm.rank)
        self.name = topology.name(comm.rank)
        self.port = mpi_port(comm, topology, STALL_LIMITS, SHARE)
        self.into = aligned_bytes(WEIGHT_NBYTES)
        self.seen: dict = {}
        comm.Barrier()
        self.started = time.monotonic()

    def play(self) -> dict:
        """Play this rank's part, then the end; return what it has seen."""
        parts = {LEARNER: self._publish, REPLAY: self._take_nothing, EVALUATOR: self._follow}
        actor = self._send if self.index == self.topology.num_actors - 1 else self._sleep
        parts.get(self.role, actor)()
        self.port.finish()
        self._until(lambda: self.port.finished, self._wind_down)
        return self.seen

    def _until(self, holds, step) -> None:
        until(holds, lambda: self.port.progress() or step(), self.port, self.name, LONGEST_ROUND_S)

    def _for(self, seconds: float, step=lambda: False) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= end, step)

    def _is_over(self) -> bool:
        return time.monotonic() - self.started > STALL_S

    def _publish(self) -> None:
        message = aligned_bytes(WEIGHT_NBYTES)
        for version in range(1, PUBLISHES + 1):
            message[:] = version  # every byte, so that a mixture of two shows
            message[:16].view(np.int64)[:] = version, version
            publish(self.port, message)
            self._for(0.008)
            if version == PUBLISHES // 2:  # however late they are, later versions come after they have asked
                self._until(self._sleepers_have_asked, lambda: False)
        self.seen["publishes"] = used_publishes(self.port)
        for replay in range(self.topology.replay_ranks):
            send_priorities(self.port, replay, aligned_bytes(STALL_LIMITS.priority_nbytes))
        self._train_until_replay_has_polled()
        self._until(self._is_over, lambda: False)
        self._for(0.5)  # now replay takes intake again
        self._until(lambda: self.port.stop_requested, lambda: False)
        self.port.stop()

    def _sleepers_have_asked(self) -> bool:
        return all((FOLDER / f"asked-{sleeper}").exists() for sleeper in range(self.topology.num_actors - 1))

    def _train_until_replay_has_polled(self) -> None:
        """Make one long training step, which calls nothing of MPI: nobody else may wait for it."""
        (FOLDER / "training").touch()
        polled = [FOLDER / f"polled-{replay}" for replay in range(self.topology.replay_ranks)]
        end = time.monotonic() + LONGEST_ROUND_S
        while not all(path.exists() for path in polled) and time.monotonic() < end:
            time.sleep(0.01)
        self.seen["polled"] = [path.exists() for path in polled]

    def _take_nothing(self) -> None:
        self.seen |= {"priorities": 0}
        self._polls = 0  # while the learner trains
        self._until(self._is_over, lambda: self._poll(None))
        self._until(lambda: self.port.stopping, lambda: self._poll(aligned_bytes(1 << 10)))

    def _poll(self, landing) -> bool:
        event = self.port.poll(landing)
        if self._polls < POLLS and (FOLDER / "training").exists():
            self._polls += 1
            if self._polls == POLLS:
                (FOLDER / f"polled-{self.index}").touch()
        self.seen["priorities"] += hasattr(event, "message")
        return event is not None

    def _follow(self) -> None:
        self.seen["versions"] = []
        self._until(lambda: self.port.stopping, self._ask)

    def _ask(self) -> bool:
        self.port.request_weights(1 + max(self.seen["versions"], default=0), self.into)
        arrived = self.port.poll_weights()
        if arrived:
            self.seen["versions"].append(weight_header(self.into)[0])
            if self.seen["versions"][-1] == PUBLISHES:
                self.port.request_stop()  # not before, however slow the machine
        return arrived

    def _sleep(self) -> None:
        before = FOLDER / f"asked-{self.index - 1}"
        self._until(lambda: self.index == 0 or before.exists(), lambda: False)
        self._for(0.2)  # each asks for a later version than the one before, however slow the machine
        self.port.request_weights(0, self.into)
        (FOLDER / f"asked-{self.index}").touch()
        time.sleep(STALL_S)
        self._until(self.port.poll_weights, lambda: False)  # sent long ago; in pieces, they may still arrive
        self.seen["slept_over"] = weight_header(self.into)[0]
        self.seen["whole"] = bool((self.into[16:] == self.seen["slept_over"]).all())

    def _send(self) -> None:
        self.seen["sent"] = 0
        self._batch = self.port.intake_memory(1, 1 << 10)[0]
        self._for(STALL_S - 1.0, self._send_intake)  # ranks do not start at exactly the same time
        self.seen["sent_in_stall"] = self.seen["sent"]
        self._until(lambda: self.port.stopping, self._send_intake)

    def _send_intake(self) -> bool:
        self.port.completed_intake()
        may_send = self.port.can_send_intake()
        if may_send:
            self.port.send_intake(0, self._batch)
            self.seen["sent"] += 1
        return may_send

    def _wind_down(self) -> bool:
        return self.role == REPLAY and self._poll(aligned_bytes(1 << 10))


def stall(comm, topology: Topology) -> dict | None:
    """Play the stall; return on the first rank what all have seen, by role."""
    gathered = comm.gather(Stall(comm, topology).play())
    if comm.rank == 0:
        seen = {role: [] for role in (LEARNER, REPLAY, EVALUATOR, ACTOR)}
        for rank, values in enumerate(gathered):
            seen[topology.role(rank)[0]].append(values)
        return seen


def endless(comm, topology: Topology) -> None:
    """Play a rank of the suite ``disturbance``."""
    port = mpi_port(comm, topology, stress_endless.SCENARIO.limits, SHARE)
    stress_endless.play(port, topology, comm.rank, Path(sys.argv[4]))


def main() -> None:
    """Play what the arguments say; any exception ends the job."""
    comm, part = MPI.COMM_WORLD, {"scenarios": scenarios, "stall": stall, "endless": endless}[sys.argv[2]]
    try:
        outcome = part(comm, Topology(comm.size, int(sys.argv[1])))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)
    if comm.rank == 0:
        print(json.dumps(outcome))


if __name__ == "__main__":
    main()
