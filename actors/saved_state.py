"""All that an actor is, for a run in one process that goes on to the last bit.

Environments cannot be asked for their state, but they can be brought back to it: seeded as before, they take
every action again that they have taken. Over MPI and ZeroMQ an actor keeps only its random state and its
counters (``apex.rank_state``), and its environments begin new episodes.
"""

from __future__ import annotations

from collections import deque

import numpy as np

_INTAKE = (
    "_pool", "_q_taken", "_bootstrap", "_row", "_count", "_frames", "_pending", "_limit", "_obs", "_start_obs", "_start_action",
    "_start_q", "_start_version",
)  # fmt: skip


class History:
    """The actions of every step of a vector of environments since it was reset."""

    def __init__(self, num_envs: int):
        self._steps: list[np.ndarray] = []
        self._num_envs = num_envs

    def add(self, action: np.ndarray) -> None:
        """Note one vector step, int64[V]."""
        self._steps.append(action.astype(np.int32))

    def array(self) -> np.ndarray:
        """Return int32[steps, V]."""
        return np.array(self._steps, np.int32).reshape(-1, self._num_envs)

    def repeat(self, envs, actions: np.ndarray) -> None:
        """Bring ``envs`` to where they were after ``actions``, and go on from there."""
        restarts = envs.restarts
        envs.reset()
        for action in actions:
            envs.step(action)
            self.add(action)
        if envs.restarts > restarts:
            raise RuntimeError("the environments failed while they repeated what they had done; resume over mpi or zmq, with new episodes")


def save(actor) -> tuple[dict, dict]:
    """Return arrays and plain values of an actor, all copied."""
    intake, n_step, policy = actor.intake, actor.intake._n_step, actor.policy
    arrays = {name: getattr(intake, name) for name in _INTAKE}
    arrays |= {"returns": n_step._returns, "length": n_step._length, "return": actor._return, "weights": policy._message}
    arrays |= {"history": actor.history.array(), "q": np.zeros(0) if actor._q is None else actor._q}
    values = {"free": intake._free, "ready": list(intake.ready), "sequence": intake._sequence}
    values |= {"steps": actor._steps, "q_version": actor._q_version, "env_seed": actor.env_seed}
    values |= {"param_version": policy.param_version, "learner_steps": policy.learner_steps, "asked": policy.asked}
    return {name: np.array(array) for name, array in arrays.items()}, values


def restore(actor, arrays: dict, values: dict) -> None:
    """Bring a new actor, whose environments were made with the seed of ``values``, to what ``save`` returned."""
    intake, n_step = actor.intake, actor.intake._n_step
    for name in _INTAKE:
        getattr(intake, name)[:] = arrays[name]
    n_step._returns[:], n_step._length = arrays["returns"], arrays["length"]
    intake._free, intake.ready, intake._sequence = values["free"], deque(values["ready"]), values["sequence"]
    actor._return[:], actor._steps, actor._q_version = arrays["return"], values["steps"], values["q_version"]
    actor.policy.restore(arrays["weights"], values["param_version"], values["learner_steps"], values["asked"])
    if arrays["q"].size:
        actor._q = arrays["q"]
        actor.history.repeat(actor.envs, arrays["history"])
