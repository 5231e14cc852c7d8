"""What all roles share: one non-blocking step at a time, periodic reports, an orderly end."""

from __future__ import annotations

import time

from apex.control import CheckpointRequest, NoMoreIntake, Request
from apex.metrics import Counters
from apex.ports import Port


class Role:
    """A role makes progress by ``step``; it never waits inside one.

    Subclasses give ``work`` (one unit of work; False when there was nothing to do) and may refine
    ``wind_down`` (the same after the run has ended) and ``update_counters``.
    """

    def __init__(self, role: str, port: Port, log_period_s: float):
        self.counters = Counters(role)
        self.port = port
        self._report_period_s = min(log_period_s / 8, 1.0)  # so that every row of the log sees fresh reports
        self._next_report = 0.0
        self._finishing = self.no_more_intake = False

    def step(self) -> bool:
        """Do one unit of work; return False when there was nothing to do but wait."""
        self.port.progress()
        request = self.port.poll_request()
        if type(request) is NoMoreIntake:
            self.no_more_intake = True
        if self.port.stopping:
            return self._end()
        if request is not None:
            # A step of its own: where roles take turns, nothing then moves between the first part of a
            # checkpoint and the last.
            self.on_request(request)
            return True
        self._report_if_due()
        return self.work()

    @property
    def finished(self) -> bool:
        """The run has ended and nothing is on its way any more."""
        return self.port.finished

    def work(self) -> bool:
        """Do one unit of the role's work."""
        raise NotImplementedError("a role defines work()")

    def wind_down(self) -> bool:
        """Do what is left to do after the run has ended."""
        return False

    def on_checkpoint(self, request: CheckpointRequest) -> None:
        """Write this rank's part of a checkpoint, or begin to, and acknowledge it once that is done."""
        raise NotImplementedError("a role that is asked for checkpoints defines on_checkpoint()")

    def waiting_for(self) -> str | None:
        """Say what the role waits for when ``step`` returns False; None if it may wait for long."""
        return self.port.waits_for()

    def may_finish(self) -> bool:
        """Whether the counters will not change any more, so that the last report can be sent."""
        return True

    def update_counters(self) -> None:
        """Bring counters up to date before a report."""

    def report(self) -> bool:
        """Send the counters to the learner; return whether the port took them."""
        self.update_counters()
        for kind, number in self.port.poll_refusals().items():
            self.counters.add(f"refused_{kind}", number)
        return self.port.send_report(self.counters.vector())

    def close(self) -> None:
        """Free what the role holds."""

    def on_request(self, request: Request) -> None:
        """Do what the learner asks for."""
        if type(request) is CheckpointRequest:
            self.on_checkpoint(request)

    def _end(self) -> bool:
        if (
            not self._finishing and self.may_finish() and self.report()
        ):  # the last counts wait for an earlier report to arrive
            self._finishing = True
            self.port.finish()
        elif not self._finishing and not self.may_finish():
            self._report_if_due()  # so that the learner sees it at work
        return self.wind_down()

    def _report_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._next_report and self.report():
            self._next_report = now + self._report_period_s
