"""``apex compare``: which transport is faster on this machine, for which workload, and by how much.

Every transport takes its turn within each repetition, so that a noisy machine hits all of them alike, and
a ratio is the median over repetitions of the ratio inside one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apex import config as configuration
from apex import output_file
from apex.config import ConfigError, nearest
from launch.bench import copy_rate, transports_report, transports_run
from launch.bench.transports_run import Case
from launch.run import world

Measure = Callable[[Case, float, str, float], dict]
TRANSPORTS = ("mpi", "zmq", "mpi-pickle", "zmq-pickle")
TRAINABLE = ("mpi", "zmq")  # the pickled ones carry no real run
REGIMES = ("free", "busy")
WORKLOADS = ("intake", "mixed", "preset")
MOST_ACTORS, MOST_REPETITIONS, MOST_SECONDS = 256, 1_000, 3_600.0
_QUICK_BUDGET_S = 145.0
_LAST_RUN_S = 20.0  # how long a run may go on after the budget is spent


@dataclass(frozen=True)
class Options:
    """What to compare. Lists are in the order of the tables."""

    transports: tuple[str, ...] = TRANSPORTS
    actors: tuple[int, ...] = (1, 2, 4, 6)
    repetitions: int = 3
    seconds: float = 3.0
    regimes: tuple[str, ...] = REGIMES
    workloads: tuple[str, ...] = WORKLOADS
    preset: str = "pong-small"
    preset_seconds: float = 15.0
    baseline: str = "zmq-pickle"
    budget_s: float = math.inf  # after which no further run is begun

    def checked(self) -> Options:
        """Return the options, or refuse them in one line."""
        for name, choices in (("transports", TRANSPORTS), ("regimes", REGIMES), ("workloads", WORKLOADS)):
            _refuse_unknown(f"--{name}", getattr(self, name), choices)
        _refuse_unknown("--baseline", [self.baseline], TRANSPORTS)
        _refuse_repeated("--actors", self.actors)
        _refuse_outside("--actors", self.actors, 1, MOST_ACTORS)
        _refuse_outside("--repetitions", [self.repetitions], 1, MOST_REPETITIONS)
        _refuse_outside("--seconds", [self.seconds, self.preset_seconds], 0.2, MOST_SECONDS)
        if "preset" in self.workloads:
            configuration.load(self.preset)
        return self


FIELDS = tuple(field.name for field in dataclasses.fields(Options))
QUICK: dict[str, Any] = {
    "actors": (1, 2),
    "repetitions": 1,
    "seconds": 1.0,
    "workloads": ("intake", "mixed"),
    "budget_s": _QUICK_BUDGET_S,
}
"""What `--quick` changes, where nothing else is asked for."""


def _refuse_unknown(option: str, given: Iterable, choices: Iterable[str]) -> None:
    unknown = next((name for name in given if name not in choices), None)
    if unknown is not None:
        raise ConfigError(f"{option}: unknown '{unknown}'; {nearest(unknown, choices)}")
    _refuse_repeated(option, given)


def _refuse_repeated(option: str, given: Iterable) -> None:
    given = list(given)
    if not given or len(set(given)) < len(given):
        raise ConfigError(f"{option}: name one or more, each once")


def _refuse_outside(option: str, given: Iterable[float], low: float, high: float) -> None:
    for value in given:
        if not low <= value <= high:
            raise ConfigError(f"{option} {value:g}: must be from {low:g} to {high:g}")


def run(
    options: Options,
    json_path: Path | None = None,
    png_path: Path | None = None,
    report_path: Path | None = None,
    command: str = "apex compare",
    measure: Measure = transports_run.measure,
) -> int:
    """Compare, print the tables, write the files; return the exit status: 1 if every run failed.

    Raises :class:`ConfigError` before anything is started where an option cannot be met.
    """
    options = options.checked()
    _refuse_inside_a_world()
    json_out = output_file.asked_for("--json", json_path, output_file.JSON)
    png_out = output_file.asked_for("--png", png_path, output_file.PICTURE)
    report_out = output_file.asked_for("--report", report_path, output_file.MARKDOWN)
    machine = transports_report.machine() | {"memcpy_mb_per_s": copy_rate.rates(), "command": command}
    with _interrupted_by_signals():
        rows, left_out = measured(options, measure)
    machine |= {"load_after": round(os.getloadavg()[0], 2), "left_out": left_out}
    comparison = transports_report.Comparison(machine, rows, options.baseline)
    comparison.show()
    for out, write in (
        (json_out, comparison.write_json),
        (png_out, comparison.write_png),
        (report_out, comparison.write_report),
    ):
        if out is not None:
            write(out)
    return 0 if any("error" not in row for row in rows) else 1


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does, so that the run that is on is cleared away."""
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse_inside_a_world() -> None:
    if world.from_environment() is not None:
        raise ConfigError("apex compare starts worlds of its own; start it without mpirun")


def cases(options: Options) -> list[Case]:
    """Return all runs in order: workload, regime, actors; in each repetition the transports take turns."""
    found = []
    for workload, regime, actors in itertools.product(options.workloads, options.regimes, options.actors):
        for repetition in range(options.repetitions):
            shift = repetition % len(options.transports)
            turn = options.transports[shift:] + options.transports[:shift]
            found += [
                Case(workload, regime, actors, repetition, t)
                for t in turn
                if workload != "preset" or t in TRAINABLE
            ]
    return found


def measured(options: Options, measure: Measure) -> tuple[list[dict], int]:
    """Return the rows of all runs, and how many were left out for want of time."""
    start, todo = time.monotonic(), cases(options)
    rows: list[dict] = []
    with transports_report.progress() as told:
        for number, case in enumerate(todo, 1):
            left_s = start + options.budget_s - time.monotonic()
            if left_s < 0:
                return rows, len(todo) - len(rows)
            told(
                f"{number} of {len(todo)}: {case.transport}, {case.actors} actors, "
                f"{case.workload}, {case.regime} cores"
            )
            seconds = options.preset_seconds if case.workload == "preset" else options.seconds
            rows.append(measure(case, seconds, options.preset, left_s + _LAST_RUN_S))
    return rows, 0
