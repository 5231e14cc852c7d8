"""What a learner's port does by itself, whatever carries the messages: its own report, those heard, the wish to stop."""

from __future__ import annotations

import numpy as np

from apex.ports import Answer, Change, Report
from apex.topology import LEARNER_RANK
from apex.transport.process import end_process


class LearnerSide:
    """Comes before a transport's port among the bases of its learner port, which appends to ``_reports``, ``_answers`` and ``_changes``."""

    role: str
    index: int
    _processes: list  # of each rank: host, process, and when that began

    def __init__(self, *args):
        self._reports: list[Report] = []
        self._answers: list[Answer] = []
        self._changes: list[Change] = []
        self._asked_to_kill = 0
        self.stop_requested = False
        super().__init__(*args)

    def poll_reports(self) -> list[Report]:
        """Return the reports since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def poll_answers(self) -> list[Answer]:
        """Return the answers since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def poll_changes(self) -> list[Change]:
        """Return which acting ranks were lost or replaced since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def kill(self, rank: int) -> bool:
        """End a process of this host, or have another rank of its host do so; return whether there was a way."""
        host, *process = self._processes[rank]
        near = [r for r, (there, *_) in enumerate(self._processes) if there == host and r != rank and not self._is_away(r)]
        if LEARNER_RANK in near:
            return end_process(*process)
        if near:  # another each time: the first may hang as well
            self._asked_to_kill += 1
            self._have_killed(near[self._asked_to_kill % len(near)], np.array(process, np.int64))
        return bool(near)

    def poll_announcement(self) -> None:
        """Nobody announces anything to the learner."""

    def send_report(self, vector: np.ndarray) -> bool:
        """The learner's own report needs no message."""
        self._reports.append(Report(self.role, self.index, vector.copy()))
        return True

    def request_stop(self) -> None:
        """A signal arrived at the learner itself."""
        self.stop_requested = True
