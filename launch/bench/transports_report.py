"""The report of ``apex compare``: medians and ratios as tables, JSON, a picture and Markdown."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from apex import numbers, processes
from apex.output_file import OutputFile
from launch.bench import report as bench_report
from launch.bench.synthetic import METRICS
from launch.run.launchers import find_mpirun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

_WIDTH = 160  # of what is printed, where that is no terminal
_QUIET = 0.25  # load a core below which cores are taken to be free
_PACKAGES = ("numpy", "torch", "mpi4py", "openmpi", "mpich", "pyzmq", "gymnasium", "ale-py")
_HEADINGS = {
    "transitions": "transitions/s", "ratio": "x", "mb_per_s": "MB/s", "batches": "batches/s",
    "batches_ratio": "x",
    "sample_ms": "sample ms p50/p99", "learner_wait_pct": "learner wait %", "cpu_s_per_million": "CPU s/M",
    "peak_mb": "peak MB",
    "lost": "lost",
}  # fmt: skip
_TITLES = {
    "intake": "intake: actors stream, nothing is sampled",
    "mixed": "mixed: intake and 512-batches of 28.9 MB, both as fast as they go",
    "preset": "preset: real training",
}
_EXPLANATION = """\
- Synthetic roles: the real replay rank between actors that send premade batches of 50 transitions (84x84
  frames, stacks of 4) as fast as credits allow, and a learner that keeps two requests open and reads a byte
  of every page.
- transitions/s is measured on the replay rank over a fixed window, after a warm-up of half a second. MB/s
  are the bytes of these transitions as the ring keeps them, for every transport, whatever it sends for
  them.
- Each number is the median over repetitions, with the least and the largest in brackets. x is the median
  over repetitions of the ratio to the baseline within the same repetition, in which all transports take
  their turns.
- CPU s/M: CPU seconds of all ranks for a million transitions inserted. Peak MB: the sum over ranks of their
  largest resident memory, shared pages counted in each. Lost: transitions that did not arrive once and
  whole, counted at both ends.
- free: nothing else is started. busy: one process per core that never rests runs beside.
- The pickled transports send lists of stacked transitions. mpi-pickle uses mpi4py's lower-case calls;
  zmq-pickle has asyncio workers behind a ROUTER/DEALER proxy in the replay rank."""


def machine() -> dict:
    """Return what the numbers depend on."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found = bench_report.machine({}, None)
    kept = {
        name: found[name]
        for name in ("cpu", "cores", "caches", "huge_pages", "load", "kernel", "python", "compiler")
    }
    return kept | {"versions": versions, "mpirun": _mpirun_version()}


def _mpirun_version() -> str | None:
    try:
        command = [find_mpirun(), "--version"]
        told = subprocess.run(
            command, env=processes.environment_for({}), capture_output=True, text=True, timeout=20
        ).stdout
    except Exception:  # no MPI, or one that does not answer
        return None
    return told.partition("\n")[0] or None


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield ``told(text)``, which says on the terminal what is being measured."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


@dataclass(frozen=True)
class Cell:
    """All repetitions of one transport at one actor count, in one regime, under one workload."""

    transport: str
    actors: int
    rows: list[dict]
    against: list[dict]  # the baseline's, in the order of repetitions

    def values(self, metric: str) -> list[float]:
        """Return a metric of the runs that have it."""
        return [row[metric] for row in self.rows if row[metric] is not None]

    def median(self, metric: str) -> float | None:
        """Return the median over repetitions."""
        values = self.values(metric)
        return statistics.median(values) if values else None

    def ratio(self, metric: str) -> float | None:
        """Return the median over repetitions of the ratio to the baseline in the same repetition."""
        theirs = {row["repetition"]: row[metric] for row in self.against}
        pairs = [(row[metric], theirs.get(row["repetition"])) for row in self.rows]
        ratios = [mine / other for mine, other in pairs if mine is not None and other]
        return statistics.median(ratios) if ratios else None

    def errors(self) -> list[str]:
        """Return what failed runs said."""
        return [f"repetition {row['repetition']}: {row['error']}" for row in self.rows if "error" in row]

    def texts(self) -> dict[str, str]:
        """Return the cell as it stands in the tables, by the keys of the headings."""
        lost = self.values("lost")
        return {
            "transitions": self._spread("transitions_per_s"),
            "ratio": _ratio(self.ratio("transitions_per_s")),
            "batches": self._spread("batches_per_s"),
            "batches_ratio": _ratio(self.ratio("batches_per_s")),
            "sample_ms": " / ".join(
                numbers.figure(self.median(name)) for name in ("sample_ms_p50", "sample_ms_p99")
            ),
            "lost": str(sum(lost)) if lost else "-",
        } | {
            name: numbers.figure(self.median(name))
            for name in ("mb_per_s", "learner_wait_pct", "cpu_s_per_million", "peak_mb")
        }

    def _spread(self, metric: str) -> str:
        values = self.values(metric)
        if not values:
            return "failed" if self.errors() and len(self.errors()) == len(self.rows) else "-"
        middle, low, high = map(numbers.figure, (statistics.median(values), min(values), max(values)))
        return middle if len(values) == 1 else f"{middle} [{low}..{high}]"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{numbers.figure(value)}x"


class Comparison:
    """The machine, the rows of all runs, and the transport that others are compared with."""

    def __init__(self, machine: dict, rows: list[dict], baseline: str):
        self.machine, self.rows, self.baseline = machine, rows, baseline

    def groups(self) -> list[tuple[str, str, list[Cell]]]:
        """Return ``(workload, regime, cells)``, as measured."""
        keys = dict.fromkeys((row["workload"], row["regime"]) for row in self.rows)
        return [(workload, regime, self._cells(workload, regime)) for workload, regime in keys]

    def reference(self, workload: str) -> str | None:
        """Return the transport whose ratio is 1: the baseline, or where it cannot run the workload, zmq."""
        measured = {row["transport"] for row in self.rows if row["workload"] == workload}
        return next((name for name in (self.baseline, "zmq") if name in measured), None)

    def _cells(self, workload: str, regime: str) -> list[Cell]:
        rows = [row for row in self.rows if (row["workload"], row["regime"]) == (workload, regime)]
        reference = self.reference(workload)
        order = list(dict.fromkeys(row["transport"] for row in self.rows))
        cells = []
        for actors, transport in itertools.product(sorted({row["actors"] for row in rows}), order):
            mine, theirs = (
                [r for r in rows if r["actors"] == actors and r["transport"] == t]
                for t in (transport, reference)
            )
            if mine:
                cells.append(Cell(transport, actors, mine, theirs))
        return cells

    def shares(self) -> list[str]:
        """Return, in words, the share of the memcpy rate that mpi's intake reaches with 1 and 2 actors."""
        known = self.machine["memcpy_mb_per_s"]["plain"]
        measured = [
            (cell.actors, regime, cell.median("mb_per_s"))
            for workload, regime, cells in self.groups()
            for cell in cells
            if workload == "intake" and cell.transport == "mpi" and str(cell.actors) in known
        ]
        return [
            self._share(actors, regime, mb_per_s)
            for actors, regime, mb_per_s in measured
            if mb_per_s is not None
        ]

    def _share(self, actors: int, regime: str, mb_per_s: float) -> str:
        shares = {
            kind: 100 * mb_per_s / rates[str(actors)]
            for kind, rates in self.machine["memcpy_mb_per_s"].items()
        }
        senders = f"{actors} sender{'s' if actors > 1 else ''}"
        return (
            f"mpi, {senders}, {regime} cores: {numbers.figure(mb_per_s)} MB/s into the ring, "
            f"{shares['plain']:.0f} % of the plain memcpy rate "
            f"of as many processes, {shares['messages']:.0f} % of copying messages that lie in a cache"
        )

    def about(self) -> list[str]:
        """Return lines about the machine and the run."""
        m = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
        lines = [
            f"{m['cpu']}, {m['cores']} cores, {m['kernel']}, "
            f"load {m['load'][0]} before and {m['load_after']} after",
            f"Python {m['python']}, {versions}, {m['mpirun'] or 'no mpirun'}",
            *(
                f"memcpy, {kind}: "
                + ", ".join(f"{rate:.0f} MB/s with {n}" for n, rate in rates.items())
                + " processes"
                for kind, rates in m["memcpy_mb_per_s"].items()
            ),
        ]
        if m["load"][0] > _QUIET * m["cores"] and any(row["regime"] == "free" for row in self.rows):
            lines.append("the machine had other work before this began, so free cores were not quite free")
        return lines + ([f"left out for want of time: {m['left_out']} runs"] if m["left_out"] else [])

    def failures(self) -> list[str]:
        """Return what failed, in words."""
        return [
            f"{cell.transport}, {cell.actors} actors, {workload}, {regime}: {text}"
            for workload, regime, cells in self.groups()
            for cell in cells
            for text in cell.errors()
        ]

    def title(self, workload: str, regime: str) -> str:
        """Return the heading of a table."""
        return f"{_TITLES[workload]}; {regime} cores; x: times {self.reference(workload) or 'nothing'}"

    def columns(self, workload: str) -> list[str]:
        """Return the keys of the columns that mean something."""
        left_out = {
            "intake": {"batches", "batches_ratio", "sample_ms", "learner_wait_pct"},
            "preset": {"sample_ms", "lost"},
        }
        return [key for key in _HEADINGS if key not in left_out.get(workload, set())]

    # --- output ---

    def show(self) -> None:
        """Print the machine and the tables."""
        from rich.console import Console

        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _WIDTH
        for line in self.about():
            console.print(line, markup=False)
        for workload, regime, cells in self.groups():
            console.print(f"\n[bold]{self.title(workload, regime)}[/bold]")
            console.print(self._table(workload, cells))
        for line in (*self.shares(), *(f"failed: {text}" for text in self.failures())):
            console.print(line, markup=False)

    def _table(self, workload: str, cells: list[Cell]) -> Table:
        from rich.table import Table

        table = Table(box=None, padding=(0, 1, 0, 0))
        columns = self.columns(workload)
        for key, heading in (("", "actors"), ("", "transport"), *((key, _HEADINGS[key]) for key in columns)):
            table.add_column(heading, justify="right" if key else "left", no_wrap=heading == "transport")
        for cell in cells:
            texts = cell.texts()
            table.add_row(
                str(cell.actors), cell.transport, *(texts[key].replace("[", "\\[") for key in columns)
            )
        return table

    def write_json(self, out: OutputFile) -> None:
        """Write ``{"machine": ..., "rows": [...]}``; raises :class:`ConfigError` if it cannot be written."""
        bench_report.write_json(out, self.machine, self.rows)

    def write_report(self, out: OutputFile) -> None:
        """Write the comparison as Markdown; raises :class:`ConfigError` if it cannot be written."""
        out.write_text(self.markdown())

    def markdown(self) -> str:
        """Return the report."""
        parts = [
            "# Comparison of transports",
            f"```\n{self.machine['command']}\n```",
            "\n".join(f"- {line}" for line in self.about()),
        ]
        for workload, regime, cells in self.groups():
            columns = self.columns(workload)
            header = ["actors", "transport", *(_HEADINGS[key] for key in columns)]
            lines = [header, ["---"] * 2 + ["---:"] * len(columns)]
            for cell in cells:
                texts = cell.texts()
                lines.append([str(cell.actors), cell.transport, *(texts[key] for key in columns)])
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            parts.append(f"## {self.title(workload, regime)}\n\n{table}")
        if self.shares():
            parts.append("## Against memcpy\n\n" + "\n".join(f"- {line}" for line in self.shares()))
        if self.failures():
            parts.append("## Failed\n\n" + "\n".join(f"- {line}" for line in self.failures()))
        return "\n\n".join([*parts, f"## How to read this\n\n{_EXPLANATION}"]) + "\n"

    def write_png(self, out: OutputFile) -> None:
        """Draw intake by actors (left) and its ratio to the baseline (right); raises :class:`ConfigError`."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 5), layout="constrained")
        FigureCanvasAgg(figure)  # draws without a display
        left, right = figure.subplots(1, 2)
        workload = next((group[0] for group in self.groups()), "intake")
        self._draw(left, workload, lambda cell: cell.median("transitions_per_s"))
        self._draw(right, workload, lambda cell: cell.ratio("transitions_per_s"))
        left.set(
            yscale="log",
            ylabel="transitions/s at the replay rank",
            title=f"{workload}: solid on free cores, dashed on busy",
        )
        right.set(yscale="log", ylabel=f"times {self.reference(workload)}", title="ratio to the baseline")
        right.axhline(1.0, color="0.4", linewidth=1)
        for panel in (left, right):
            panel.set_xlabel("actors")
            panel.set_xticks(sorted({row["actors"] for row in self.rows}))
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        left.legend(frameon=False, fontsize="small")
        figure.suptitle(f"{self.machine['cpu']}, {self.machine['cores']} cores", fontsize="medium")
        out.write_figure(figure)

    def _draw(self, panel: Axes, workload: str, value: Callable[[Cell], float | None]) -> None:
        colours = {
            name: f"C{i}" for i, name in enumerate(dict.fromkeys(row["transport"] for row in self.rows))
        }
        for found, regime, cells in self.groups():
            for name in colours if found == workload else ():
                points = [
                    (cell.actors, value(cell))
                    for cell in cells
                    if cell.transport == name and value(cell) is not None
                ]
                if points:
                    style = "-" if regime == "free" else "--"
                    panel.plot(
                        *zip(*points),
                        style,
                        marker="o",
                        markersize=4,
                        color=colours[name],
                        label=f"{name}, {regime}",
                    )


ROW_FIELDS = ("transport", "actors", "regime", "workload", *METRICS, "repetition")
"""Keys of a row in the JSON; a run that failed also has ``error``, and null for every metric."""
