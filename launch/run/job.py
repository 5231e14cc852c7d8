"""Starts the ranks of a run as one job, follows it, forwards signals, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from apex import checkpoint, leftovers, look, processes, variables
from apex.config import Config
from apex.look import Unreadable
from apex.loop import on_stop_signals
from apex.run_folder import RunFolder
from apex.say import say, warn
from apex.topology import Topology
from launch.run import stderr_filter, view
from launch.run.meeting import Meeting
from launch.run.outcome import leave_error, write_error_result

_RANKS_END_S = 15.0  # once the result is written
_LAUNCHER_ENDS_S = 5.0  # it kills its ranks within a second of SIGTERM
_STILL = "Tt"  # states of a process: stopped, traced
_LOOKS = 100  # a process in the kernel's hands may never stop
_LOOK_AGAIN_S = 0.02
_BY_SIGNAL = 128  # plus the signal's number: the exit status of what a signal has ended


class Asked:
    """The signals that the launcher received: the first ends the run, a second Ctrl-C forces that."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.is_forced = False
        on_stop_signals(self._note)

    def _note(
        self, number: int, frame: object
    ) -> None:  # says nothing: what it interrupts may be saying something
        self.is_forced = self.is_forced or (self.first is not None and number == signal.SIGINT)
        self.first = self.first or signal.Signals(number)


def run(
    launcher: list[str], environment: dict[str, str],
    config: Config, topology: Topology, folder: RunFolder, preset: str, arguments: list[str], asked: Asked,
) -> int:  # fmt: skip
    """Run ``apex ARGUMENTS`` as the ranks of ``launcher``; return the exit status once all have ended."""
    hushes = config.run.fault_tolerance == "actors" and config.run.transport == "mpi"
    meeting = Meeting(folder.path, topology, config.run.watchdog_s, config.run.meet_s)
    meeting.open()
    command = [*launcher, *processes.python("launch.cli.main"), *arguments]
    variables_of_ranks = processes.environment_for(environment) | {variables.RUN_FOLDER: str(folder.path)}
    process = processes.start(command, variables_of_ranks, subprocess.PIPE, subprocess.PIPE)
    passing_on = stderr_filter.follow(process, hushes)
    job = _Job(process, folder, config, meeting, asked)
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:  # a shell without jobs ignores it
        signal.signal(signal.SIGTSTP, job.stand_still)
    try:
        resumes = variables.CHECKPOINT in environment
        view.follow(folder.path, job.is_running, f"{preset}, {topology.size} ranks", only_new=resumes)
    finally:
        job.end()
        meeting.close()
        for thread in passing_on:
            thread.join(_LAUNCHER_ENDS_S)
        process.wait()
        leftovers.remove_abandoned_sockets()
    return _conclude(config, topology, folder, preset, job)


class _Job:
    """The launcher's processes until they end: by themselves, after a signal, at once, or by force."""

    def __init__(
        self, process: subprocess.Popen, folder: RunFolder, config: Config, meeting: Meeting, asked: Asked
    ):
        self.process, self.folder, self.asked = process, folder, asked
        self.reason: str | None = None  # why this process has ended the job, if it has
        self._meeting, self._is_watched = (
            meeting,
            config.run.transport == "mpi",
        )  # over ZeroMQ the learner tells
        self._tolerant = config.run.fault_tolerance == "actors"
        self._told = self._passed_on = False
        self._ends_until: float | None = None
        self._error_before: str | None = None

    def is_running(self) -> bool:
        """Return whether to go on waiting; passes on the signal that has arrived since the last call."""
        if self.process.poll() is not None:
            return False
        self._tell_of_signals()
        self.reason = self._reason_to_end()
        with contextlib.suppress(Unreadable):  # the disk may give it at the next look
            self._error_before = self.folder.error()
        # A launcher that outlives its ranks may outlive the one that the run cannot go on without.
        failed = self._tolerant and self._error_before is not None
        return self.reason is None and not failed and not self._is_overdue()

    def stand_still(self, number: int, frame: object) -> None:
        """Ctrl-Z: stop the ranks of this host and this process until the shell continues them."""
        for _ in range(_LOOKS):  # again: one may have started another meanwhile
            running = [
                pid
                for pid, about in processes.of_session(self.process.pid).items()
                if about.state not in _STILL
            ]
            if not running:
                break
            processes.signal_all(running, signal.SIGSTOP)
            time.sleep(_LOOK_AGAIN_S)
        os.kill(os.getpid(), signal.SIGSTOP)
        processes.signal_all(processes.of_session(self.process.pid), signal.SIGCONT)
        self._meeting.restart()
        self._ends_until = None

    def was_ended(self, result: dict | None) -> bool:
        """Whether another process ended the launcher of the ranks: then no rank has reported an error."""
        signalled = self.asked.first is None and (result is None or result["reason"] == "signal")
        # Of a run whose folder was removed there is no result either.
        return (
            self._meeting.has_begun()
            and signalled
            and self.folder.error() is None
            and look.is_there(self.folder.path)
        )

    def status(self) -> int:
        """Return the exit status of the job, once it has ended."""
        if self.reason is not None:
            return {"signal": 0, "killed": _BY_SIGNAL + signal.SIGINT, "error": 1}[self.reason]
        status = self.process.wait()
        return _BY_SIGNAL - status if status < 0 else status

    def _tell_of_signals(self) -> None:
        if self.asked.first is not None and not self._told:
            self._told = True
            force = " (press Ctrl-C again to force it)" if self.asked.first == signal.SIGINT else ""
            warn(f"apex: {self.asked.first.name}: ending the run{force}")

    def _reason_to_end(self) -> str | None:
        """Return why to end the job at once, or None; where a signal is to end it in order, pass that on."""
        if self.asked.is_forced:
            warn("apex: Ctrl-C again: the ranks are killed")
            return "killed"
        has_begun = self._meeting.has_begun()
        if self.asked.first is not None and not has_begun:
            return "signal"  # no role has begun: there is nothing to save, and nobody who could end in order
        if self.asked.first is not None and not self._passed_on:
            self._passed_on = True
            self.process.send_signal(signal.SIGUSR1)  # the launcher forwards it to every rank
        unmet = self._meeting.watch() if self._is_watched and not has_begun else None
        if unmet is not None:
            leave_error(self.folder, f"apex: {unmet}\n")
            return "error"
        return None

    def _is_overdue(self) -> bool:
        """Whether the launcher outlives the run: a process that was to replace a lost one may hang."""
        with contextlib.suppress(Unreadable):
            if self._tolerant and self._ends_until is None and self.folder.result() is not None:
                self._ends_until = time.monotonic() + _RANKS_END_S
        return self._ends_until is not None and time.monotonic() > self._ends_until

    def end(self) -> None:
        """Leave no process behind: the launcher kills its ranks on SIGTERM, a killed mpirun leaves them."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_LAUNCHER_ENDS_S)
        processes.kill_all(lambda: processes.of_session(self.process.pid), _RANKS_END_S)
        if self.reason in ("signal", "killed") and self._error_before is None:
            self.folder.remove_error()  # that of a rank which saw another end first


def _conclude(config: Config, topology: Topology, folder: RunFolder, preset: str, job: _Job) -> int:
    """Make sure there is a result, and put what went wrong last on the screen."""
    status, result, reason = job.status(), folder.result(), job.reason
    if reason is None:
        reason = "error"
        if result is None:
            status = status or 1
        elif (
            config.run.fault_tolerance == "actors"
        ):  # the launcher's own is that of the first rank that was lost
            status = result["status"] or (0 if folder.error() is None else status or 1)
        if (
            status
            and config.run.fault_tolerance == "actors"
            and folder.error() is None
            and not any(folder.tensorboard.glob("*"))
        ):
            leave_error(folder, "apex: a rank ended before all ranks had met\n")
        if 0 < status <= _BY_SIGNAL and job.was_ended(result):
            status = _BY_SIGNAL + signal.SIGTERM  # mpirun, told to end, returns 1 without a word
        if status > _BY_SIGNAL and (config.run.fault_tolerance == "nobody" or folder.error() is None):
            reason = "killed"
    if status or result is None:
        write_error_result(folder, config, topology, preset, status, reason)
    view.conclude(folder)
    if status:
        _tell_how_to_go_on(folder)
    error = folder.error()
    if error is not None:
        warn(error, end="")
    return status


def _tell_how_to_go_on(folder: RunFolder) -> None:
    try:
        newest = next(iter(checkpoint.complete(folder.checkpoints)), None)
    except Unreadable as error:
        warn(f"apex: {error}")
        return
    if newest is not None:
        say(f"apex: to go on from {newest.name}: apex train --resume {folder.path}")
