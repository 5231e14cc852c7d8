"""Starts the ranks of a job on this host, as mpirun does for MPI: ``python -m launch.spawn -n 4 -- COMMAND...``

Every rank gets APEX_RANK, APEX_SIZE, APEX_ENDPOINT (where the ranks meet: a private folder, removed at the
end, or what ``--endpoint`` says) and APEX_TOKEN (what the ranks of this job call themselves). SIGUSR1 is
passed on to all. SIGTERM, SIGINT and SIGHUP end all at once. When one fails the others are ended, and its
status is returned. The ranks die with this process, and this process with the one that started it.

A job on several hosts has one of these on each, with the same APEX_TOKEN in the environment:

    launch.spawn --first 0 -n 3 --size 7 --endpoint tcp://10.0.0.1:5555 -- apex train pong --transport zmq
    launch.spawn --first 3 -n 4 --size 7 --endpoint tcp://10.0.0.1:5555 -- apex train pong --transport zmq
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG = 1
FOLDER_PREFIX = "apex-ranks-"  # then the pid of this process
_LONGEST_FOLDER = 80  # bytes; a socket's path may have 107
_TOLD_S = 0.2  # when one fails: so that ranks that refuse a run together can say why
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ended(BaseException):
    """A signal ends the job."""


def main(argv: list[str] | None = None) -> int:
    """Start the ranks; return the exit status when all have ended."""
    options = _parser().parse_args(argv)
    end_with_parent(signal.SIGTERM)
    for number in _ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    ranks = Ranks()
    signal.signal(signal.SIGUSR1, lambda number, frame: ranks.signal(number))
    try:
        with _endpoint(options.endpoint) as endpoint:
            try:
                ranks.start(options, endpoint)
                return ranks.wait()
            finally:
                ranks.kill()
    except Ended as ended:
        return 128 + ended.args[0]
    except OSError as error:
        print(f"launch.spawn: {options.command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127


def launcher(ranks: int) -> list[str]:
    """Return what to put before a command to run it as that many ranks."""
    return [sys.executable, "-P", "-m", "launch.spawn", "-n", str(ranks), "--"]


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _end(number, frame) -> None:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise Ended(number)


class Ranks:
    """The processes of this host."""

    def __init__(self):
        self._running: dict[int, subprocess.Popen] = {}

    def start(self, options, endpoint: str) -> None:
        """Start them, each in a group of its own, so that Ctrl-C on a terminal comes to this process alone."""
        job = {"APEX_SIZE": str(options.size or options.n), "APEX_ENDPOINT": endpoint}
        job["APEX_TOKEN"] = os.environ.get("APEX_TOKEN") or secrets.token_hex(16)
        spawner = os.getpid()
        for rank in range(options.first, options.first + options.n):
            process = subprocess.Popen(
                options.command, env=os.environ | job | {"APEX_RANK": str(rank)}, stdin=subprocess.DEVNULL,
                process_group=0, preexec_fn=lambda: _end_with_spawner(spawner),
            )  # fmt: skip
            self._running[process.pid] = process

    def wait(self) -> int:
        """Return 0 when all have ended well, or the status of the first that has not, as soon as it has not."""
        while self._running:
            pid, status = os.wait()
            process = self._running.pop(pid, None)
            if process is not None:
                process.returncode = os.waitstatus_to_exitcode(status)
                if process.returncode:
                    time.sleep(_TOLD_S)
                    return process.returncode if process.returncode > 0 else 128 - process.returncode
        return 0

    def signal(self, number: int) -> None:
        """Send a signal to all that run."""
        for process in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        """Leave none."""
        self.signal(signal.SIGKILL)
        for process in self._running.values():
            process.wait()


def _end_with_spawner(spawner: int) -> None:
    end_with_parent(signal.SIGKILL)
    if os.getppid() != spawner:  # it ended before the kernel was told
        os._exit(1)


@contextlib.contextmanager
def _endpoint(asked: str | None):
    """Give the address where the ranks meet; a folder made for it is removed."""
    if asked == "tcp":
        yield f"tcp://127.0.0.1:{_free_port()}"
    elif asked is not None:
        yield asked
    else:
        folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=parent_folder())
        try:
            yield f"ipc://{folder}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def parent_folder() -> str:
    """Return the folder for temporary files, unless its name leaves no room for a socket's."""
    usual = tempfile.gettempdir()
    return usual if len(usual.encode()) <= _LONGEST_FOLDER - len(FOLDER_PREFIX) else "/tmp"


def remove_folders_of(spawner: int) -> None:
    """Remove what a spawner that was killed has left."""
    for name in os.listdir(parent_folder()):
        if name.startswith(f"{FOLDER_PREFIX}{spawner}-"):
            shutil.rmtree(os.path.join(parent_folder(), name), ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch.spawn", description="Start the ranks of a job over ZeroMQ on this host.")
    parser.add_argument("-n", type=int, required=True, help="ranks to start here")
    parser.add_argument("--size", type=int, help="ranks of the whole job, on all hosts (default: those started here)")
    parser.add_argument("--first", type=int, default=0, help="the first of the ranks started here (default: 0)")
    parser.add_argument("--endpoint", help="where the ranks meet: tcp://host:port, ipc:///folder, or tcp (a free port of 127.0.0.1)")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what each rank runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
