"""``apex bench index``: what each priority index and its candidates cost a call, side by side on one core.

The candidates take turns inside each repetition, so that a noisy machine hits all of them alike, and a ratio
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

from apex import output_file
from apex.config import ConfigError
from launch.bench import baselines
from launch.bench import report as bench_report
from launch.bench.baselines import Candidate
from launch.bench.report import REFERENCE, Cell

LEAVES, LEAST_LEAVES, MOST_LEAVES = 1 << 21, 50, 1 << 24
SAMPLE, INSERT, INSERTS_A_STEP = 512, 50, 10
OPS = (
    ("sample", SAMPLE),
    *(("update", k) for k in (8, 50, 512, 2048, 32768)),
    ("insert", INSERT),
    ("step", SAMPLE),
)
COLD_BYTES = 30_000_000
FULL_S, QUICK_S = 280.0, 36.0  # filling included
_FULL_REPETITIONS, _QUICK_REPETITIONS, _LEAST_REPETITIONS = 11, 5, 3
_FEW_CALLS, _MOST_CALLS = 4, 500  # in a row: what to have before repeating more often, and the most
_MOST_WARM_CALLS = 1000  # before these, where caches are to be hot: the others' turns have emptied them
_INPUT_ROWS, _LEAST_SETS = (
    1 << 20,
    16,
)  # random slots, as sets of k that are used in turn; fewer would stay in the caches
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
        raise ConfigError(
            f"--leaves {leaves}: must be from {LEAST_LEAVES} (an insert is {INSERT} slots) to {MOST_LEAVES}"
        )
    baselines.load_native()
    names, left_out = baselines.choose(indexes)
    core = _core(core)
    json_out = output_file.asked_for("--json", json_path, output_file.JSON)
    png_out = output_file.asked_for("--png", png_path, output_file.PICTURE)
    budget_s = budget_s or (QUICK_S if quick else FULL_S)
    with _one_core(core), _one_thread():
        candidates, failed = _fill(names, leaves, must=indexes is not None)
        bench = Bench(candidates, leaves, _QUICK_REPETITIONS if quick else _FULL_REPETITIONS)
        rows = bench.measure(start + budget_s, bench_report.progress())
    indexes_here = {
        candidate.name: candidate.index for candidate in candidates if candidate.index is not None
    }
    machine = bench_report.machine(indexes_here, core) | {
        "leaves": leaves,
        "seconds": budget_s,
        "left_out": left_out + failed,
    }
    bench_report.show(machine, rows)
    if json_out is not None:
        bench_report.write_json(json_out, machine, rows)
    if png_out is not None:
        bench_report.write_png(png_out, machine, rows)
    return 0


def _core(asked: int | None) -> int | None:
    """Return the core to run on: ``asked``, else the last this process may use; None without affinity."""
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


def _fill(names: list[str], leaves: int, must: bool) -> tuple[list[Candidate], list[str]]:
    """Return the loaded candidates, and why others failed; with ``must``, raise ConfigError for those."""
    mass, candidates, failed = masses(np.random.default_rng(1), leaves), [], []
    for name in names:
        try:
            candidates.append(baselines.make(name, mass))
        except (ImportError, MemoryError) as error:
            reason = str(error).partition("\n")[0]
            if must:
                raise ConfigError(f"--indexes: {name}: {reason}") from None
            failed.append(f"{name}: {reason}")
    return candidates, failed


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
        """Return slots (int64[calls * k]) and masses (float64[calls * k]) of calls from the first-th on."""
        slots, mass = zip(*(self.update(k, first + n) for n in range(calls)))
        return np.concatenate(slots), np.concatenate(mass)


Progress = Callable[[list[Cell]], AbstractContextManager[Iterator[Cell]]]


class Bench:
    """Candidates taking turns at every cell."""

    def __init__(self, candidates: list[Candidate], leaves: int, repetitions: int):
        self.candidates, self.inputs, self._repetitions = candidates, Inputs(leaves), repetitions
        self._calls = dict.fromkeys((candidate.name for candidate in candidates), 0)
        self._frames = np.ones(COLD_BYTES, np.uint8), np.zeros(COLD_BYTES, np.uint8)

    def measure(self, deadline: float, progress: Progress) -> list[dict]:
        """Return the rows of every cell, by ``deadline`` on the clock of ``time.perf_counter``.

        ``progress(cells)`` is a context manager that yields the cells one by one.
        """
        cells = [
            Cell(op, k, cache, caller)
            for caller in ("c", "python")
            for cache in ("hot", "cold")
            for op, k in OPS
        ]
        cells = [cell for cell in cells if self._players(cell)]
        to_come = sum(len(self._players(cell)) for cell in cells)
        rows: list[dict] = []
        with _no_collection(), progress(cells) as shown:
            for cell in shown:
                rows += self._rows(cell, (deadline - time.perf_counter()) / (to_come - len(rows)))
        return rows

    def _players(self, cell: Cell) -> list[Candidate]:
        able = [candidate for candidate in self.candidates if cell.op in candidate.ops]
        return (
            able
            if cell.caller == "python"
            else [candidate for candidate in able if candidate.time_calls is not None]
        )

    def _rows(self, cell: Cell, share_s: float) -> list[dict]:
        players = self._players(cell)
        is_hot = cell.cache == "hot"
        plans = {
            player.name: plan(share_s, self._cost_s(player, cell), self._repetitions, is_hot)
            for player in players
        }
        turns: dict[str, list[np.ndarray]] = {candidate.name: [] for candidate in players}
        for repetition in range(self._repetitions):
            shift = repetition % len(players)
            for candidate in players[shift:] + players[:shift]:
                repetitions, calls, warm = plans[candidate.name]
                if repetition < repetitions:
                    turns[candidate.name].append(self._turn(candidate, cell, calls, warm))
        return [_row(candidate, cell, turns[candidate.name], turns.get(REFERENCE)) for candidate in players]

    def _cost_s(self, candidate: Candidate, cell: Cell) -> float:
        """Return the seconds that one call and what precedes it take, from one or two that are not kept."""
        for _ in range(2):  # the first may compile or bind something
            start = time.perf_counter()
            self._turn(candidate, cell, 1, warm=0)
            cost = time.perf_counter() - start
            if cost > _SLOW_S:
                break
        return cost

    def _turn(self, candidate: Candidate, cell: Cell, calls: int, warm: int) -> np.ndarray:
        """Return the µs (float64[calls]) of consecutive calls, after ``warm`` calls to refill caches."""
        first, calls = self._calls[candidate.name], calls + warm
        self._calls[candidate.name] += calls
        if cell.caller == "c":
            cold_bytes = COLD_BYTES if cell.cache == "cold" else 0
            rows = self.inputs.rows(cell.k, first, calls)
            assert candidate.time_calls is not None, "only these play such a cell"
            return candidate.time_calls(cell.op, cell.k, calls, cold_bytes, *rows, first)[warm:]
        arguments = [self._arguments(candidate, cell, first + n) for n in range(calls)]
        before = functools.partial(np.copyto, *self._frames) if cell.cache == "cold" else _nothing
        return np.array(timed(_call(candidate, cell.op), arguments, before)[warm:]) / 1e3

    def _arguments(self, candidate: Candidate, cell: Cell, n: int) -> tuple:
        """Return the arguments of the n-th call, as the candidate takes them."""
        if cell.op == "sample":
            return (cell.k,)
        if cell.op == "insert":
            return candidate.prepare_insert(*self.inputs.insert(n))
        update = candidate.prepare(*self.inputs.update(cell.k, n))
        if cell.op == "update":
            return update
        return update, [
            candidate.prepare_insert(*self.inputs.insert(n * INSERTS_A_STEP + row))
            for row in range(INSERTS_A_STEP)
        ]


def plan(share_s: float, cost_s: float, most_repetitions: int, hot: bool) -> tuple[int, int, int]:
    """Return (repetitions, timed calls in a row, warm-up calls before them) for a share of time.

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


def _call(candidate: Candidate, op: str) -> Callable[..., object]:
    return functools.partial(_step, candidate) if op == "step" else getattr(candidate, op)


def _step(candidate: Candidate, update: tuple, inserts: list[tuple]) -> None:
    """What one learner step asks of a replay rank's index."""
    candidate.sample(SAMPLE)
    candidate.update(*update)
    for arguments in inserts:
        candidate.insert(*arguments)


def _row(
    candidate: Candidate, cell: Cell, turns: list[np.ndarray], reference: list[np.ndarray] | None
) -> dict:
    q1, median, q3 = np.percentile(np.concatenate(turns), [25, 50, 75])
    row = {
        "index": candidate.name,
        "leaf": candidate.leaf,
        "op": cell.op,
        "k": cell.k,
        "cache": cell.cache,
        "caller": cell.caller,
    }
    row |= {"median_us": float(median), "q1_us": float(q1), "q3_us": float(q3), "ratio_to_binary": None}
    if reference is not None:
        paired = [np.median(theirs) / np.median(ours) for theirs, ours in zip(reference, turns)]
        row["ratio_to_binary"] = float(np.median(paired))
    return row
