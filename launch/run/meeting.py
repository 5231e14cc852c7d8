"""What ranks write into the run folder as they start: over MPI no rank can send before all have met."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from apex import look, variables
from apex.look import Unreadable
from apex.say import warn
from apex.topology import Topology, names_of

_FOLDER, _MET, _BUILT, _BEGUN = ".starting", "-met", "-built", "begun"


class _Stage(NamedTuple):
    suffix: str  # of what each rank leaves behind it
    what: str  # those do who have not come so far
    fault: str | None  # of those who never do; None: however long it takes


_STAGES = (
    _Stage("", "", "did not come"),
    _Stage(_MET, ", which start", "came, but did not meet the others"),
    _Stage(_BUILT, ", which start", None),
)


def arrive(rank: int) -> None:
    """Say that this rank is about to meet the others."""
    _leave(str(rank))


def meet(rank: int) -> None:
    """Say that this rank has met all others."""
    _leave(f"{rank}{_MET}")


def build(rank: int) -> None:
    """Say that this rank is ready to begin its role."""
    _leave(f"{rank}{_BUILT}")


def begin() -> None:
    """Mark, on the learner, that every rank has begun: from now on a signal ends the run in order."""
    _leave(_BEGUN)


def _leave(name: str) -> None:
    run_folder = os.environ.get(variables.RUN_FOLDER)
    if run_folder is not None:
        with contextlib.suppress(OSError):  # the folder has gone: what was to be told matters to nobody
            (Path(run_folder) / _FOLDER / name).touch()


class Meeting:
    """What the launcher sees of it: who has come, and whether the roles have begun."""

    def __init__(self, folder: Path, topology: Topology, watchdog_s: float, limit_s: float):
        self._folder, self._size = folder / _FOLDER, topology.size
        self._watchdog_s, self._limit_s = watchdog_s, limit_s
        self._missing: tuple[set[int], _Stage] = set(), _STAGES[0]
        self._told = self._has_begun = False
        self.restart()

    def open(self) -> None:
        """Make the place, empty, before the ranks are started."""
        self.close()
        with contextlib.suppress(OSError):
            self._folder.mkdir()

    def close(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def restart(self) -> None:
        """Count the time anew, as after the job stood still."""
        self._since = time.monotonic()

    def has_begun(self) -> bool:
        """Whether every rank has begun its role.

        True as well while that cannot be seen, or the run folder is removed: a signal then ends the run in
        order.
        """
        try:
            self._has_begun = (
                self._has_begun or look.is_there(self._folder / _BEGUN) or not look.is_there(self._folder)
            )
        except Unreadable:
            return True
        return self._has_begun

    def watch(self) -> str | None:
        """Warn of missing ranks after ``watchdog_s`` without another; return why to give up, when due."""
        try:
            missing, stage = self._awaited()
        except Unreadable:  # the disk may answer at the next look
            return None
        if (missing, stage) != self._missing or not missing:
            self._missing, self._told = (missing, stage), False
            self.restart()
            return None
        quiet_s, names = time.monotonic() - self._since, names_of(missing, self._size)
        if quiet_s > self._limit_s and stage.fault is not None:
            return f"{names} {stage.fault} within {self._limit_s:g} s (run.meet_s)"
        if quiet_s > self._watchdog_s and not self._told:
            self._told = True
            warn(
                f"apex: {self._watchdog_s:g} s without another rank: the others wait for {names}{stage.what}"
            )
        return None

    def _awaited(self) -> tuple[set[int], _Stage]:
        """Return the first stage that not every rank has behind it, and the ranks that have not."""
        for stage in _STAGES:
            missing = {
                rank
                for rank in range(self._size)
                if not look.is_there(self._folder / f"{rank}{stage.suffix}")
            }
            if missing:
                break
        return missing, stage
