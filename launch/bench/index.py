"""``apex bench index``: what each priority index and its rivals cost a call, side by side on one core.

The rivals take turns inside each repetition, so that a noisy machine hits all of them alike, and a ratio
is the median over repetitions of the ratio inside one. Every call gets other slots and other masses. A
cold call comes after a copy of as many bytes as a batch of frames has, which is what a replay rank does
between two calls of its index.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from apex.config import ConfigError
from launch.bench import baselines, output_file
from launch.bench import report as bench_report
from launch.bench.baselines import REFERENCE, Rival
from launch.bench.report import Cell

LEAVES, LEAST_LEAVES, MOST_LEAVES = 1 << 21, 50, 1 << 24
SAMPLE, INSERT, INSERTS_A_STEP = 512, 50, 10
OPS = (("sample", SAMPLE), *(("update", k) for k in (8, 50, 512, 2048, 32768)), ("insert", INSERT), ("step", SAMPLE))
COLD_BYTES = 30_000_000
FULL_S, QUICK_S = 280.0, 36.0  # filling included
_FULL_REPETITIONS, _QUICK_REPETITIONS, _LEAST_REPETITIONS = 11, 5, 3
_FEW_CALLS, _MOST_CALLS = 4, 500  # in a row: what to have before repeating more often, and the most
_MOST_WARM_CALLS = 1000  # before these, where caches are to be hot: the others' turns have emptied them
_INPUT_ROWS, _LEAST_SETS = 1 << 20, 16  # random slots, as sets of k that are used in turn; fewer would stay in the caches
_SLOW_S = 0.1


def run(
    json_path: Path | None = None,
    png_path: Path | None = None,
    quick: bool = False,
    leaves: int = LEAVES,
    indexes: list[str] | None = None,
    core: int | None = None,
    budget_s: float | None = None,
) -> int:
    """Measure, print the tables, and write the files asked for; return the exit status.

    ``budget_s`` is the time to stay within, as long as each call can be made a few times. Raises
    :class:`ConfigError` before anything is measured where an argument cannot be met.
    """
    start = time.perf_counter()
    if not LEAST_LEAVES <= leaves <= MOST_LEAVES:
        raise ConfigError(f"--leaves {leaves}: must be from {LEAST_LEAVES} (an insert is {INSERT} slots) to {MOST_LEAVES}")
    baselines.load_native()
    names, left_out = baselines.choose(indexes)
    core = _core(core)
    json_out = output_file.asked_for("--json", json_path, output_file.JSON)
    png_out = output_file.asked_for("--png", png_path, output_file.PICTURE)
    budget_s = budget_s or (QUICK_S if quick else FULL_S)
    with _one_core(core), _one_thread():
        rivals, failed = _fill(names, leaves, must=indexes is not None)
        rows = Bench(rivals, leaves, _QUICK_REPETITIONS if quick else _FULL_REPETITIONS).measure(start + budget_s, bench_report.progress())
    machine = bench_report.machine(rivals, core) | {"leaves": leaves, "seconds": budget_s, "left_out": left_out + failed}
    bench_report.show(machine, rows)
    if json_out is not None:
        bench_report.write_json(json_out, machine, rows)
    if png_out is not None:
        bench_report.write_png(png_out, machine, rows)
    return 0


def _core(asked: int | None) -> int | None:
    """Return the core to run on: the last one this process may use, if none is asked for; None where none can be fixed."""
    if sys.platform != "linux":
        if asked is not None:
            raise ConfigError(f"--core {asked}: this system cannot fix a process to a core")
        return None
    available = sorted(os.sched_getaffinity(0))
    if asked is not None and asked not in available:
        raise ConfigError(f"--core {asked} is not available; choices: {', '.join(map(str, available))}")
    return available[-1] if asked is None else asked


@contextlib.contextmanager
def _one_core(core: int | None) -> Iterator[None]:
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def masses(rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    """Return masses (float64) of priorities that are uniform in [0.01, 1.01)."""
    return (rng.random(shape) + 0.01) ** 0.6


def _fill(names: list[str], leaves: int, must: bool) -> tuple[list[Rival], list[str]]:
    """Return the rivals, full, and in words those that cannot be loaded; raises ConfigError for these if they ``must``."""
    mass, rivals, failed = masses(np.random.default_rng(1), leaves), [], []
    for name in names:
        try:
            rivals.append(baselines.make(name, mass))
        except (ImportError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
            if must:
                raise ConfigError(f"--indexes: {name}: {reason}") from None
            failed.append(f"{name}: {reason}")
    return rivals, failed


class Inputs:
    """Random slots and masses, made before anything is timed.

    The masses go round one set further each time the slots come round, so that a call never sets a
    slot to the mass that it has already.
    """

    def __init__(self, leaves: int):
        self._leaves, self._rng = leaves, np.random.default_rng(2)
        self._sets: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def pools(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return slots (int64[sets, k]) and masses (float64[sets, k])."""
        if k not in self._sets:
            shape = max(_INPUT_ROWS // k, _LEAST_SETS), k
            self._sets[k] = self._rng.integers(0, self._leaves, shape), masses(self._rng, shape)
        return self._sets[k]

    def update(self, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots and masses of the n-th update of k rows."""
        slots, mass = self.pools(k)
        return slots[n % len(slots)], mass[(n + n // len(slots)) % len(slots)]

    def insert(self, n: int) -> tuple[int, np.ndarray]:
        """Return the first slot and the masses of the n-th insert into the ring; no insert wraps around."""
        return n % (self._leaves // INSERT) * INSERT, self.update(INSERT, n)[1]

    def rows(self, k: int, first: int, calls: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots (int64[calls * k]) and masses (float64[calls * k]) of calls from the first-th on, end to end."""
        slots, mass = zip(*(self.update(k, first + n) for n in range(calls)))
        return np.concatenate(slots), np.concatenate(mass)


Progress = Callable[[list[Cell]], AbstractContextManager[Iterator[Cell]]]


class Bench:
    """Rivals taking turns at every cell."""

    def __init__(self, rivals: list[Rival], leaves: int, repetitions: int):
        self.rivals, self.inputs, self._repetitions = rivals, Inputs(leaves), repetitions
        self._calls = dict.fromkeys((rival.name for rival in rivals), 0)
        self._frames = np.ones(COLD_BYTES, np.uint8), np.zeros(COLD_BYTES, np.uint8)

    def measure(self, deadline: float, progress: Progress) -> list[dict]:
        """Return the rows of every cell, by ``deadline`` on the clock of ``time.perf_counter``.

        ``progress(cells)`` is a context manager that yields the cells one by one.
        """
        cells = [Cell(op, k, cache, caller) for caller in ("c", "python") for cache in ("hot", "cold") for op, k in OPS]
        cells = [cell for cell in cells if self._players(cell)]
        to_come = sum(len(self._players(cell)) for cell in cells)
        rows: list[dict] = []
        with _no_collection(), progress(cells) as shown:
            for cell in shown:
                rows += self._rows(cell, (deadline - time.perf_counter()) / (to_come - len(rows)))
        return rows

    def _players(self, cell: Cell) -> list[Rival]:
        able = [rival for rival in self.rivals if cell.op in rival.ops]
        return able if cell.caller == "python" else [rival for rival in able if rival.time_calls is not None]

    def _rows(self, cell: Cell, share_s: float) -> list[dict]:
        players = self._players(cell)
        plans = {rival.name: plan(share_s, self._cost_s(rival, cell), self._repetitions, cell.cache == "hot") for rival in players}
        turns: dict[str, list[np.ndarray]] = {rival.name: [] for rival in players}
        for repetition in range(self._repetitions):
            shift = repetition % len(players)
            for rival in players[shift:] + players[:shift]:
                repetitions, calls, warm = plans[rival.name]
                if repetition < repetitions:
                    turns[rival.name].append(self._turn(rival, cell, calls, warm))
        return [_row(rival, cell, turns[rival.name], turns.get(REFERENCE)) for rival in players]

    def _cost_s(self, rival: Rival, cell: Cell) -> float:
        """Return the seconds that one call and what precedes it take, from one or two that are not kept."""
        for _ in range(2):  # the first may compile or bind something
            start = time.perf_counter()
            self._turn(rival, cell, 1, warm=0)
            cost = time.perf_counter() - start
            if cost > _SLOW_S:
                break
        return cost

    def _turn(self, rival: Rival, cell: Cell, calls: int, warm: int) -> np.ndarray:
        """Return the µs (float64[calls]) of calls in a row, after ``warm`` more that bring back code and upper levels."""
        first, calls = self._calls[rival.name], calls + warm
        self._calls[rival.name] += calls
        if cell.caller == "c":
            cold_bytes = COLD_BYTES if cell.cache == "cold" else 0
            rows = self.inputs.rows(cell.k, first, calls)
            assert rival.time_calls is not None, "only these play such a cell"
            return rival.time_calls(cell.op, cell.k, calls, cold_bytes, *rows, first)[warm:]
        arguments = [self._arguments(rival, cell, first + n) for n in range(calls)]
        before = functools.partial(np.copyto, *self._frames) if cell.cache == "cold" else _nothing
        return np.array(timed(_call(rival, cell.op), arguments, before)[warm:]) / 1e3

    def _arguments(self, rival: Rival, cell: Cell, n: int) -> tuple:
        """Return the arguments of the n-th call, as the rival takes them."""
        if cell.op == "sample":
            return (cell.k,)
        if cell.op == "insert":
            return rival.prepare_insert(*self.inputs.insert(n))
        update = rival.prepare(*self.inputs.update(cell.k, n))
        if cell.op == "update":
            return update
        return update, [rival.prepare_insert(*self.inputs.insert(n * INSERTS_A_STEP + row)) for row in range(INSERTS_A_STEP)]


def plan(share_s: float, cost_s: float, most_repetitions: int, hot: bool) -> tuple[int, int, int]:
    """Return (repetitions, calls in a row, calls before them that are not kept) for a share of time and a call's cost.

    Where caches are to be hot, as many calls are thrown away as are kept, and up to twice the most that
    are. There are never fewer repetitions than the least, whatever they cost; slow calls are not warmed up.
    """
    least_warm = int(cost_s < _SLOW_S)
    affordable = max(share_s, 0.0) / cost_s
    repetitions = int(min(max(affordable / (_FEW_CALLS + least_warm), _LEAST_REPETITIONS), most_repetitions))
    in_a_row = affordable / repetitions
    warm = int(min(max(in_a_row / 2, least_warm), _MOST_WARM_CALLS)) if hot else least_warm
    return repetitions, int(min(max(in_a_row - warm, 1), _MOST_CALLS)), warm


def timed(call: Callable[..., object], arguments: list[tuple], before: Callable[[], object]) -> list[int]:
    """Return the nanoseconds of ``call(*row)`` for each row of arguments, after ``before()`` each time."""
    clock, times = time.perf_counter_ns, []
    for row in arguments:
        before()
        start = clock()
        call(*row)
        times.append(clock() - start)
    return times


def _nothing() -> None:
    pass


def _call(rival: Rival, op: str) -> Callable[..., object]:
    return functools.partial(_step, rival) if op == "step" else getattr(rival, op)


def _step(rival: Rival, update: tuple, inserts: list[tuple]) -> None:
    """What one learner step asks of a replay rank's index."""
    rival.sample(SAMPLE)
    rival.update(*update)
    for arguments in inserts:
        rival.insert(*arguments)


def _row(rival: Rival, cell: Cell, turns: list[np.ndarray], reference: list[np.ndarray] | None) -> dict:
    q1, median, q3 = np.percentile(np.concatenate(turns), [25, 50, 75])
    row = {"index": rival.name, "leaf": rival.leaf, "op": cell.op, "k": cell.k, "cache": cell.cache, "caller": cell.caller}
    row |= {"median_us": float(median), "q1_us": float(q1), "q3_us": float(q3), "ratio_to_binary": None}
    if reference is not None:
        paired = [np.median(theirs) / np.median(ours) for theirs, ours in zip(reference, turns)]
        row["ratio_to_binary"] = float(np.median(paired))
    return row
