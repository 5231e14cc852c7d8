"""What a run leaves when it did not end well: the traceback, and a result in place of the learner's."""

from __future__ import annotations

from apex.config import Config, ConfigError
from apex.run_folder import RunFolder, make_result, row_fault
from apex.say import warn
from apex.topology import Topology


def leave_error(folder: RunFolder, text: str) -> bool:
    """Write the traceback that ends the run; return whether the disk took it."""
    try:
        folder.write_error(text)
        return True
    except OSError:
        return False


def write_error_result(
    folder: RunFolder, config: Config, topology: Topology, preset: str, status: int, reason: str = "error"
) -> None:  # fmt: skip
    """Write the result of a run whose learner wrote none or a wrong one, from the last row of its log."""
    row = next((row for row in reversed(folder.rows()) if row_fault(row) is None), None)
    known = row or {}
    result = make_result(
        reason, status, row,
        eval_return=known.get("eval_return"), eval_episodes=known.get("eval_episodes") or 0,
        wall_s=known.get("wall_s") or 0.0,
        ranks=topology.size, transport=config.run.transport, preset=preset, seed=config.run.seed,
    )  # fmt: skip
    try:
        earlier = folder.result()
    except ConfigError:  # none of ours
        earlier = {"status": 0}
    try:
        folder.write_result(
            result, replace=earlier is not None and (earlier["status"] == 0 or reason != "error")
        )
    except OSError as error:
        warn(f"apex: {folder.path}/result.json cannot be written: {error.strerror}")
