"""The acting ranks as the learner sees them, where their loss is survived (``run.fault_tolerance``).

Who is lost is replaced by a new process, which goes on with the counters and the rungs of the epsilon ladder of the old
one. Who sends no report for ``run.heartbeat_timeout_s`` hangs: its process is ended, which makes it lost. Where no process can be
started, the actors that are left share out the whole ladder anew.
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

_STARTS_S = 120.0  # importing and making environments, before the first report
_LONG_LOOK_S = 1.0  # the learner itself was held up: that time is nobody's silence


class Supervisor:
    """Hears who is lost and who is silent, and has them replaced; told of reports by :meth:`heard`."""

    def __init__(
        self, config: Config, topology: Topology, port: LearnerPort, counters: Counters, run_log: RunLog, checkpoints: Checkpoints
    ):
        self.config, self.topology, self.port, self.counters, self.run_log = config, topology, port, counters, run_log
        self.checkpoints = checkpoints
        acting, now = range(topology.evaluator_rank, topology.size), time.monotonic()
        self._silent_at = dict.fromkeys(acting, now + _STARTS_S)  # when each has been silent for too long
        self._at_work_until = dict.fromkeys(topology.replay_ranks_range, now)  # by replay rank, as its last report tells
        self._looked, self._is_ending = now, False
        self._replacements = dict.fromkeys(acting, 0)
        self._unreplaced: set[int] = set()  # lost for good
        self._rungs: dict[int, EpsilonAssignment] = {}  # still to be told

    def heard(self, role: str, index: int) -> None:
        """A report of a rank has come."""
        rank = self.topology.rank(role, index)
        if rank in self._silent_at:
            self._silent_at[rank] = time.monotonic() + self._patience_s()
        elif rank in self._at_work_until:
            self._at_work_until[rank] = time.monotonic() + self._patience_s()

    def step(self) -> None:
        """Do what there is to be done."""
        for change in self.port.poll_changes():
            self._take(change)
        self._judge_silence(time.monotonic())
        for rank, rung in list(self._rungs.items()):
            if self.checkpoints.tell(rank, rung):
                del self._rungs[rank]

    def _take(self, change: Change) -> None:
        if change.what == LOST:
            self._lose(change.rank, change.why)
        elif change.what == REPLACED:
            self.counters.add("actors_replaced")
            self.checkpoints.join(change.rank)
            self._silent_at[change.rank] = time.monotonic() + _STARTS_S
            self._say(f"a new process is {self.topology.name(change.rank)}")
            if self._unreplaced:  # it begins with the whole ladder's epsilons
                self._share_out_the_ladder()
        else:
            self._give_up(change.rank, change.why)

    def _lose(self, rank: int, why: str) -> None:
        name, most = self.topology.name(rank), self.config.run.max_replacements
        self.counters.add("actors_lost")
        self.checkpoints.lose(rank)
        self._silent_at.pop(rank, None)
        self._rungs.pop(rank, None)
        if self.port.stopping:
            self._say(f"{name} was lost while the run ended: {why}")
            return
        self._replacements[rank] += 1
        if self._replacements[rank] > most:
            raise PeerLost(f"{name} was lost once more ({why}) after {most} replacements (run.max_replacements)")
        self._say(f"{name} was lost: {why}; a new process is started in its place ({self._replacements[rank]} of {most})")
        self.port.replace(rank, self._about(rank))

    def _give_up(self, rank: int, why: str) -> None:
        self._say(f"{self.topology.name(rank)} is not replaced: {why}")
        self._unreplaced.add(rank)
        if self.port.stopping:
            return
        if self._unreplaced.issuperset(self.topology.actor_ranks):
            raise RuntimeError(f"the last actor was lost, and no process can be started: {why}")
        self._share_out_the_ladder()

    def _about(self, rank: int) -> dict:
        """Return what a new process begins with: counters, and a number that no other in its place has had."""
        role, index = self.topology.role(rank)
        life = 1 + int(self.counters["actors_lost"]) + (int(self.counters["learner_steps"]) << 20)
        return {"life": life, "counters": self.run_log.hub.reports(role)[index].tolist(), "folder": str(self.run_log.folder.path)}

    def _judge_silence(self, now: float) -> None:
        held_up, self._looked = now - self._looked, now
        judged = self._judged_at_the_end(now) if self._is_ending else set()
        begins_to_end, self._is_ending = self.port.stopping and not self._is_ending, self.port.stopping
        for rank in self._silent_at:
            if held_up > _LONG_LOOK_S:
                self._silent_at[rank] += held_up
            if begins_to_end or (self._is_ending and rank not in judged):
                self._silent_at[rank] = now + self._patience_s()
        for rank in [rank for rank, silent_at in self._silent_at.items() if silent_at < now]:
            self._silent_at[rank] = now + self.config.run.heartbeat_timeout_s
            done = "its process is ended" if self.port.kill(rank) else "there is no process that could be ended, nor one in its place yet"
            self._say(f"{self.topology.name(rank)} has been silent for too long (run.heartbeat_timeout_s): {done}")

    def _judged_at_the_end(self, now: float) -> set[int]:
        """Return the acting ranks that the end waits for, unless a replay rank is silent, for which they may wait."""
        awaited = self.port.awaited()
        acting = set(filter(self.topology.is_acting, awaited))
        return acting if all(self._at_work_until.get(rank, now) > now for rank in awaited - acting) else set()

    def _patience_s(self) -> float:
        """Return how long a rank may be silent: at the end no longer than leaves time to end without it."""
        run = self.config.run
        return min(run.heartbeat_timeout_s, run.shutdown_timeout_s / 4) if self.port.stopping else run.heartbeat_timeout_s

    def _share_out_the_ladder(self) -> None:
        """Give the actors that are there the whole ladder: no part of it stays without one."""
        there = [rank for rank in self.topology.actor_ranks if rank in self._silent_at]
        self._rungs = {rank: EpsilonAssignment(position, len(there)) for position, rank in enumerate(there)}

    def _say(self, text: str) -> None:
        warn(f"apex: {text}")
