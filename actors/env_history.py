"""All actions since the environments were made, from which new environments reach the same state.

Environments do not expose their state. Environments with the same seed reach it again if they repeat every
action. Only runs in one process do this; over MPI and ZeroMQ, environments start new episodes.
"""

from __future__ import annotations

import numpy as np

from apex.envs import GuardedEnvs


class EnvHistory:
    """The actions of every step of ``num_envs`` environments since they were reset."""

    def __init__(self, num_envs: int):
        self._num_envs = num_envs
        self._steps: list[np.ndarray] = []

    def add(self, action: np.ndarray) -> None:
        """Record the actions of one vector step, int64[V]."""
        self._steps.append(action.astype(np.int32))

    def state_dict(self) -> dict:
        """Return ``actions`` int32[steps, V]."""
        return {"actions": np.array(self._steps, np.int32).reshape(-1, self._num_envs)}

    def load_state_dict(self, state: dict, envs: GuardedEnvs) -> None:
        """Reset ``envs`` and repeat these actions. Raises RuntimeError if an environment fails meanwhile."""
        restarts = envs.restarts
        envs.reset()
        for action in state["actions"]:
            envs.step(action)
            self.add(action)
        if envs.restarts > restarts:
            why = "the environments failed while they repeated their actions"
            raise RuntimeError(f"{why}; resume over mpi or zmq, with new episodes")
