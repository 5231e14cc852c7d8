"""How a role that has nothing to do waits, and how signals and long waits are noticed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from apex.ports import Bell, Port
from apex.role import Role
from apex.watchdog import Watchdog

_YIELDS = 10  # polls that only yield the core before the first sleep
_FIRST_SLEEP_S, _SHORT_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 1e-3, 20e-3
_OF_THE_SILENCE = 1 / 32  # share of the time without messages that the next sleep may take
_TAKEN_S = 200e-6  # a yield this long means that somebody else wanted the core
_SLEEP_ONLY_S = 1.0
_WOKEN_WITHIN_S = 5e-3  # longest first wait where messages end it: other events are then seen too


class Wait:
    """Yield the core a few times, then sleep, twice as long each time, from half the last sleep on.

    A rank blocked inside MPI spins at full load, so no role ever blocks there; polling with sleeps leaves the
    cores to the ranks that have work. A yield is the quickest way to wait on a core of one's own, but on one
    that another process computes on it gives away a whole slice: 4 ms, where a sleep of 50 us takes 115 us
    with or without company (both measured). So a rank that may have to share its core (``crowded``: there are
    more ranks than cores), or finds that it does, sleeps from the first poll on. A transport whose messages
    wake a sleeper has a ``wait(seconds)``, which takes the place of both.

    A sleep lasts a millisecond, or 1/32 of the time without messages if that is longer, and never above 20
    ms. So an idle rank polls 50 times a second, and what nobody announces is seen 20 ms late at most. Ranks
    of one host end sleeps above a millisecond by a bell (see ``shared.Bell``); shorter ones are not worth a
    system call.
    """

    def __init__(
        self, ranks: int = 1, cores: int = 1, woken_by: Callable[[float], None] | None = None,
        bell: Bell | None = None, traffic: Callable[[], int] | None = None,
        moving: Callable[[], bool] | None = None,
    ):  # fmt: skip
        """For one of ``ranks`` on a host with ``cores``; ``woken_by`` is the port's own ``wait``, if any.

        ``bell`` is the ``shared.Bell`` that neighbours ring, None without; ``traffic()`` counts messages that
        have come; ``moving()`` says whether one is on its way that only polls of this rank carry on: then no
        sleep is above a millisecond.
        """
        self.ranks, self.cores, self._woken_by = ranks, cores, woken_by
        self._bell, self._listens = bell, False
        self._traffic, self._known_traffic, self._moving = traffic, 0, moving
        self.crowded, self._yield_from = ranks > cores, 0.0
        self._idle_polls, self._sleep_s, self._slept_s = 0, _FIRST_SLEEP_S, 0.0
        self._silent_since: float | None = None

    def __str__(self) -> str:
        how = (
            "is woken by messages"
            if self._woken_by
            else "sleeps at once"
            if self.crowded
            else "yields its core, then sleeps"
        )
        return f"{self.ranks} ranks on {self.cores} cores here: a rank without work {how}"

    def reset(self) -> None:
        """After work: the next wait starts with half of the last sleep, at most half a millisecond."""
        self._idle_polls, self._silent_since = 0, None
        if self._slept_s:
            self._sleep_s, self._slept_s = max(min(self._slept_s, _SHORT_SLEEP_S) / 2, _FIRST_SLEEP_S), 0.0
        if self._listens:
            self._listen(False)

    def idle(self) -> float:
        """Wait once; return the seconds it took."""
        start = time.perf_counter()
        longest = self._longest(start)
        if self._woken_by is not None:
            self._idle_polls += 1
            self._woken_by(max(_WOKEN_WITHIN_S, longest))
            # Woken at once, and not for the first time: by a message that the role does not take yet.
            if self._idle_polls == 1 or time.perf_counter() - start >= _FIRST_SLEEP_S:
                return time.perf_counter() - start
        elif self._idle_polls < _YIELDS and not self.crowded and start >= self._yield_from:
            self._idle_polls += 1
            os.sched_yield()
            end = time.perf_counter()
            if end - start > _TAKEN_S:
                self._yield_from = end + _SLEEP_ONLY_S
            return end - start
        self._sleep(longest)
        return time.perf_counter() - start

    def _longest(self, now: float) -> float:
        """Return how long a sleep may last."""
        traffic = self._traffic() if self._traffic is not None else 0
        if traffic != self._known_traffic:
            self._known_traffic = traffic
            self._stir()
        if self._silent_since is None or (self._moving is not None and self._moving()):
            self._silent_since = now
        return min(max(_SHORT_SLEEP_S, (now - self._silent_since) * _OF_THE_SILENCE), _LONGEST_SLEEP_S)

    def _sleep(self, longest: float) -> None:
        self._sleep_s = min(self._sleep_s, longest)
        if self._bell is None or self._sleep_s <= _SHORT_SLEEP_S:
            time.sleep(self._sleep_s)
        elif not self._listens:
            self._listen(
                True
            )  # the next poll finds what was sent before anybody could know that this rank sleeps
            return
        elif self._bell.wait(self._sleep_s):
            self._stir()
            return
        self._slept_s, self._sleep_s = self._sleep_s, min(2 * self._sleep_s, longest)

    def _stir(self) -> None:
        """Something moves: look often for a while, as a message may take several polls."""
        self._idle_polls, self._sleep_s, self._silent_since = 0, min(self._sleep_s, _FIRST_SLEEP_S), None
        if self._listens:
            self._listen(False)

    def _listen(self, whether: bool) -> None:
        self._listens = whether
        if self._bell is not None:
            self._bell.listen(whether)


def wait_of(port: Port) -> Wait:
    """Return how a rank with this port waits, by the ranks on its host and the cores of this process."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Wait(port.ranks_here, cores, *port.waking())


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def on_stop_signals(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Call ``handler(number, frame)`` for every stop signal; SIGHUP stays ignored under nohup."""
    for number in _STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


class StopSignals:
    """SIGINT, SIGTERM, SIGUSR1 and SIGHUP ask for an orderly end; ``caught`` tells whether one came.

    ``went_on`` tells whether this process was stopped (SIGSTOP, Ctrl-Z) and goes on, until it is set back.
    """

    def __init__(self, forces: bool = False):
        """With ``forces``, a second Ctrl-C raises :class:`Forced`; else the launcher sees to that."""
        self.caught: str | None = None
        self.went_on = False
        self._forces = forces
        on_stop_signals(self._note)
        signal.signal(signal.SIGCONT, self._note_going_on)

    def ignore(self) -> None:
        """The run has ended: ignore signals, which may come when Python has removed its handlers."""
        on_stop_signals(signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._forces and self.caught and number == signal.SIGINT:
            self.ignore()  # a third would end what this one begins
            raise Forced(128 + number)
        self.caught = signal.Signals(number).name

    def _note_going_on(self, number: int, frame: FrameType | None) -> None:
        self.went_on = True


class Forced(BaseException):
    """A second Ctrl-C ends the process with ``status``, whatever it does."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


class DrainTimeout(RuntimeError):
    """The run has ended but messages of some rank never arrived."""


def drive(role: Role, watchdog: Watchdog, drain_s: float, signals: StopSignals, wait: Wait) -> None:
    """Step ``role`` until it has finished; ask for the end of the run when a signal has arrived.

    Raises :class:`DrainTimeout` where the end takes longer than ``drain_s``, from the last time on that this
    process went on.
    """
    deadline, now = None, time.monotonic()
    while not role.finished:
        if signals.caught and deadline is None:
            role.port.request_stop()
        if role.port.stopping:
            deadline = deadline or now + drain_s
            if now > deadline:
                raise _drain_timeout(role, watchdog.name, drain_s)
        is_at_work = role.step()
        if not is_at_work:
            role.counters.add("wait_s", wait.idle())
        now = time.monotonic()
        if signals.went_on:  # looked at after the clock, which goes on while a process is stopped
            signals.went_on, deadline = False, deadline and now + drain_s
            watchdog.went_on()
        if is_at_work:
            wait.reset()
            watchdog.reset()
        else:
            watchdog.check(role)
        watchdog.beat()


def _drain_timeout(role: Role, name: str, drain_s: float) -> DrainTimeout:
    return DrainTimeout(
        f"{name} could not finish within {drain_s:g} s of the end of the run; "
        f"it waits for {role.port.waits_for()}"
    )
