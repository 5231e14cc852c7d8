"""Starts the ranks of a job on this host, like mpirun: ``python -m launch.run.spawn -n 4 -- COMMAND...``

Every rank gets APEX_RANK, APEX_SIZE, APEX_ENDPOINT (where the ranks meet: a private folder, removed at the
end, or what ``--endpoint`` says) and APEX_TOKEN (the secret by which the ranks of this job know each other).
SIGUSR1 is passed on to all. SIGTERM, SIGINT and SIGHUP end all at once. When one fails the others are ended,
and its status is returned; but one of those that ``--may-lose`` says is started again, with APEX_LIFE, the
number of processes that it had before, unless it was refused (status 2) or the first rank has ended; once
that has ended well, those that are still there are ended. The ranks die with this process, and this process
with the one that started it.

A job on several hosts has one of these on each, with the same APEX_TOKEN (at least 16 bytes in hex) in the
environment:

    launch.run.spawn --first 0 -n 3 --size 7 --endpoint tcp://10.0.0.1:5555 -- apex train pong --transport zmq
    launch.run.spawn --first 3 -n 4 --size 7 --endpoint tcp://10.0.0.1:5555 -- apex train pong --transport zmq
"""

from __future__ import annotations

from apex import processes, variables
from launch.run import beginning

if __name__ == "__main__":
    beginning.end_on_interrupt()  # what is imported below takes a while, in which Ctrl-C may come

import argparse
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from apex import leftovers
from apex.config import ConfigError
from apex.say import protect, warn
from apex.token import given_token, missing_token
from launch.run.options import Parser

_TOLD_S = 0.2  # when one fails: so that ranks that refuse a run together can say why
_LEAVE_S = 10  # for ranks that may be lost, once the first has ended well
_REFUSED = 2  # what a rank returns that would not start, and this for arguments it does not know
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGTSTP)


class Ended(BaseException):
    """A signal ends the job."""


def main(argv: list[str] | None = None) -> int:
    """Start the ranks; return the exit status when all have ended."""
    protect()
    try:
        options = _parser().parse_args(argv)
        token = _token(options)
    except ConfigError as error:
        warn(f"launch.run.spawn: {error}")
        return _REFUSED
    processes.end_with_parent(signal.SIGTERM)
    for number in _ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    ranks = Ranks()
    signal.signal(signal.SIGUSR1, lambda number, frame: ranks.signal(number))
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:  # a shell without jobs ignores it
        signal.signal(signal.SIGTSTP, lambda number, frame: ranks.stand_still())
    signal.signal(signal.SIGALRM, lambda number, frame: ranks.signal(signal.SIGKILL, options.may_lose))
    try:
        with _endpoint(options.endpoint) as endpoint:
            try:
                ranks.start(options, endpoint, token)
                return ranks.wait()
            finally:
                ranks.kill()
    except Ended as ended:
        return 128 + ended.args[0]
    except OSError as error:
        warn(f"launch.run.spawn: {options.command[0]}: {error.strerror}")
        return 127


def _end(number: int, frame: object) -> None:
    for each in _ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise Ended(number)


class Ranks:
    """The processes of this host."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, subprocess.Popen]] = {}  # pid -> rank, process
        self._lives: dict[int, int] = {}
        self._is_over = False  # the first rank, which ends last, has ended well

    def start(self, options: argparse.Namespace, endpoint: str, token: str) -> None:
        """Start them, each in its own process group: Ctrl-C on a terminal reaches only this process."""
        self._options = options
        self._job = {
            variables.SIZE: str(options.size or options.n),
            variables.ENDPOINT: endpoint,
            variables.TOKEN: token,
        }
        self._job[variables.FIRST] = str(options.first)
        if options.may_lose is not None:
            self._job[variables.MAY_LOSE] = str(options.may_lose)
        for rank in range(options.first, options.first + options.n):
            self._start(rank, 0)

    def _start(self, rank: int, life: int) -> None:
        spawner = os.getpid()
        # A signal that comes in between waits until there is a process to tell, or to end.
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        try:
            process = subprocess.Popen(
                self._options.command,
                env=os.environ | self._job | {variables.RANK: str(rank), variables.LIFE: str(life)},
                stdin=subprocess.DEVNULL, process_group=0, preexec_fn=lambda: _prepare(spawner, life),
            )  # fmt: skip
            self._running[process.pid], self._lives[rank] = (rank, process), life
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)

    def wait(self) -> int:
        """Return 0 once all have ended well, or at once the status of the first that has not."""
        while self._running:
            pid, status = os.wait()
            if pid not in self._running:
                continue
            rank, process = self._running.pop(pid)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode and self._starts_again(rank, process.returncode):
                self._start(rank, self._lives[rank] + 1)
            elif rank == 0 and not process.returncode and self._options.may_lose is not None:
                self._is_over = True
                signal.alarm(_LEAVE_S)
            elif process.returncode and not (self._is_over and rank >= self._options.may_lose):
                time.sleep(_TOLD_S)
                if process.returncode < 0:  # of itself it could say nothing
                    name = signal.Signals(-process.returncode).name
                    warn(f"apex: rank {rank} was ended by {name}, and with it the job")
                return process.returncode if process.returncode > 0 else 128 - process.returncode
        return 0

    def _starts_again(self, rank: int, status: int) -> bool:
        may_lose, lives = self._options.may_lose, self._options.lives
        first_is_here = self._options.first > 0 or any(other == 0 for other, _ in self._running.values())
        return (
            may_lose is not None
            and rank >= may_lose
            and status != _REFUSED
            and first_is_here
            and self._lives[rank] < lives
        )

    def signal(self, number: int, first: int = 0) -> None:
        """Send a signal to all that run, from a rank on."""
        processes.signal_all(
            [process.pid for rank, process in self._running.values() if rank >= first], number
        )

    def stand_still(self) -> None:
        """Ctrl-Z: stop the ranks and this process until the shell lets it go on; then let them."""
        self.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Leave none."""
        self.signal(signal.SIGKILL)
        for _, process in self._running.values():
            process.wait()


def _prepare(spawner: int, life: int) -> None:
    processes.end_with_parent(signal.SIGKILL)
    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    if (
        life
    ):  # the signal that ends the run comes to all ranks, and one that is still starting would die of it
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if os.getppid() != spawner:  # it ended before the kernel was told
        os._exit(1)


def _token(options: argparse.Namespace) -> str:
    """Return the job's token, a new one where none is set; raises :class:`ConfigError` for a weak one.

    Where ranks of other launchers belong to the job, it has to be set: each would make another.
    """
    given = given_token()
    if given is not None:
        return given.hex()
    if options.first > 0 or (options.size or options.n) > options.n:
        raise missing_token()
    return secrets.token_hex(16)


@contextlib.contextmanager
def _endpoint(asked: str | None) -> Iterator[str]:
    """Give the address where the ranks meet; a folder made for it is removed."""
    if asked == "tcp":
        yield f"tcp://127.0.0.1:{_free_port()}"
    elif asked is not None:
        yield asked
    else:
        with leftovers.folder(leftovers.SOCKETS, leftovers.sockets_parent()) as folder:
            yield f"ipc://{folder}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _parser() -> Parser:
    parser = Parser(prog="launch.run.spawn", description="Start the ranks of a job over ZeroMQ on this host.")
    parser.add_argument("-n", type=int, required=True, help="ranks to start here")
    parser.add_argument(
        "--size", type=int, help="ranks of the whole job, on all hosts (default: those started here)"
    )
    parser.add_argument(
        "--first", type=int, default=0, help="the first of the ranks started here (default: 0)"
    )
    parser.add_argument(
        "--endpoint",
        help="where the ranks meet: tcp://host:port, ipc:///folder, or tcp (a free port of 127.0.0.1)",
    )
    parser.add_argument(
        "--may-lose", type=int, metavar="RANK", help="ranks from this one on are started again when they fail"
    )
    parser.add_argument(
        "--lives", type=int, default=0, metavar="N", help="how often each of them (default: 0)"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what each rank runs")
    return parser


if __name__ == "__main__":
    sys.exit(beginning.to_the_end(main))
