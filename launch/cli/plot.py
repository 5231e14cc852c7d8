"""`apex plot`: returns of runs against time and against experience."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from apex import look
from apex.config import ConfigError
from apex.output_file import OutputFile
from apex.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNITS = ((2 * 3600, 3600, "h"), (600, 60, "min"), (0, 1, "s"))


def learning_curve(runs: list[Path], out: OutputFile) -> None:
    """Draw all runs in one figure.

    Left: return against wall time. Right: return against env frames, or agent steps if the two are
    equal. Faint lines are training episodes, lines with marks greedy evaluations; a dashed line is
    the target return of runs that stop at one. Raises :class:`ConfigError` if no run has a row.
    """
    out.write_figure(_figure([Path(run) for run in runs]))


def _figure(runs: list[Path]) -> Figure:
    """Return the :class:`matplotlib.figure.Figure` of :func:`learning_curve`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    logs = [_log(RunFolder(run)) for run in runs]
    if not any(logs):
        raise ConfigError(f"nothing to plot yet: no rows in {', '.join(map(str, runs))}")
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (key, scale, label) in zip(panels, (_time_axis(logs), _experience_axis(logs))):
        _draw(panel, logs, key, scale, _targets(runs))
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("return of an episode")
    panels[1].xaxis.set_major_formatter(EngFormatter(sep=""))  # 250k rather than 250000
    _legend(figure, [run.resolve().name for run in runs], bool(_targets(runs)))
    return figure


def _log(folder: RunFolder) -> list[dict]:
    """Return the rows of a run, with None for missing values; raises :class:`ConfigError` if it is no log."""
    folder.check_rows()
    counts = dict.fromkeys(("env_frames", "agent_steps", "evaluations"), 0)
    blank = counts | dict.fromkeys(("train_return", "eval_return"))
    rows = [blank | row for row in folder.rows() if row.get("wall_s") is not None]
    return [row | {name: row[name] or 0 for name in counts} for row in rows]


def _time_axis(logs: list[list[dict]]) -> tuple[str, float, str]:
    longest = max(row["wall_s"] for rows in logs for row in rows)
    scale, unit = next(((scale, unit) for least, scale, unit in _UNITS if longest >= least), _UNITS[-1][1:])
    return "wall_s", scale, f"wall time ({unit})"


def _experience_axis(logs: list[list[dict]]) -> tuple[str, float, str]:
    skipping = any(row["env_frames"] != row["agent_steps"] for rows in logs for row in rows)
    return ("env_frames", 1, "env frames") if skipping else ("agent_steps", 1, "agent steps")


def _draw(panel: Axes, logs: list[list[dict]], key: str, scale: float, targets: list[float]) -> None:
    for number, rows in enumerate(logs):
        colour = f"C{number % 10}"
        train = [(row[key] / scale, row["train_return"]) for row in rows if row["train_return"] is not None]
        greedy = [(row[key] / scale, row["eval_return"]) for row in _evaluations(rows)]
        panel.plot(*_columns(train), color=colour, linewidth=1, alpha=0.4)
        panel.plot(*_columns(greedy), color=colour, linewidth=1.8, marker="o", markersize=3.5)
    for target in targets:
        panel.axhline(target, color="0.4", linewidth=1, linestyle="--")


def _evaluations(rows: list[dict]) -> list[dict]:
    """Return the rows in which an evaluation first appears."""
    before = [0] + [row["evaluations"] for row in rows]
    changed = (row for row, earlier in zip(rows, before) if row["evaluations"] != earlier)
    return [row for row in changed if row["eval_return"] is not None]


def _columns(points: list[tuple]) -> tuple:
    return tuple(zip(*points)) or ((), ())


def _targets(runs: list[Path]) -> list[float]:
    """Return the distinct target returns of the runs that stop at one."""
    sections = [_run_section(RunFolder(run).config_path) for run in runs]
    targets = [run.get("target_return") for run in sections if run.get("stop_at_target")]
    return sorted({float(t) for t in targets if isinstance(t, int | float) and not isinstance(t, bool)})


def _run_section(path: Path) -> dict:
    """Return the [run] section of a run's configuration; empty if the log has no configuration."""
    text = look.read(path)
    if text is None:
        return {}
    try:
        return dict(tomllib.loads(text.decode()).get("run", {}))
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(f"{path} is not a run's configuration; move it away to plot without it") from None


def _legend(figure: Figure, names: list[str], has_target: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=f"C{n % 10}", linewidth=1.8, label=name) for n, name in enumerate(names)]
    handles.append(Line2D([], [], color="0.3", linewidth=1, alpha=0.5, label="training episodes"))
    handles.append(Line2D([], [], color="0.3", marker="o", markersize=3.5, label="greedy evaluation"))
    if has_target:
        handles.append(Line2D([], [], color="0.4", linewidth=1, linestyle="--", label="target return"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
