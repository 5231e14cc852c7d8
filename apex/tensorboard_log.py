"""TensorBoard: the rows of the log as scalars, grouped by role, over learner steps."""

from __future__ import annotations

_GROUPS = {
    "run": ("wall_s", "env_restarts"),
    "actor": (
        "agent_steps", "agent_steps_per_s", "env_frames", "episodes", "transitions", "transitions_per_s",
        "actor_wait_pct", "train_return", "actors_lost", "actors_replaced",
    ),
    "replay": ("replay_size", "replay_fill", "samples_per_insert", "stale_updates"),
    "learner": (
        "learner_steps", "learner_steps_per_s", "learner_wait_pct", "loss", "td_error", "q_value", "grad_norm",
        "staleness", "param_version", "skipped_steps",
    ),
    "evaluator": ("eval_return", "eval_episodes", "evaluations", "eval_version"),
}  # fmt: skip
_SHORT = {"replay_size": "size", "replay_fill": "fill", "actor_wait_pct": "wait_pct", "learner_wait_pct": "wait_pct"}

TAGS = {key: f"{group}/{_SHORT.get(key, key)}" for group, keys in _GROUPS.items() for key in keys}
"""Row key -> TensorBoard tag."""


class Scalars:
    """Writes rows to event files in a folder; :meth:`close` flushes the last of them."""

    def __init__(self, path):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only the log needs it

        self._writer = SummaryWriter(str(path), flush_secs=10)
        self._evaluations = 0

    def write(self, row: dict) -> None:
        """Write every number in a row at global_step = learner_steps.

        What the evaluator reports is written only when ``evaluations`` has changed: a point on
        that curve is an evaluation, not a row of the log.
        """
        evaluations = row.get("evaluations") or 0
        evaluated, self._evaluations = evaluations != self._evaluations, evaluations
        for key, value in row.items():
            if _is_number(value) and (evaluated or key not in _GROUPS["evaluator"]):
                self._writer.add_scalar(TAGS.get(key, f"run/{key}"), value, row.get("learner_steps") or 0)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
