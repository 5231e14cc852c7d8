"""What mpirun itself says of ranks that it has lost, left out: the run tells of them, and goes on.

Its messages come between two lines of dashes, in the stream in which the ranks' own words come.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

_DASHES = "-" * 40
_OF_LAUNCHER = ("prterun has exited due to", "prterun noticed that process")
_STRAY = "LAUNCHER JOB OBJECT NOT FOUND"


def spoken(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that are not such messages of the launcher's."""
    held: list[str] = []
    for line in lines:
        is_border = line.startswith(_DASHES)
        if len(held) == 1 and not line.startswith(_OF_LAUNCHER):  # the dashes were of something else: nothing waits for their end
            yield held.pop()
        if held:
            held.append(line)
            if is_border:
                held = []
        elif is_border:
            held = [line]
        else:
            yield line.replace(_STRAY, "")
    yield from held


def follow(process: subprocess.Popen) -> threading.Thread:
    """Pass on what a process says on its stderr, a pipe of text; the thread that does so ends with the process."""

    def pass_on() -> None:
        for line in spoken(process.stderr):
            sys.stderr.write(line)
            sys.stderr.flush()

    thread = threading.Thread(target=pass_on, name="stderr", daemon=True)
    thread.start()
    return thread
