"""Survives the loss of acting ranks, where ``run.fault_tolerance`` says so.

A new process replaces a lost rank and continues with its counters and its place in the epsilon ladder. A rank
that reports nothing for ``run.heartbeat_timeout_s`` is killed and then handled as lost. If no process can be
started, the remaining actors divide the whole epsilon ladder among themselves.
"""

from __future__ import annotations

import time

from apex.config import Config
from apex.control import EpsilonAssignment
from apex.metrics import Counters
from apex.ports import LOST, REPLACED, Change, LearnerPort, PeerLost
from apex.say import warn
from apex.topology import Topology
from learner.checkpointing import Checkpoints
from learner.run_log import RunLog

_START_TIMEOUT_S = 120.0  # importing and making environments, before the first report
_LONG_STEP_S = 1.0  # a longer pause of the learner itself extends every deadline


class Supervisor:
    """Acts on lost and silent acting ranks. ``step`` is called often, ``on_report`` for each report."""

    def __init__(
        self, config: Config, topology: Topology, port: LearnerPort, counters: Counters, run_log: RunLog,
        checkpoints: Checkpoints,
    ):  # fmt: skip
        self.config, self.topology, self.port, self.counters = config, topology, port, counters
        self.run_log, self.checkpoints = run_log, checkpoints
        acting, now = range(topology.evaluator_rank, topology.size), time.monotonic()
        self._deadlines = dict.fromkeys(acting, now + _START_TIMEOUT_S)  # of the next report, by rank
        self._replay_deadlines = dict.fromkeys(topology.replay_ranks_range, now)
        self._checked_at, self._is_ending = now, False
        self._replacements = dict.fromkeys(acting, 0)
        self._unreplaced: set[int] = set()
        self._assignments: dict[int, EpsilonAssignment] = {}  # by rank; not sent yet

    def on_report(self, role: str, index: int) -> None:
        """Extend the deadline of a rank that has reported."""
        rank = self.topology.rank(role, index)
        for deadlines in (self._deadlines, self._replay_deadlines):
            if rank in deadlines:
                deadlines[rank] = time.monotonic() + self._timeout_s()

    def step(self) -> None:
        """Handle losses and replacements, kill silent ranks, and send epsilon assignments."""
        for change in self.port.poll_changes():
            self._on_change(change)
        self._check_deadlines(time.monotonic())
        for rank, assignment in list(self._assignments.items()):
            if self.checkpoints.assign(rank, assignment):
                del self._assignments[rank]

    def _on_change(self, change: Change) -> None:
        if change.what == LOST:
            self._on_loss(change.rank, change.why)
        elif change.what == REPLACED:
            self.counters.add("actors_replaced")
            self.checkpoints.on_replacement(change.rank)
            self._deadlines[change.rank] = time.monotonic() + _START_TIMEOUT_S
            warn(f"apex: a new process has joined as {self.topology.name(change.rank)}")
            if self._unreplaced:  # it starts with its epsilons of the whole ladder
                self._divide_ladder()
        else:
            self._on_failed_replacement(change.rank, change.why)

    def _on_loss(self, rank: int, why: str) -> None:
        name, limit = self.topology.name(rank), self.config.run.max_replacements
        self.counters.add("actors_lost")
        self.checkpoints.on_loss(rank)
        self._deadlines.pop(rank, None)
        self._assignments.pop(rank, None)
        if self.port.stopping:
            warn(f"apex: {name} was lost while the run ended: {why}")
            return
        self._replacements[rank] += 1
        number = self._replacements[rank]
        if number > limit:
            raise PeerLost(f"{name} was lost again ({why}) after {limit} replacements (run.max_replacements)")
        warn(f"apex: {name} was lost: {why}; a new process replaces it ({number} of {limit})")
        self.port.replace(rank, self._handover(rank))

    def _on_failed_replacement(self, rank: int, why: str) -> None:
        warn(f"apex: {self.topology.name(rank)} is not replaced: {why}")
        self._unreplaced.add(rank)
        if self.port.stopping:
            return
        if self._unreplaced.issuperset(self.topology.actor_ranks):
            raise RuntimeError(f"the last actor was lost, and no process can be started: {why}")
        self._divide_ladder()

    def _handover(self, rank: int) -> dict:
        """Return the state that a new process starts from, and its incarnation, which is never used twice."""
        role, index = self.topology.role(rank)
        incarnation = 1 + int(self.counters["actors_lost"]) + (int(self.counters["learner_steps"]) << 20)
        counters = self.run_log.hub.reports(role)[index].tolist()
        return {"life": incarnation, "counters": counters, "folder": str(self.run_log.folder.path)}

    def _check_deadlines(self, now: float) -> None:
        paused, self._checked_at = now - self._checked_at, now
        blocking = self._blocking_the_end(now) if self._is_ending else set()
        end_begins, self._is_ending = self.port.stopping and not self._is_ending, self.port.stopping
        for rank in self._deadlines:
            if paused > _LONG_STEP_S:
                self._deadlines[rank] += paused
            if end_begins or (self._is_ending and rank not in blocking):
                self._deadlines[rank] = now + self._timeout_s()
        for rank in [rank for rank, deadline in self._deadlines.items() if deadline < now]:
            self._deadlines[rank] = now + self.config.run.heartbeat_timeout_s
            action = "it is killed" if self.port.kill(rank) else "no process of its host can kill it yet"
            warn(f"apex: {self.topology.name(rank)} sent no report within run.heartbeat_timeout_s: {action}")

    def _blocking_the_end(self, now: float) -> set[int]:
        """Return the acting ranks that block the end; none while they may wait for a silent replay rank."""
        awaited = self.port.awaited()
        acting = set(filter(self.topology.is_acting, awaited))
        is_replay_alive = all(self._replay_deadlines.get(rank, now) > now for rank in awaited - acting)
        return acting if is_replay_alive else set()

    def _timeout_s(self) -> float:
        """Return how long a rank may stay silent; shorter at the end, to leave time to end without it."""
        run = self.config.run
        timeout_s = run.heartbeat_timeout_s
        return min(timeout_s, run.shutdown_timeout_s / 4) if self.port.stopping else timeout_s

    def _divide_ladder(self) -> None:
        """Divide the whole epsilon ladder among the remaining actors."""
        actors = [rank for rank in self.topology.actor_ranks if rank in self._deadlines]
        self._assignments = {rank: EpsilonAssignment(i, len(actors)) for i, rank in enumerate(actors)}
