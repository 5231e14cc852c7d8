"""The learner: trains on prefetched batches, returns priorities, publishes weights, ends the run."""

from __future__ import annotations

import itertools

import numpy as np

from apex import weights
from apex.config import Config
from apex.ports import LearnerPort
from apex.role import Role
from apex.schema import EnvSpec, aligned_bytes, priority_layout, sample_layout, weight_layout
from apex.topology import LEARNER, Topology
from learner.importance import ImportanceWeights
from learner.record import Record
from learner.train_step import NotFinite, StepResult, TrainStep


class Learner(Role):
    """Algorithm 2 of Horgan et al. 2018, with ``learner.prefetch`` sample batches always asked for in advance."""

    port: LearnerPort

    def __init__(self, config: Config, spec: EnvSpec, port: LearnerPort, topology: Topology, record: Record):
        super().__init__(LEARNER, port, config.run.log_period_s)
        self.config, self.record = config, record
        self.train = TrainStep(config, spec)
        self.importance = ImportanceWeights(config.learner.beta, config.learner.is_normalizer, topology.replay_ranks)
        self._samples = sample_layout(spec, config.learner.batch_size)
        self._make_messages(config)
        self._replay_turns = itertools.cycle(range(topology.replay_ranks))
        self._requested = 0
        self._param_version = 0
        self._publish()

    def work(self) -> bool:
        """Train on one batch if one has arrived."""
        self._listen()
        if self.port.stopping:
            return True
        self._fill_pipeline()
        arrived = self.port.poll_sample()
        if arrived is None:
            return False
        self._requested -= 1
        self._fill_pipeline()  # the replay ranks draw and gather the next batches while this one trains
        self._train(*arrived)
        return True

    def wind_down(self) -> bool:
        """Keep hearing reports; the last ones complete the counts of the result."""
        return self._hear_reports()

    def waiting_for(self) -> str:
        """Say what the learner waits for."""
        return f"sample batches: {self.port.waits_for()}"

    def close(self) -> None:
        """Write the last row of the log and the result."""
        self._hear_reports()
        self.record.close()

    def _fill_pipeline(self) -> None:
        while self._requested < self.config.learner.prefetch:
            self.port.request_sample(next(self._replay_turns))
            self._requested += 1

    def _make_messages(self, config: Config) -> None:
        priorities, publish = priority_layout(config.learner.batch_size), weight_layout(weights.size(self.train.online))
        self._priority_message, self._weight_message = aligned_bytes(priorities.nbytes), aligned_bytes(publish.nbytes)
        self._priority_views = priorities.views(self._priority_message)
        self._weight_views = publish.views(self._weight_message)

    def _train(self, replay: int, message: np.ndarray) -> None:
        views = self._samples.views(message)
        try:
            result = self.train(views, self.importance(replay, views))
        except NotFinite as error:
            self._skip(error, views)
            return
        self._priority_views["key"][:] = views["key"]
        self._priority_views["priority"][:] = result.priority
        self.port.send_priorities(replay, self._priority_message)
        self._note(result, views["param_version"])
        self._after_step(self.train.learner_steps)

    def _skip(self, error: NotFinite, views: dict[str, np.ndarray]) -> None:
        """Go on without the step, its priorities as they were; keep what it was made from. Too many end the run."""
        self.counters.add("skipped_steps")
        skipped = int(self.counters["skipped_steps"])
        self.record.keep_skipped(skipped, error, views, self.train.state())
        if skipped > self.config.learner.max_skipped_steps:
            raise error

    def _after_step(self, learner_steps: int) -> None:
        if learner_steps % self.config.learner.publish_period == 0:
            self._publish()
        if learner_steps % self.config.learner.checkpoint_period == 0:
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        self.train.check_finite()
        self.record.save_checkpoint(self.train.state())

    def _publish(self) -> None:
        self.train.check_finite()
        self._param_version += 1
        self._weight_views["header"][:] = self._param_version, self.train.learner_steps
        weights.flatten(self.train.online, self._weight_views["vector"])
        self.port.publish(self._weight_message)
        self.counters.set("param_version", self._param_version)

    def _note(self, result: StepResult, versions: np.ndarray) -> None:
        self.counters.set("learner_steps", self.train.learner_steps)
        self.counters.set("staleness", self._param_version - versions.mean())
        for name in ("loss", "td_error", "q_value", "grad_norm"):
            self.counters.set(name, getattr(result, name))

    def _listen(self) -> None:
        """Hear reports, write the log, and end the run when a limit is reached."""
        if self.record.row_is_due():
            self.report()  # so that the row's own counts are of this moment
            self._hear_reports()
            self.record.write_row()
        self._hear_reports()
        if self.record.reason_to_end(self.train.learner_steps, self.port.stop_requested) is not None:
            self.port.stop()
            self._save_checkpoint()  # now, since a rank that does not answer can keep the run from ending in order

    def _hear_reports(self) -> bool:
        reports = self.port.poll_reports()
        for report in reports:
            evaluated = self.record.hear(report)
            if evaluated is not None:
                self._keep_best(evaluated)
        return bool(reports)

    def _keep_best(self, param_version: int) -> None:
        """Save the weights of the best evaluation so far, as they were when evaluated."""
        message = self.port.sent_to_evaluator(param_version)
        if message is not None:
            self.record.save_best(self.train.online, message)
