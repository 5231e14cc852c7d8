"""Says who waits for whom, and where every rank is, when a wait or a single step has become long."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from pathlib import Path
from typing import TextIO

from apex.role import Role
from apex.say import warn

_LOOKS = 4  # times a limit that a rank says it is alive
_STOOD_STILL_S = 1.0  # between two looks; longer, and this process was stopped


class Watchdog:
    """Tells once per wait, after ``limit_s``, which role has waited how long and for what.

    With ``stacks``, the stacks of all threads of this rank are then written to that file. So are those of a
    rank that has been in one step for as long, by a thread outside of Python (``faulthandler``), as what it
    hangs in may never let Python run: such a rank is the one that the others wait for. A file that stays
    empty is removed. No wait counts in the first ``grace_s``: those that are waited for may still be
    starting.
    """

    def __init__(self, name: str, limit_s: float, stacks: Path | None = None, grace_s: float = 0.0):
        self.name, self.limit_s = name, limit_s
        self._file = self._opened(stacks)
        self._next_beat, self._kept_bytes = 0.0, 0
        self._counts_from = time.monotonic() + grace_s
        self.reset()
        self.beat()

    def reset(self) -> None:
        """There was work."""
        self._looked = time.monotonic()
        self._since = max(self._looked, self._counts_from)
        self._told = False

    def beat(self) -> None:
        """A step has ended: the next may take as long again."""
        now = time.monotonic()
        if self._file is not None and now >= self._next_beat:
            self._next_beat = now + self.limit_s / _LOOKS
            self._keep()
            faulthandler.dump_traceback_later(self.limit_s, repeat=True, file=self._file)

    def went_on(self) -> None:
        """This process was stopped (Ctrl-Z) and goes on: it did not hang, and nobody was waited for."""
        self._looked = time.monotonic()
        self._since = max(self._since, self._looked)
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()  # its time has passed: it may have written
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._kept_bytes)
                os.lseek(self._file.fileno(), self._kept_bytes, os.SEEK_SET)
            self._next_beat = 0.0
            self.beat()

    def check(self, role: Role) -> None:
        """Tell if the wait has become long."""
        now = time.monotonic()
        if now - self._looked > _STOOD_STILL_S:
            self._since += now - self._looked
        self._looked = now
        if self._told or now - self._since <= self.limit_s:
            return
        self._told = True
        awaited = role.waiting_for()
        if awaited is None:
            return
        where = ""
        if self._file is not None:
            faulthandler.dump_traceback(self._file)
            self._keep()
            where = f"; stacks of ranks that wait or hang are in {Path(self._file.name).parent}"
        warn(f"apex: {self.name} has waited {self.limit_s:g} s for {awaited}{where}")

    def close(self) -> None:
        """The role has ended."""
        if self._file is None:
            return
        faulthandler.cancel_dump_traceback_later()
        path = Path(self._file.name)
        self._file.close()
        try:
            if path.stat().st_size == 0:
                path.unlink()
            path.parent.rmdir()
        except OSError:  # it is not empty, or gone
            pass

    def _keep(self) -> None:
        """What has been written so far is of no process that was stopped."""
        if self._file is not None:
            self._kept_bytes = os.lseek(self._file.fileno(), 0, os.SEEK_CUR)

    @staticmethod
    def _opened(path: Path | None) -> TextIO | None:
        """Return the file, or None where the disk does not take it, which is no reason not to train."""
        if path is None:
            return None
        try:
            path.parent.mkdir(exist_ok=True)
            return open(path, "w")
        except OSError:
            return None
