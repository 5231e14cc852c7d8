"""``best.pt``: the weights of the best evaluation of a run, which ``apex eval`` and ``apex play`` read."""

from __future__ import annotations

import math
from pathlib import Path

from apex import checkpoint
from apex.config import ConfigError
from apex.look import Unreadable
from apex.policy import Policy
from apex.say import warn


class BestWeights:
    """Keeps the weights of the best evaluation in ``best.pt`` of the folder ``checkpoints``.

    ``eval_return`` is their mean return, -inf before the first evaluation. An existing file stays until an
    evaluation is better. Raises :class:`apex.look.Unreadable` if that file cannot be read, since it may hold
    better weights.
    """

    def __init__(self, checkpoints: Path):
        self.path = checkpoints / "best.pt"
        self.eval_return = self._on_disk()
        self._warned = False

    def offer(self, policy: Policy, eval_return: float) -> None:
        """Write the current weights of ``policy`` if their mean return is the best so far.

        If the disk rejects them, the old file stays, and one warning appears. The next better evaluation
        tries again.
        """
        if not eval_return > self.eval_return or math.isinf(eval_return):
            return
        state = {"online": policy.network.state_dict(), "learner_steps": policy.learner_steps}
        try:
            checkpoint.save(self.path, {**state, "eval_return": eval_return})
            self.eval_return = eval_return
        except OSError as error:
            self._warn(error)

    def load_state_dict(self, eval_return: float) -> None:
        """Restore the return of a checkpoint; the file on the disk counts if its return is larger."""
        self.eval_return = max(self.eval_return, eval_return)

    def _on_disk(self) -> float:
        try:
            return float(checkpoint.load(self.path)["eval_return"])
        except Unreadable:
            raise
        except (ConfigError, KeyError, TypeError, ValueError, OverflowError, RuntimeError):
            return -math.inf

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warn(f"apex: warning: without {self.path.name}: {error.strerror}; the run goes on")
