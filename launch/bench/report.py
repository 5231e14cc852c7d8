"""What ``apex bench index`` shows and writes: the machine, tables, JSON and a picture."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from apex import numbers
from apex.output_file import OutputFile
from replay_rank.index import PriorityIndex

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console
    from rich.table import Table

REFERENCE = "binary-element"
"""The reference of all ratios: the plain binary tree in C, which walks to the root for each row."""
_SEED_COLUMNS = {
    "python": "pure Python µs",
    REFERENCE: "C per element µs",
    "binary-rebuild": "C write-leaves-then-rebuild-all µs",
    "binary": "C, best form for k µs",
    "wide": "wide, float64 µs",
    "wide32": "wide, float32 µs",
}
_LINES = ("python", REFERENCE, "binary-rebuild", "wide", "wide32")
_PACKAGES = ("numpy", "torch", "torchrl", "cpprb", "tianshou", "numba")
_LIBRARY = Path(__file__).resolve().parents[2] / "native" / "_native.abi3.so"


@dataclass(frozen=True)
class Cell:
    """One thing to measure: an operation of k rows, with hot or cold caches, called from C or Python."""

    op: str
    k: int
    cache: str
    caller: str


def machine(indexes: Mapping[str, PriorityIndex], core: int | None) -> dict:
    """Return what figures depend on: processor, system, compiler, versions; None where it is unknown."""
    return {
        "cpu": _first_match(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)")
        or platform.processor()
        or platform.machine(),
        "cores": os.cpu_count(),
        "core": core,
        "caches": _caches(core or 0),
        "huge_pages": _first_match(Path("/sys/kernel/mm/transparent_hugepage/enabled"), r"\[(\w+)\]"),
        "load": [round(load, 2) for load in os.getloadavg()],
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "compiler": _first_match(_LIBRARY, r"((?:GCC: |clang version )[^\0\n]+)"),
        "backends": {name: index.backend for name, index in indexes.items()},
        "bytes_per_leaf": {name: index.nbytes / index.capacity for name, index in indexes.items()},
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _first_match(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, path.read_bytes().decode("latin-1"))
    except OSError:
        return None
    return found and found[1].strip()


def _caches(core: int) -> dict[str, str]:
    """Return level -> size of each cache of a core, as in {"L1d": "32K"}; empty if unknown."""
    found: dict[str, str] = {}
    for folder in sorted(Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*")):
        level, kind, size = (_first_match(folder / name, r"(\w+)") for name in ("level", "type", "size"))
        if level is not None and size is not None:
            found[f"L{level}{ {'Data': 'd', 'Instruction': 'i'}.get(kind or '', '') }"] = size
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- the terminal -----------------------------------------------------------------------------------


def progress() -> Callable[[list[Cell]], AbstractContextManager[Iterator[Cell]]]:
    """Return ``shown(cells)``, a context manager that yields the cells and shows the current one."""
    from rich.console import Console

    console = Console(stderr=True)

    @contextlib.contextmanager
    def shown(cells: list[Cell]) -> Iterator[Iterator[Cell]]:
        with console.status("filling") as status:

            def told() -> Iterator[Cell]:
                for number, cell in enumerate(cells, 1):
                    status.update(
                        f"{number} of {len(cells)}: {cell.op} {cell.k}, {cell.cache}, "
                        f"called from {_language(cell.caller)}"
                    )
                    yield cell

            yield told()

    return shown


def show(machine: dict, rows: list[dict]) -> None:
    """Print the machine, what was left out, and the tables."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        f"{machine['cpu']}, core {machine['core']}; {machine['leaves']} leaves; medians of µs a call",
        markup=False,
    )
    if machine["bytes_per_leaf"]:
        told = (f"{name} {numbers.figure(size)}" for name, size in machine["bytes_per_leaf"].items())
        console.print(f"bytes a leaf: {', '.join(told)}", markup=False)
    for text in machine["left_out"]:
        console.print(f"left out: {text}", markup=False)
    for cache in ("hot", "cold"):
        _show_updates(console, rows, cache)
    for caller, cache in itertools.product(("c", "python"), ("hot", "cold")):
        if _named(rows, caller=caller, cache=cache):
            console.print(f"\n[bold]called from {_language(caller)}, {cache}[/bold]")
            console.print(_ops_table(rows, caller, cache))
    console.print(
        f"\nx: times as fast as {REFERENCE}, the median of the ratios within each repetition", markup=False
    )


def _show_updates(console: Console, rows: list[dict], cache: str) -> None:
    """Print the table of updates by k: from C where an index can be called so, else from Python."""
    columns = {name: by_k for name in _SEED_COLUMNS if (by_k := _best_caller(rows, name, cache))}
    table = _table()
    table.add_column("k updated", justify="right")
    for name in columns:
        table.add_column(_SEED_COLUMNS[name], justify="right")
    for k in sorted({row["k"] for row in _named(rows, op="update")}):
        table.add_row(str(k), *(numbers.figure(by_k[k]["median_us"]) for by_k in columns.values()))
    callers = {row["caller"] for name, by_k in columns.items() if name != "python" for row in by_k.values()}
    told = f"; the C trees are called from {' and '.join(map(_language, sorted(callers)))}" if callers else ""
    console.print(f"\n[bold]k updates of sum and minimum, {cache}[/bold]{told}")
    console.print(table)


def _ops_table(rows: list[dict], caller: str, cache: str) -> Table:
    """Return the table of operations by index: µs, and under it the ratio to the reference."""
    rows = _named(rows, caller=caller, cache=cache)
    ops = list(dict.fromkeys((row["op"], row["k"]) for row in rows))
    table = _table()
    table.add_column("index", no_wrap=True)
    for op, k in ops:
        table.add_column(f"{op}\n{k}", justify="right")
    for name in dict.fromkeys(row["index"] for row in rows):
        mine = {(row["op"], row["k"]): row for row in _named(rows, index=name)}
        table.add_row(name, *(_number_and_ratio(mine[key]) if key in mine else "" for key in ops))
    return table


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, padding=(0, 1, 0, 0))


def _number_and_ratio(row: dict) -> str:
    ratio = row["ratio_to_binary"]
    return numbers.figure(row["median_us"]) + (
        "" if ratio is None else f"\n[dim]x{numbers.figure(ratio)}[/dim]"
    )


def _language(caller: str) -> str:
    return {"c": "C", "python": "Python"}[caller]


def _named(rows: list[dict], **fields: object) -> list[dict]:
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def _best_caller(rows: list[dict], name: str, cache: str) -> dict[int, dict]:
    """Return an index's updates by k, called from C where they were, else from Python."""
    for caller in ("c", "python"):
        found = _named(rows, index=name, op="update", cache=cache, caller=caller)
        if found:
            return {row["k"]: row for row in found}
    return {}


# --- files ------------------------------------------------------------------------------------------


def write_json(out: OutputFile, machine: dict, rows: list[dict]) -> None:
    """Write ``{"machine": ..., "rows": [...]}``; raises :class:`ConfigError` if it cannot be written."""
    out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1, allow_nan=False) + "\n")


def write_png(out: OutputFile, machine: dict, rows: list[dict]) -> None:
    """Draw hot updates against k (left), and the speed of a step against the reference (right)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    left, right = figure.subplots(1, 2)
    _draw_updates(left, rows)
    _draw_steps(right, rows)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{machine['leaves']} leaves, one core of {machine['cpu']}", fontsize="medium")
    out.write_figure(figure)


def _draw_updates(panel: Axes, rows: list[dict]) -> None:
    lines = {name: _best_caller(rows, name, "hot") for name in _LINES}
    for number, (name, by_k) in enumerate(lines.items()):
        if by_k:
            panel.plot(
                list(by_k),
                [row["median_us"] for row in by_k.values()],
                marker="o",
                markersize=3.5,
                color=f"C{number}",
                label=name,
            )
    crossing = crossover(lines[REFERENCE], lines["binary-rebuild"])
    if crossing is not None:
        panel.axvline(
            crossing,
            color="0.4",
            linewidth=1,
            linestyle="--",
            label=f"rebuilding all is faster from k ≈ {crossing:.0f}",
        )
    panel.set(
        xscale="log",
        yscale="log",
        xlabel="k slots updated",
        ylabel="µs a call",
        title="update of sum and minimum, hot",
    )
    panel.grid(alpha=0.25)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False, fontsize="small")


def crossover(element: dict[int, dict], rebuild: dict[int, dict]) -> float | None:
    """Return the k where two lines of medians cross, interpolated in logarithms; None if they do not."""
    import numpy as np

    ks = sorted(element.keys() & rebuild.keys())
    ahead = [np.log(element[k]["median_us"] / rebuild[k]["median_us"]) for k in ks]
    for k, later, now, then in zip(ks, ks[1:], ahead, ahead[1:]):
        if now <= 0.0 < then:
            return float(np.exp(np.interp(0.0, [now, then], np.log([k, later]))))
    return None


def _draw_steps(panel: Axes, rows: list[dict]) -> None:
    """Draw bars from 1 to the ratio: to the right where faster than the reference, else to the left."""
    names = list(dict.fromkeys(row["index"] for row in _named(rows, op="step")))[::-1]
    height = 0.4
    for shift, cache in ((height / 2, "hot"), (-height / 2, "cold")):
        ratios = {
            row["index"]: row["ratio_to_binary"]
            for row in _named(rows, op="step", cache=cache, caller="python")
        }
        known = [
            (place + shift, ratios[name]) for place, name in enumerate(names) if ratios.get(name) is not None
        ]
        bars = panel.barh(
            [place for place, _ in known], [ratio - 1.0 for _, ratio in known], height, left=1.0, label=cache
        )
        panel.bar_label(bars, [numbers.figure(ratio) for _, ratio in known], padding=3, fontsize="small")
    panel.axvline(1.0, color="0.4", linewidth=1, linestyle="--")
    panel.set_yticks(range(len(names)), names)
    panel.set(
        xscale="log",
        xlabel=f"times as fast as {REFERENCE}",
        title="step from Python: 512 drawn, 512 updated, 500 inserted",
    )
    panel.margins(x=0.12)
    panel.legend(frameon=False, fontsize="small", loc="lower left")
