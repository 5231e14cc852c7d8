"""``apex bench system``: a whole run of a preset, and what each role uses of the machine.

It trains for real, in a folder that is thrown away, and looks at the run's log and at the kernel's accounts
of its processes over a window that begins when the learner has made its first steps.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from apex import config as configuration
from apex import leftovers, output_file, processes, variables
from apex import topology as topologies
from apex.config import ConfigError
from apex.run_folder import RunFolder
from apex.say import say
from apex.topology import Topology
from launch.run import world

_STARTS_S, _ENDS_S = 180.0, 30.0
_FIRST_STEPS = 3
_ALWAYS = [
    "run.log_period_s=0.5", "run.stop_at_target=false", "replay.samples_per_insert=0",
    "evaluator.period=1000000", "evaluator.episodes=1",
]  # fmt: skip
_COUNTS = ("agent_steps", "learner_steps", "transitions")


@dataclass(frozen=True)
class Moment:
    """What had been counted at one row of the log, and the CPU seconds of every role at that time."""

    wall_s: float
    counts: dict[str, float]
    cpu_s: dict[str, float]


def run(preset: str, actors: int, seconds: float, overrides: list[str], json_path: Path | None) -> int:
    """Measure, print, write; return the exit status. Raises :class:`ConfigError`."""
    from launch.bench.report import machine, write_json

    out = output_file.asked_for("--json", json_path, output_file.JSON)
    with leftovers.folder("apex-bench-") as directory:
        settings = [*_ALWAYS, f"run.directory={directory}", f"actor.count={actors}", *overrides]
        config = configuration.load(preset, settings)
        if config.run.transport == "local":
            raise ConfigError(
                "apex bench system measures roles in processes of their own; use run.transport mpi or zmq"
            )
        topology = topologies.make(config)
        first, last, row = _measure(preset, settings, topology, directory, seconds)
    rows = [_summary(preset, config.run.transport, actors, first, last, row)]
    about = machine({}, None)
    _show(about, rows)
    if out is not None:
        write_json(out, about, rows)
    return 0


def _measure(
    preset: str, settings: list[str], topology: Topology, directory: Path, seconds: float
) -> tuple[Moment, Moment, dict]:
    """Return the moments at the ends of the window, and the last row of the log."""
    command = [
        *processes.python("launch.cli.main"),
        "train",
        preset,
        *(part for s in settings for part in ("--set", s)),
    ]
    process = processes.start(command, processes.environment_for({}), subprocess.DEVNULL, subprocess.PIPE)
    try:
        row, folder = _wait_for(
            process, directory, lambda row: row["learner_steps"] >= _FIRST_STEPS, _STARTS_S
        )
        first = _moment(row, topology, folder)
        row, _ = _wait_for(
            process, directory, lambda later: later["wall_s"] >= row["wall_s"] + seconds, seconds + _STARTS_S
        )
        return first, _moment(row, topology, folder), row
    finally:
        processes.end(process, _ENDS_S)


def _wait_for(
    process: subprocess.Popen[str], directory: Path, holds: Callable[[dict], bool], limit_s: float
) -> tuple[dict, RunFolder]:
    """Return the first new row of the log for which ``holds(row)``, as soon as it is written."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = process.communicate()[1].strip().splitlines() or ["nothing"]
            raise ConfigError(f"the run ended with status {process.returncode} and said: {said[-1]}")
        folder = next(
            (RunFolder(path) for path in directory.iterdir() if path.is_dir() and not path.is_symlink()), None
        )
        rows = folder.rows()[-1:] if folder is not None else []
        if folder is not None and rows and holds(rows[0]):
            return rows[0], folder
        time.sleep(0.05)
    raise ConfigError(
        f"nothing to measure after {limit_s:g} s: the learner has not made {_FIRST_STEPS} steps"
    )


def _moment(row: dict, topology: Topology, folder: RunFolder) -> Moment:
    return Moment(row["wall_s"], {name: row[name] for name in _COUNTS}, _cpu_seconds(topology, folder))


def _cpu_seconds(topology: Topology, folder: RunFolder) -> dict[str, float]:
    """Return role -> user and system seconds of its processes so far."""
    spent: dict[str, float] = defaultdict(float)
    for pid in processes.all_ids():
        with contextlib.suppress(OSError):  # it has just ended, or belongs to somebody else
            environment = processes.environment_of(pid)
            place = world.from_environment(environment)
            if place is not None and environment.get(variables.RUN_FOLDER) == str(folder.path):
                spent[topology.role(place[0])[0]] += processes.facts(pid).cpu_s
    return dict(spent)


def _summary(preset: str, transport: str, actors: int, first: Moment, last: Moment, row: dict) -> dict:
    """Return one row: rates, and each role's share of the machine in percent of all cores."""
    seconds, cores = last.wall_s - first.wall_s, os.cpu_count() or 1
    rates = {name: (last.counts[name] - first.counts[name]) / seconds for name in _COUNTS}
    spent = {role: total - first.cpu_s.get(role, 0.0) for role, total in last.cpu_s.items()}
    shares = {f"{role}_cpu_pct": 100.0 * used / (seconds * cores) for role, used in spent.items()}
    return {
        "preset": preset, "transport": transport, "actors": actors, "seconds": seconds,
        "transitions_per_s": rates["transitions"], "batches_per_s": rates["learner_steps"],
        "agent_steps_per_s": rates["agent_steps"],
        "learner_wait_pct": row.get("learner_wait_pct"), "staleness": row.get("staleness"),
    } | shares  # fmt: skip


def _show(machine: dict, rows: list[dict]) -> None:
    """Print one line for each value."""
    say(f"{machine['cores']} cores of {machine['cpu']}, load {machine['load'][0]}")
    for row in rows:
        for name, value in row.items():
            say(f"  {name:<20} {value:.1f}" if isinstance(value, float) else f"  {name:<20} {value}")
