"""What a synthetic role uses of a core, and how often it looks for work."""

from __future__ import annotations

import resource
import time

Moment = tuple[float, float, int]
SETTLED_S = 1.0  # from the first step on; what follows is given by itself


class Usage:
    """Seconds, CPU seconds and steps from a role's first step to the end of the run."""

    def __init__(self) -> None:
        self._start: Moment | None = None
        self._settled: Moment | None = None
        self._end: Moment | None = None
        self._settles_at, self._steps = float("inf"), 0

    def begin(self) -> None:
        """Mark a step."""
        self._steps += 1
        if self._start is None:
            self._start = self._now()
            self._settles_at = self._start[0] + SETTLED_S
        elif time.perf_counter() >= self._settles_at:
            self._settled, self._settles_at = self._now(), float("inf")

    def end(self) -> None:
        """Mark the end of the run."""
        if self._end is None:
            self._end = self._now()

    def summary(self) -> dict:
        """Return ``seconds``, ``cpu_s`` (user and system) and ``peak_mb`` (resident, of the whole life of the process).

        ``settled`` holds ``seconds``, ``cpu_s`` and ``steps`` without the first ``SETTLED_S``; None where the run was shorter.
        """
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        settled = None if self._settled is None else self._since(self._settled)
        whole = self._since(self._start or self._now())
        return {"seconds": whole["seconds"], "cpu_s": whole["cpu_s"], "peak_mb": peak_mb, "settled": settled}

    def _since(self, start: tuple) -> dict:
        differences = (round(after - before, 4) for before, after in zip(start, self._end or self._now()))
        return dict(zip(("seconds", "cpu_s", "steps"), differences))

    def _now(self) -> tuple[float, float, int]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), used.ru_utime + used.ru_stime, self._steps
