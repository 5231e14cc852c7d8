"""How fast this machine copies memory: the limit that moving experience is measured against.

`python -m launch.bench.copy_rate START` copies for a while from the Unix time START on and prints both rates.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from apex import processes
from apex.say import say
from launch.bench.synthetic import used_nbytes

PROCESSES = (1, 2)
_SECONDS = 0.5
_STARTS_S = 1.0  # for processes to start and to touch their memory
_LARGE = 256 << 20
_SOURCES = 5  # messages that an actor holds
_TIMEOUT_S = 60.0


def rates() -> dict[str, dict[str, float]]:
    """Return ``{"plain": {"1": MB/s, "2": MB/s}, "messages": ...}``, of as many processes at once, added up.

    ``plain`` copies between two arrays that fit no cache. ``messages`` copies as intake does: from one of
    a few messages, which may be in a cache, to the next place of a large ring.
    """
    found: dict[str, dict[str, float]] = {"plain": {}, "messages": {}}
    for count in PROCESSES:
        together = _together(count)
        for name in found:
            found[name][str(count)] = round(sum(one[name] for one in together), 1)
    return found


def _together(count: int) -> list[dict]:
    start = time.time() + _STARTS_S
    command = [sys.executable, "-m", "launch.bench.copy_rate", str(start)]
    copying = [processes.start(command, processes.environment_for({}), subprocess.PIPE) for _ in range(count)]
    try:
        return [json.loads(process.communicate(timeout=_TIMEOUT_S)[0]) for process in copying]
    finally:
        for process in copying:
            process.kill()


def _measured(start: float) -> dict[str, float]:
    to, origin = np.zeros(_LARGE, np.uint8), np.ones(_LARGE, np.uint8)
    to[:] = 1
    nbytes = used_nbytes()
    block, places = 8 << 20, _LARGE // nbytes
    time.sleep(max(0.0, start - time.time()))
    plain = _rate(lambda n: np.copyto(_part(to, block, n), _part(origin, block, n)), block)
    messages = _rate(
        lambda n: np.copyto(_part(to, nbytes, n % places), _part(origin, nbytes, n % _SOURCES)), nbytes
    )
    return {"plain": plain, "messages": messages}


def _part(array: np.ndarray, nbytes: int, n: int) -> np.ndarray:
    start = n % (len(array) // nbytes) * nbytes
    return array[start : start + nbytes]


def _rate(copy: Callable[[int], object], nbytes: int) -> float:
    """Return MB/s of calling ``copy(n)`` for n = 0, 1, ..."""
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < _SECONDS:
        copy(n)
        n += 1
    return n * nbytes / (time.perf_counter() - start) / 1e6


if __name__ == "__main__":
    say(json.dumps(_measured(float(sys.argv[1]))))
