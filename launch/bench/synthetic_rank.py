"""One rank of a synthetic world: `mpirun -n 4 python -m launch.bench.synthetic_rank --transport mpi ...`."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.config import Config
from apex.say import protect, warn
from apex.schema import EnvSpec, Limits, limits
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY, Topology
from launch.bench.pickled import PICKLED_NBYTES, Form, PickledWire
from launch.run import world

if TYPE_CHECKING:
    from apex.transport.endpoint import Endpoint
    from launch.bench import synthetic

TRANSPORTS = ("mpi", "zmq", "mpi-pickle", "zmq-pickle")
WORKLOADS = ("intake", "mixed", "idle")
_WATCHDOG_S, _DRAIN_S = 3600.0, 20.0
_IDLE_REPORTS_S = 1.0  # as rarely as in a run with long rows of the log


def main() -> int:
    """Be one rank; write what it counted to ``FOLDER/rank-N.json``."""
    protect()
    options = _parser().parse_args()
    told = world.from_environment()
    assert told is not None, "a rank belongs to a world"
    rank, size = told
    topology = Topology(size, options.replay_ranks)
    joined = _Joined(options.transport, size)
    try:
        found = _play(options, topology, rank, joined)
        options.folder.joinpath(f"rank-{rank}.json").write_text(json.dumps(found, allow_nan=False))
    except BaseException:
        warn(f"{topology.name(rank)} failed:\n{traceback.format_exc()}")
        joined.abort()
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="synthetic_rank", description=__doc__, allow_abbrev=False)
    parser.add_argument("--transport", choices=TRANSPORTS, default="mpi")
    parser.add_argument("--workload", choices=WORKLOADS, default="intake")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of the window that is measured")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="transitions/s of each actor; 0: as fast as it can"
    )
    parser.add_argument(
        "--batches-per-s", type=float, default=0.0, help="pace of the learner; 0: as fast as it can"
    )
    parser.add_argument("--replay-ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="where each rank writes its JSON")
    return parser


def _play(options: argparse.Namespace, topology: Topology, rank: int, joined: _Joined) -> dict:
    from apex.loop import StopSignals, drive, wait_of
    from apex.watchdog import Watchdog
    from launch.bench import synthetic

    reports = {"report_period_s": _IDLE_REPORTS_S} if options.workload == "idle" else {}
    config = synthetic.config(topology.num_actors, options.replay_ranks, **reports)
    port = joined.make_port(topology, config, synthetic.SPEC, limits(config, synthetic.SPEC))
    role = _role(options, config, topology, rank, port)
    drive(role, Watchdog(topology.name(rank), _WATCHDOG_S), _DRAIN_S, StopSignals(), wait_of(port))
    name, index = topology.role(rank)
    found = {"role": name, "index": index, "rank": rank} | role.usage.summary() | role.results()
    role.close()
    port.close()
    return found


def _role(
    options: argparse.Namespace, config: Config, topology: Topology, rank: int, port: Any
) -> synthetic.Measured | synthetic.MeasuredReplay:
    from launch.bench import synthetic

    role, index = topology.role(rank)
    if options.workload == "idle" and role == LEARNER:
        return synthetic.IdleLearner(port, options.seconds, _IDLE_REPORTS_S)
    if options.workload == "idle" and role != REPLAY:
        return synthetic.Idle(port, role, _IDLE_REPORTS_S)
    sampling = options.workload == "mixed"
    if role == LEARNER:
        return synthetic.SyntheticLearner(config, port, sampling, options.seconds, options.batches_per_s)
    if role == EVALUATOR:
        return synthetic.Idle(port)
    if role == ACTOR:
        return synthetic.SyntheticActor(config, port, index, options.rate)
    return synthetic.MeasuredReplay(config, port, index, topology.num_actors, sampling, options.seconds)


class _Joined:
    """This rank's membership of a world: makes its port, and can end all ranks."""

    def __init__(self, transport: str, size: int):
        self._base, pickled, _ = transport.partition("-pickle")
        self._worlds, self._wires = world.load(self._base)
        self._pickled = bool(pickled)
        self._world = self._worlds.world(size)

    def make_port(self, topology: Topology, config: Config, spec: EnvSpec, limits: Limits) -> Endpoint:
        """Return the port of this rank."""
        if not self._pickled:
            return world.make_port(self._wires.make_wire(self._world, topology, limits), topology, limits)
        plain = replace(limits, sample_nbytes=PICKLED_NBYTES, intake_nbytes=PICKLED_NBYTES)
        wire = PickledWire(self._wires.make_wire(self._world, topology, plain), Form(config, spec))
        return world.make_port(wire, topology, limits)

    def abort(self) -> None:
        """End all ranks."""
        self._worlds.abort(False)


if __name__ == "__main__":
    sys.exit(main())
