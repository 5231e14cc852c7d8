"""The run log: rows of metrics, the conditions that end the run, and its result."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable

import numpy as np

from apex import checkpoint
from apex.config import Config
from apex.files import check_room
from apex.metrics import Counters, Hub
from apex.ports import Report
from apex.run_folder import RunFolder, make_result
from apex.say import warn
from apex.state import is_amount, is_number, require
from apex.tensorboard_log import Scalars
from apex.topology import ACTOR, EVALUATOR, Topology

STATE = {"wall_s": is_amount, "eval_return": is_number, "eval_episodes": is_amount, "evaluations": is_amount}
_ROW_BYTES = 1 << 20  # left free by the log; a row takes one kilobyte


class RunLog:
    """Collects reports and writes the run folder. Calls ``show(row)`` with every row of the log."""

    def __init__(
        self, config: Config, topology: Topology, folder: RunFolder, preset: str,
        show: Callable[[dict], None] = lambda row: None,
    ):  # fmt: skip
        self.config, self.topology, self.folder = config, topology, folder
        self.preset, self.show = preset, show
        self.hub = Hub(topology.num_actors, config.replay.ranks)
        self.scalars = Scalars(folder.tensorboard)
        self.started = time.monotonic()
        self.reason: str | None = None
        self.eval_return, self.eval_episodes = math.nan, 0
        self._evaluations = 0
        self._has_warned = False
        self._next_row = self.started + config.run.log_period_s

    def on_report(self, report: Report) -> None:
        """Store a report; raises ValueError for impossible values.

        Once the target is reached, later evaluations do not change the result.
        """
        self.hub.update(*report)
        if report.role != EVALUATOR or self.reason == "target_return":
            return
        values = Counters.from_vector(EVALUATOR, report.vector)
        if values["evaluations"] <= self._evaluations:
            return
        self._evaluations = int(values["evaluations"])
        self.eval_return, self.eval_episodes = float(values["eval_return"]), int(values["eval_episodes"])

    def reason_to_end(self, learner_steps: int, stop_requested: bool) -> str | None:
        """Return the reason why the run ends, or None while it continues. The first reason stays."""
        run = self.config.run
        rules = {
            "target_return": run.stop_at_target and self.eval_return >= run.target_return,
            "learner_steps": learner_steps >= run.max_learner_steps,
            "wall_s": bool(run.max_wall_s) and self.wall_s >= run.max_wall_s,
            "signal": stop_requested,
        }
        self.reason = self.reason or next((name for name, holds in rules.items() if holds), None)
        return self.reason

    @property
    def wall_s(self) -> float:
        """Seconds since the learner started."""
        return time.monotonic() - self.started

    def row_is_due(self) -> bool:
        """Whether ``run.log_period_s`` have passed since the last row."""
        return time.monotonic() >= self._next_row

    def state_dict(self) -> dict:
        """Return the state as plain values."""
        values = {"wall_s": self.wall_s, "eval_return": self.eval_return, "eval_episodes": self.eval_episodes}
        return values | {"evaluations": self._evaluations}

    def load_state_dict(self, state: dict, reports: dict[str, list[np.ndarray]]) -> None:
        """Restore ``state_dict``, and the newest reports: role -> vectors by index."""
        require(state, STATE)
        self.started -= state["wall_s"]
        self.eval_return, self.eval_episodes = state["eval_return"], state["eval_episodes"]
        self._evaluations = state["evaluations"]
        self.hub.start_from(reports, self.started)

    def last_reports(self) -> dict[str, dict[str, dict]]:
        """Return role -> index -> a state with the last reported counters, for ranks that do not reply."""

        def states(role: str) -> dict[str, dict]:
            held = [Counters.from_vector(role, vector) for vector in self.hub.reports(role)]
            return {str(index): {"counters": counters.state_dict()} for index, counters in enumerate(held)}

        return {role: states(role) for role in (ACTOR, EVALUATOR)}

    def keep_skipped(self, number: int, error: Exception, views: dict[str, np.ndarray], state: dict) -> None:
        """Write the batch and the networks of a skipped step to ``skipped/``, with a warning."""
        folder = self.folder.path / "skipped"
        stem = folder / f"{number:04d}-after-step-{state['learner_steps']}"
        try:
            folder.mkdir(exist_ok=True)
            np.savez(stem.with_suffix(".npz"), **views)  # type: ignore[arg-type]  # none is called allow_pickle
            checkpoint.save(stem.with_suffix(".pt"), state)
            kept = f"{stem}.npz and .pt hold its batch and the networks"
        except OSError as failure:
            kept = f"its batch cannot be written: {failure.strerror}"
        limit = self.config.learner.max_skipped_steps
        warn(f"apex: {error}; the step is skipped ({number}; the run fails after {limit}); {kept}")

    def close(self) -> None:
        """Write the last row of the log and the result."""
        row = self.write_row(last=True)
        with contextlib.suppress(OSError):
            self.scalars.close()
        assert self.reason is not None, "only reason_to_end ends a run"
        result = make_result(
            self.reason, 0, row,
            eval_return=self.eval_return, eval_episodes=self.eval_episodes, wall_s=self.wall_s,
            ranks=self.topology.size, transport=self.config.run.transport, preset=self.preset,
            seed=self.config.run.seed,
        )  # fmt: skip
        try:
            self.folder.write_result(result)
        except OSError as error:
            path, content = f"{self.folder.path}/result.json", json.dumps(result)
            warn(f"apex: {path} cannot be written: {error.strerror}; its content: {content}")

    def write_row(self, last: bool = False) -> dict:
        """Write a row to the run folder and the screen; return it."""
        self._next_row = time.monotonic() + self.config.run.log_period_s
        row = self.hub.row(last)
        try:
            check_room(self.folder.path, 0, _ROW_BYTES)  # on a full disk TensorBoard's thread ends the run
            self.folder.append_row(row)
            self.scalars.write(row)
        except OSError as error:  # a full disk does not end a run
            if not self._has_warned:
                warn(f"apex: warning: some rows of the log are lost: {error.strerror}; the run continues")
            self._has_warned = True
        self.show(row)
        return row
