"""The terminal's view of a run: one line for a log, or a live table. Only the launcher uses it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from apex import numbers
from apex.config import Config
from apex.look import Unreadable
from apex.refusals import KINDS
from apex.run_folder import RunFolder, Tail
from apex.say import divert, is_terminal, say, write
from apex.topology import Topology

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def announce(config: Config, topology: Topology, path: Path) -> None:
    """Say what is being started and where it is written."""
    roles = f"1 learner, {topology.replay_ranks} replay, 1 evaluator, {topology.num_actors} actors"
    say(
        f"apex: {path}: {config.env.id}, starting {topology.size} ranks over {config.run.transport} ({roles})"
    )


def conclude(folder: RunFolder) -> None:
    """Say how the run ended, from its result."""
    result = folder.result()
    if result is None:
        say(f"apex: ended without a result; {folder.path}")
        return
    done = f"{result['wall_s']:.0f} s and {result['learner_steps']} learner steps"
    status = "" if result["status"] == 0 else f" with status {result['status']}"
    end = "killed" if result["reason"] == "killed" else f"ended by {result['reason']}"
    say(f"apex: {end}{status} after {done}; {_evaluated(result)}; {folder.path}")


def _evaluated(result: dict) -> str:
    if result["eval_return"] is None:
        return "no evaluation"
    return f"last greedy return {result['eval_return']:.1f} over {result['eval_episodes']} episodes"


def line(row: dict) -> str:
    """Return a row of the log as one line without colours; '-' where a value is not known."""
    parts = (
        f"{numbers.decimal(row.get('wall_s')):>6}s",
        f"learner {numbers.count(row.get('learner_steps'))} ({numbers.rate(row.get('learner_steps_per_s'))})",
        f"agent {numbers.count(row.get('agent_steps'))} ({numbers.rate(row.get('agent_steps_per_s'))})",
        f"replay {_fill(row)} ratio {numbers.decimal(row.get('samples_per_insert'))}",
        f"staleness {numbers.decimal(row.get('staleness'))}",
        f"wait {numbers.percent(row.get('learner_wait_pct'))}",
        f"loss {numbers.small(row.get('loss'))}",
        f"train {numbers.decimal(row.get('train_return'))}",
        f"eval {numbers.decimal(row.get('eval_return'))}",
        *_losses(row),
        *_refused(row),
    )
    return "  ".join(parts)


def table(row: dict, title: str) -> Table:
    """Return a row of the log as a :class:`rich.table.Table`, one line for each role."""
    from rich.table import Table

    result = Table(title=title, title_justify="left")
    result.add_column("role")
    for heading in ("done", "rate", "waiting"):
        result.add_column(heading, justify="right")
    result.add_column("")
    for cells in (_learner(row), _actors(row), _replay(row), _evaluator(row)):
        result.add_row(*cells)
    result.caption = "  ".join((f"{numbers.decimal(row.get('wall_s'))} s", *_refused(row)))
    return result


def follow(
    folder_path: Path, is_alive: Callable[[], bool], title: str,
    console: Console | None = None, period_s: float = 0.25, only_new: bool = False,
) -> None:  # fmt: skip
    """Show a run's rows as they are written, until ``is_alive()`` is False; the last is always shown.

    With ``only_new`` those that there are already, of a run that is resumed, are left out.

    On a terminal this is one live table; anywhere else, one :func:`line` for each row. Looks at
    the log every ``period_s`` seconds. What is told meanwhile, by whatever thread, comes above the table.
    """
    from rich.console import Console

    console = console or Console()
    tail = Tail(RunFolder(folder_path).metrics_path)
    if only_new:
        tail.new_rows()
    batches = _batches(tail, is_alive, period_s)
    with divert() as told:
        if console.is_terminal:
            _show_live(batches, told, title, console)
        else:
            _show_lines(batches, told, console)


def _show_lines(batches: Iterable[list[dict]], told: deque[tuple[bool, str]], console: Console) -> None:
    for rows in batches:
        while told:
            write(*told.popleft())
        for row in rows:
            _print(line(row), console)


def _print(text: str, console: Console) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)


def _batches(tail: Tail, is_alive: Callable[[], bool], period_s: float) -> Iterator[list[dict]]:
    """Yield lists of new rows, the last one after the run has ended."""
    while True:
        alive = is_alive()  # asked before reading: what was written before the end is then all read
        yield _new_rows(tail)
        if not alive:
            return
        time.sleep(period_s)


def _new_rows(tail: Tail) -> list[dict]:
    """Return the new rows; [] while the disk fails to give them, which does not end a run."""
    try:
        return tail.new_rows()
    except Unreadable:
        return []


def _show_live(
    batches: Iterable[list[dict]], told: deque[tuple[bool, str]], title: str, console: Console
) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(
        table({}, title), console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    ) as live:
        for rows in batches:
            stands_above = bool(told)
            while told:
                to_stderr, text = told.popleft()
                if to_stderr and not is_terminal(to_stderr):
                    write(to_stderr, text)
                else:
                    # Decoded, so that a code that moves the cursor does not tear the table.
                    console.print(Text.from_ansi(text.removesuffix("\n")), soft_wrap=True)
            if rows:
                live.update(table(rows[-1], title), refresh=True)
            elif stands_above:
                live.refresh()  # lines that are not to be broken leave the table drawn without its alignment


def _learner(row: dict) -> tuple[str, ...]:
    details = (
        f"loss {numbers.small(row.get('loss'))}  TD error {numbers.small(row.get('td_error'))}  "
        f"Q {numbers.decimal(row.get('q_value'))}"
        f"  grad norm {numbers.small(row.get('grad_norm'))}"
    )
    done, rate = (
        f"{numbers.count(row.get('learner_steps'))} steps",
        numbers.rate(row.get("learner_steps_per_s")),
    )
    return "learner", done, rate, numbers.percent(row.get("learner_wait_pct")), details


def _actors(row: dict) -> tuple[str, ...]:
    details = (
        f"train return {numbers.decimal(row.get('train_return'))}  "
        f"episodes {numbers.count(row.get('episodes'))}"
        f"  env frames {numbers.count(row.get('env_frames'))}"
    )
    details = "  ".join((details, *_losses(row)))
    done, rate = f"{numbers.count(row.get('agent_steps'))} steps", numbers.rate(row.get("agent_steps_per_s"))
    return "actors", done, rate, numbers.percent(row.get("actor_wait_pct")), details


def _losses(row: dict) -> tuple[str, ...]:
    """Return how many acting processes were lost and replaced, if any were."""
    lost = row.get("actors_lost")
    return (f"lost {lost}, replaced {row.get('actors_replaced')}",) if lost else ()


def _refused(row: dict) -> tuple[str, ...]:
    """Return how many messages all ranks have refused, if they have any."""
    total = sum(row.get(f"refused_{kind}") or 0 for kind in KINDS)
    return (f"{numbers.count(total)} messages refused",) if total else ()


def _replay(row: dict) -> tuple[str, ...]:
    details = (
        f"{_fill(row)} full  replay ratio {numbers.decimal(row.get('samples_per_insert'))}  staleness"
        f" {numbers.decimal(row.get('staleness'))}  stale updates {numbers.count(row.get('stale_updates'))}"
    )
    done = f"{numbers.count(row.get('replay_size'))} transitions"
    return "replay", done, numbers.rate(row.get("transitions_per_s")), "", details


def _evaluator(row: dict) -> tuple[str, ...]:
    details = (
        f"eval return {numbers.decimal(row.get('eval_return'))}  "
        f"episodes {numbers.count(row.get('eval_episodes'))}"
        f"  version {numbers.count(row.get('eval_version'))} of {numbers.count(row.get('param_version'))}"
    )
    return "evaluator", f"{numbers.count(row.get('evaluations'))} evaluations", "", "", details


def _fill(row: dict) -> str:
    fill = row.get("replay_fill")
    return "-" if fill is None else numbers.percent(100 * fill)


def print_line(row: dict) -> None:
    """Print a row of the log as one line."""
    say(line(row))
