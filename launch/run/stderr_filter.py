"""What a job says, passed on line by line: one process writes to the terminal.

What mpirun itself says of ranks that it has lost can be left out: the run tells of them, and goes on. Its
messages come between two lines of dashes, in the stream in which the ranks' own words come.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator

from apex.say import say, warn

_DASHES = "-" * 40
_OF_LAUNCHER = ("prterun has exited due to", "prterun noticed that process")
_STRAY = "LAUNCHER JOB OBJECT NOT FOUND"


def spoken(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that are not such messages of the launcher's."""
    held: list[str] = []
    for line in lines:
        is_border = line.startswith(_DASHES)
        if len(held) == 1 and not line.startswith(
            _OF_LAUNCHER
        ):  # the dashes were of something else: nothing waits for their end
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


def follow(process: subprocess.Popen[str], hushes: bool) -> list[threading.Thread]:
    """Pass on the output of a process (pipes of text) in threads that end with it.

    With ``hushes`` only what is :func:`spoken`.
    """
    stdout, stderr = process.stdout, process.stderr
    assert stdout is not None and stderr is not None
    return [_pass_on(stdout, say), _pass_on(spoken(stderr) if hushes else stderr, warn)]


def _pass_on(lines: Iterable[str], tell: Callable) -> threading.Thread:
    def run() -> None:
        for line in lines:
            tell(line, end="")

    thread = threading.Thread(target=run, name=tell.__name__, daemon=True)
    thread.start()
    return thread
