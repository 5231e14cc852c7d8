"""``apex bench rates``: does one replay rank hold given rates in and out, by default those of the paper?

Synthetic actors and a synthetic learner keep to a pace; the replay rank is the real one. Memory is looked at
all the while: each process's own share of it (PSS), so that what ranks lend each other counts once.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apex import leftovers, output_file, processes
from apex import topology as topologies
from apex.config import ConfigError
from apex.say import say
from launch.bench import synthetic
from launch.bench.report import machine, write_json
from launch.bench.transports_run import Failed, Job, command, read_ranks, summarise

PAPER_TRANSITIONS_PER_S, PAPER_BATCHES_PER_S = 12_500.0, 19.0
"""Horgan et al. 2018, section 4.1: 360 actors send 12.5 K transitions/s; training on 19 batches/s."""
_RATES, _MEMORY = (
    ("transitions_per_s", "batches_per_s"),
    ("memory_mb_start", "memory_mb_end", "memory_mb_per_min"),
)
_HELD = 0.99  # of the rate asked for
_LOOK_S, _STARTS_S = 0.5, 60.0
_WATCHED = 0.9  # of the time: by then every buffer has been used
_LAST = 3  # looks at memory that may be of processes that are ending


@dataclass(frozen=True)
class Options:
    """What is asked for: rates in transitions/s and batches of 512 a second, for so many seconds."""

    transitions_per_s: float = PAPER_TRANSITIONS_PER_S
    batches_per_s: float = PAPER_BATCHES_PER_S
    seconds: float = 60.0
    actors: int = 2
    transport: str = "mpi"


FIELDS = tuple(field.name for field in dataclasses.fields(Options))


def run(options: Options, json_path: Path | None) -> int:
    """Run, print, write; return 0 if both rates were held, else 1. Raises :class:`ConfigError`."""
    out = output_file.asked_for("--json", json_path, output_file.JSON)
    if options.transport not in ("mpi", "zmq"):
        raise ConfigError(f"--transport {options.transport}: apex bench rates measures mpi or zmq")
    if not all(0 < getattr(options, name) < np.inf for name in (*_RATES, "seconds")):
        raise ConfigError("apex bench rates: rates and seconds must be above 0")
    try:
        row = measure(options)
    except Failed as failed:
        raise ConfigError(f"apex bench rates: {failed}") from None
    about = machine({}, None)
    _show(about, options, row)
    if out is not None:
        write_json(out, about, [row])
    return 0 if row["held"] else 1


def measure(options: Options) -> dict:
    """Return the rates that were reached, latencies, CPU, losses, and memory over time."""
    ranks = topologies.make(synthetic.config(options.actors)).size
    with leftovers.folder("apex-rates-") as folder:
        arguments = [
            "--transport", options.transport, "--workload", "mixed", "--seconds", str(options.seconds),
            "--folder", str(folder),
            "--rate", str(options.transitions_per_s / options.actors), "--batches-per-s",
            str(options.batches_per_s),
        ]  # fmt: skip
        with Job(command(options.transport, ranks, "launch.bench.synthetic_rank", arguments), folder) as job:
            memory = _watch(job, options.seconds + _STARTS_S)
        found = summarise(read_ranks(folder, ranks, job), sampling=True)
    asked = {name: getattr(options, name) for name in _RATES}
    return (
        {
            "transport": options.transport,
            "actors": options.actors,
            "seconds": options.seconds,
            "held": all(found[name] >= _HELD * rate for name, rate in asked.items()),
        }
        | {f"asked_{name}": rate for name, rate in asked.items()}
        | found
        | _over_time(memory, options.seconds)
    )


def _watch(job: Job, limit_s: float) -> list[tuple[float, float]]:
    """Return (seconds, MB) of the job's memory until its end."""
    seen, start = [], time.monotonic()
    while job.running():
        if time.monotonic() - start > limit_s:
            raise Failed(f"not done within {limit_s:.0f} s: {job.complaint()}")
        seen.append((time.monotonic() - start, sum(map(processes.proportional_mb, job.processes()))))
        time.sleep(_LOOK_S)
    job.wait(1.0)
    return seen


def _over_time(memory: list[tuple[float, float]], seconds: float) -> dict:
    """Return the memory at start and end of the last part of the run, and its slope in MB a minute."""
    seen = np.array(memory[:-_LAST])
    seen = seen[seen[:, 0] >= seen[-1, 0] - _WATCHED * seconds] if len(seen) else seen
    if len(seen) < 2:
        return dict.fromkeys(_MEMORY)
    return dict(
        zip(_MEMORY, (seen[0, 1], seen[-1, 1], 60.0 * float(np.polyfit(seen[:, 0], seen[:, 1], 1)[0])))
    )


def _show(machine: dict, options: Options, row: dict) -> None:
    """Print what was asked for and what was reached."""
    say(
        f"{machine['cores']} cores of {machine['cpu']}, load {machine['load'][0]}; "
        f"{options.actors} actors over {options.transport}"
    )
    for name in _RATES:
        say(f"  {name:<20} {row[name]:.1f} of {getattr(options, name):g} asked for")
    for name in ("mb_per_s", "sample_ms_p50", "sample_ms_p99", "cpu_s_per_million", "lost", *_MEMORY):
        say(f"  {name:<20} " + ("-" if row[name] is None else f"{row[name]:.1f}"))
    say(f"  {'held' if row['held'] else 'not held'} for {options.seconds:g} s")
