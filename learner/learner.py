"""The learner: trains on prefetched batches, returns priorities, publishes weights, and ends the run."""

from __future__ import annotations

from typing import Any

import numpy as np

from apex import weights
from apex.checkpoint import Reader
from apex.config import Config
from apex.control import NoMoreIntake
from apex.ports import LearnerPort
from apex.role import Role
from apex.schema import EnvSpec, priority_layout, sample_layout, weight_layout
from apex.state import Checks, are_numbers, is_count, require, table_of
from apex.topology import ACTOR, EVALUATOR, LEARNER, REPLAY, Topology
from learner import importance
from learner import run_log as log
from learner.checked import sample_fault
from learner.checkpointing import Checkpoints, to_cpu
from learner.importance import ImportanceWeights
from learner.run_log import RunLog
from learner.supervisor import Supervisor
from learner.train_step import NotFinite, StepResult, TrainStep

_are_replies = table_of(lambda state: isinstance(state, dict) and are_numbers(state.get("counters")))


def _are_answers(held: Any) -> bool:
    """Whether ``held`` is role -> index -> state of the ranks that write no file."""
    is_by_role = isinstance(held, dict) and held.keys() <= {ACTOR, EVALUATOR}
    return is_by_role and all(map(_are_replies, held.values()))


STATE: Checks = {
    "run_log": log.STATE, "importance": importance.STATE, "counters": are_numbers,
    "param_version": is_count, "turn": is_count, "requested": is_count, "publish_at": is_count,
    "answers": _are_answers,
}  # fmt: skip


class Learner(Role):
    """Algorithm 2 of Horgan et al. 2018, with ``learner.prefetch`` sample requests open at any time.

    Resumes from the checkpoint ``reader`` if there is one.
    """

    port: LearnerPort

    def __init__(
        self, config: Config, spec: EnvSpec, port: LearnerPort, topology: Topology, run_log: RunLog,
        reader: Reader | None = None,
    ):  # fmt: skip
        super().__init__(LEARNER, port, config.run.log_period_s)
        self.config, self.run_log = config, run_log
        self.train = TrainStep(config, spec)
        beta, normalizer = config.learner.beta, config.learner.is_normalizer
        self.importance = ImportanceWeights(beta, normalizer, topology.replay_ranks)
        self._samples, self._num_actions = sample_layout(spec, config.learner.batch_size), spec.num_actions
        self._priorities = priority_layout(config.learner.batch_size)
        self._weights = weight_layout(weights.size(self.train.online))
        self._turn = self._requested = 0  # the replay rank of the next request; open requests
        self._param_version = self._publish_at = 0  # publishes so far; learner steps of the next
        self._is_exact = config.run.transport == "local"  # a resumed run repeats the original to the last bit
        self._no_more_intake_sent = False
        steps = -1 if reader is None else reader.learner_steps
        self.checkpoints = Checkpoints(config, topology, run_log.folder.checkpoints, port, steps)
        if reader is not None:
            self._resume(reader)
        self.supervisor: Supervisor | None = None
        if config.run.fault_tolerance == "actors":
            self.supervisor = Supervisor(config, topology, port, self.counters, run_log, self.checkpoints)

    def work(self) -> bool:
        """Train on one batch if one has arrived."""
        if self._follow_run() or self.port.stopping:
            return True
        if self.run_log.reason is not None:
            return False  # the last checkpoint is being written
        self._publish_if_requested(self.train.learner_steps)
        self._fill_pipeline()
        arrived = self.port.poll_sample()
        if arrived is None:
            return False
        self._requested -= 1
        self._fill_pipeline()  # the replay ranks draw and gather the next batches while this one trains
        self._train(*arrived)
        return True

    def wind_down(self) -> bool:
        """Keep receiving reports: the last ones complete the counts of the result."""
        if self.supervisor is not None:
            self.supervisor.step()
        self._send_no_more_intake()
        return self._poll_reports()

    def _send_no_more_intake(self) -> None:
        """Notify the replay ranks once all actors have finished, so that their last reports are complete."""
        topology = self.run_log.topology
        if not self._no_more_intake_sent and self.port.awaited().isdisjoint(topology.actor_ranks):
            self._no_more_intake_sent = True
            for rank in topology.replay_ranks_range:
                self.port.request(rank, NoMoreIntake())

    def waiting_for(self) -> str:
        """Return what the learner waits for, in words."""
        if self.run_log.reason is not None and not self.port.stopping:
            return "the last checkpoint"
        return f"sample batches: {self.port.waits_for()}"

    def close(self) -> None:
        """Write the last row of the log and the result."""
        self._poll_reports()
        self.run_log.close()

    def _fill_pipeline(self) -> None:
        while self._requested < self.config.learner.prefetch:
            self.port.request_sample(self._turn)
            self._turn = (self._turn + 1) % self.run_log.topology.replay_ranks
            self._requested += 1

    def _train(self, replay: int, message: np.ndarray) -> None:
        views = self._samples.views(message)
        fault = sample_fault(views, self._num_actions)
        if fault is not None:
            self.port.refuse("sample", f"a sample batch of replay {replay}: {fault}")
            return
        try:
            result = self.train(views, self.importance(replay, views))
        except NotFinite as error:
            self._skip(error, views)
            return
        priorities = self._priorities.views(self.port.priority_buffer())
        priorities["key"][:] = views["key"]
        priorities["priority"][:] = result.priority
        self.port.send_priorities(replay)
        self._update_gauges(result, views["param_version"])

    def _skip(self, error: NotFinite, views: dict[str, np.ndarray]) -> None:
        """Leave out the step, keep its batch in a file, and leave priorities unchanged.

        Raises ``error`` after more than ``learner.max_skipped_steps``.
        """
        self.counters.add("skipped_steps")
        skipped = int(self.counters["skipped_steps"])
        self.run_log.keep_skipped(skipped, error, views, self.train.state_dict())
        if skipped > self.config.learner.max_skipped_steps:
            raise error

    def _publish_if_requested(self, learner_steps: int) -> None:
        """Publish if that is due and a rank waits for weights: to flatten them for nobody would cost time."""
        is_due = learner_steps >= self._publish_at
        # A resumed evaluator may ask at another time, so an exact run publishes whenever that is due.
        if not (is_due and (self._is_exact or self.port.wants_weights(learner_steps))):
            return
        period = self.config.learner.publish_period
        self._publish_at = (learner_steps // period + 1) * period
        self.train.check_finite()
        self._param_version += 1
        publish = self._weights.views(self.port.publish_buffer(self._weights.nbytes))
        publish["header"][:] = self._param_version, learner_steps
        weights.flatten(self.train.online, publish["vector"])
        self.port.publish()
        self.counters.set("param_version", self._param_version)

    def _update_gauges(self, result: StepResult, versions: np.ndarray) -> None:
        self.counters.set("learner_steps", self.train.learner_steps)
        self.counters.set("staleness", self._param_version - versions.mean())
        for name, value in result._asdict().items():
            if name != "priority":
                self.counters.set(name, value)

    def _follow_run(self) -> bool:
        """Receive reports, write the log, end the run at a limit; return whether a checkpoint has started.

        A step that starts a checkpoint does nothing else, nor does another role's step that receives the
        request. So where roles take turns, all parts of a checkpoint show one moment.
        """
        if self.run_log.row_is_due():
            self.report()  # so that the learner's own counts are up to date
            self._poll_reports()
            self.run_log.write_row()
        self._poll_reports()
        if self.supervisor is not None:
            self.supervisor.step()
        self.checkpoints.poll()
        steps = self.train.learner_steps
        if self.run_log.reason_to_end(steps, self.port.stop_requested) is not None:
            if self.checkpoints.finish(steps, self._copy_state):
                self.port.stop()
            return False
        due = self.checkpoints.is_due(steps)
        if due:
            self.checkpoints.start(steps, self._copy_state)
        return due

    def _copy_state(self) -> tuple[dict, dict]:
        """Return copies of the state of ``train``, which has a file of its own, and of all other state."""
        self.train.check_finite()
        return to_cpu(self.train.state_dict()), self.state_dict()

    def state_dict(self) -> dict:
        """Return the learner's state without that of ``train``."""
        values = {"param_version": self._param_version, "publish_at": self._publish_at}
        values |= {"turn": self._turn, "requested": self._requested}
        owned = {"counters": self.counters.state_dict(), "importance": self.importance.state_dict()}
        owned |= {"run_log": self.run_log.state_dict(), "answers": self.run_log.last_reports()}
        return {**values, **owned, "transport": self.port.state_dict() if self._is_exact else {}}

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict`` but for the run log and the messages in flight: see ``_resume``."""
        require(state, STATE)
        self.counters.load_state_dict(state["counters"])
        self.importance.load_state_dict(state["importance"])
        self._param_version = state["param_version"]

    def _resume(self, reader: Reader) -> None:
        with reader.reading(f"{LEARNER}.pt"):
            self.train.load_state_dict(reader.tensors(LEARNER))
            if self.train.learner_steps != reader.learner_steps:
                raise ValueError(f"its state is that of learner step {self.train.learner_steps}")
        with reader.reading(f"{LEARNER}.json"):
            state = reader.state(LEARNER)
            self.load_state_dict(state)
            reports = self._reports(reader) | {LEARNER: [self.counters.vector()]}
            self.run_log.load_state_dict(state["run_log"], reports)
            if reader.exact:
                self._turn, self._requested = state["turn"], state["requested"]
                self._publish_at = state["publish_at"]
                self.port.load_state_dict(state["transport"])

    def _reports(self, reader: Reader) -> dict[str, list[np.ndarray]]:
        """Return the reports in a checkpoint: role -> vectors by index."""
        topology = self.run_log.topology
        ranks = {REPLAY: topology.replay_ranks, EVALUATOR: 1, ACTOR: topology.num_actors}
        return {role: [reader.counters(role, i, n).vector() for i in range(n)] for role, n in ranks.items()}

    def _poll_reports(self) -> bool:
        """Pass reports on; return whether there were any."""
        reports = self.port.poll_reports()
        for report in reports:
            try:
                self.run_log.on_report(report)
            except ValueError as error:
                self.port.refuse("control", str(error))
                continue
            if self.supervisor is not None:
                self.supervisor.on_report(report.role, report.index)
        return bool(reports)
