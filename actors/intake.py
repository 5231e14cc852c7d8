"""From vector steps to intake batches, written in place and vectorised over environments.

Each environment fills its own intake batch, so that consecutive transitions share frames. Every frame is
stored once, and transitions point at it by row. One call computes the initial priorities of a full batch,
which then waits to be sent. Frames that open n-step windows still need are copied into the next batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from actors.n_step import NStep
from apex.config import Config
from apex.envs import Timestep
from apex.schema import EnvSpec, aligned_bytes, intake_layout, intake_nbytes
from apex.state import fill, is_count, list_of, require

ZERO_FRAME = -1
Memory = Callable[[int, int], np.ndarray]


def max_closed(config: Config) -> int:
    """Return how many batches one vector step can close: full ones, and one without free frame rows."""
    return config.actor.envs * (config.algorithm.n_step // config.actor.intake_batch + 2)


def pool_rows(config: Config) -> int:
    """Return the intake batches of an actor: filling, closed by one step, and on the wire."""
    return config.actor.envs + max_closed(config) + config.actor.in_flight * config.replay.ranks


class Intake:
    """Builds intake batches for ``actor.envs`` environments of one actor.

    ``priority(q_taken, reward, discount, bootstrap)`` is the algorithm's initial priority. ``ready`` holds
    the pool rows of complete batches; the caller sends ``message(row)`` and returns the received row by
    ``recycle(row)``. ``add`` requires ``has_room()``. ``memory(rows, nbytes)`` allocates the batches, as
    zeroed uint8[rows, nbytes].
    """

    def __init__(
        self, config: Config, spec: EnvSpec, actor: int, priority: Callable[..., np.ndarray],
        memory: Memory = aligned_bytes,
    ):  # fmt: skip
        v, n, b = config.actor.envs, config.algorithm.n_step, config.actor.intake_batch
        self.spec, self.actor, self.priority, self.batch = spec, actor, priority, b
        self.layout = intake_layout(spec, b, n)
        self._frame_rows = self.layout.fields["frames"].shape[0]
        self._max_closed = max_closed(config)
        self._make_pool(pool_rows(config), memory)
        self._n_step = NStep(v, n, config.algorithm.discount)
        self._envs = np.arange(v)
        self._make_windows(v, n)
        self._sequence = 0

    def _make_pool(self, rows: int, memory: Memory) -> None:
        self._pool = memory(rows, self.layout.nbytes)
        self._views = self.layout.views(self._pool)
        self._q_taken = np.zeros((rows, self.batch), np.float32)
        self._bootstrap = np.zeros((rows, self.batch), np.float32)
        self._free = list(range(rows))
        self.ready: deque[int] = deque()

    def _make_windows(self, v: int, n: int) -> None:
        """Allocate, per environment: its batch, its observation, and the starts not yet written, by age."""
        self._row = np.array([self._free.pop() for _ in range(v)])
        self._count, self._frames, self._pending = (np.zeros(v, np.int64) for _ in range(3))
        # The first batch of environment i closes early, so that batches do not all fill at once.
        self._limit = np.maximum(1, self.batch * (self._envs + 1) // v)
        self._obs = np.full((v, self.spec.stack), ZERO_FRAME, np.int16)
        self._start_obs = np.full((v, n, self.spec.stack), ZERO_FRAME, np.int16)
        self._start_action = np.zeros((v, n), np.int32)
        self._start_q = np.zeros((v, n), np.float32)
        self._start_version = np.zeros((v, n), np.int64)

    def begin(self, obs: np.ndarray) -> None:
        """Start every environment's first episode at ``obs`` [V, stack, *frame_shape]."""
        self._begin(self._envs, obs)

    def has_room(self) -> bool:
        """Whether the pool has rows for all batches that one more step can close."""
        return len(self._free) >= self._max_closed

    def add(
        self, step: Timestep, action: np.ndarray, q_taken: np.ndarray, version: int, bootstrap: np.ndarray
    ) -> None:
        """Add one vector step: actions, their Q-values, and max_a Q(``step.last_obs``), each [V]."""
        valid = np.flatnonzero(step.valid)
        self._pending[~step.valid] = 0  # their windows were cut
        self._close_where(valid[self._frames[valid] >= self._frame_rows])
        self._push_start(valid, action, q_taken, version)
        self._append_frame(valid, step.last_obs)
        env, age, ret, discount = self._n_step.step(step.reward, step.terminated, step.truncated, step.valid)
        for a in range(self._start_action.shape[1] - 1, -1, -1):  # oldest first
            at = age == a
            if at.any():
                self._write(env[at], a, ret[at], discount[at], bootstrap)
        self._begin(np.flatnonzero(step.first), step.obs)

    def message(self, row: int) -> np.ndarray:
        """Return the used part of a complete batch, uint8[nbytes], a view."""
        frames = int(self._views["header"][row, 1])
        return self._pool[row, : intake_nbytes(self.layout, self.spec, frames)]

    def transitions(self, row: int) -> int:
        """Return the number of transitions in a complete batch."""
        return int(self._views["header"][row, 0])

    def recycle(self, row: int) -> None:
        """Return a row to the pool, once the replay rank has received it."""
        self._free.append(row)

    def state_dict(self) -> dict:
        """Return all batches (filling, complete and on the wire) and the open windows."""
        arrays = {name: array.copy() for name, array in self._arrays().items()}
        values = {"free": list(self._free), "ready": list(self.ready), "sequence": self._sequence}
        return arrays | values | {"n_step": self._n_step.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict``. Raises ValueError or KeyError for that of another configuration."""
        is_row = list_of(lambda row: is_count(row) and row < len(self._pool))
        require(state, {"free": is_row, "ready": is_row, "sequence": is_count})
        for name, array in self._arrays().items():
            fill(array, state, name)
        self._free, self.ready, self._sequence = list(state["free"]), deque(state["ready"]), state["sequence"]
        self._n_step.load_state_dict(state["n_step"])

    def _arrays(self) -> dict[str, np.ndarray]:
        return {
            "pool": self._pool, "q_taken": self._q_taken, "bootstrap": self._bootstrap,
            "row": self._row, "count": self._count, "frames": self._frames, "pending": self._pending,
            "limit": self._limit, "obs": self._obs, "start_obs": self._start_obs,
            "start_action": self._start_action, "start_q": self._start_q,
            "start_version": self._start_version,
        }  # fmt: skip

    def _push_start(self, valid: np.ndarray, action: np.ndarray, q_taken: np.ndarray, version: int) -> None:
        versions = np.full(len(action), version)
        starts: list[np.ndarray] = [self._start_obs, self._start_action, self._start_q, self._start_version]
        newest: list[np.ndarray] = [self._obs, action, q_taken, versions]
        for start, new in zip(starts, newest):
            start[:, 1:] = start[:, :-1]
            start[:, 0] = new
        self._pending[valid] += 1

    def _append_frame(self, env: np.ndarray, obs: np.ndarray) -> None:
        """Store the newest frame of ``obs`` and point the environments' current observation at it."""
        at = self._frames[env]
        self._views["frames"][self._row[env], at] = obs[env, -1]
        self._frames[env] += 1
        self._obs[env, :-1] = self._obs[env, 1:]
        self._obs[env, -1] = at

    def _write(
        self, env: np.ndarray, age: int, ret: np.ndarray, discount: np.ndarray, bootstrap: np.ndarray
    ) -> None:
        """Write each environment's transition from ``age`` steps ago to its current observation."""
        row, i, views = self._row[env], self._count[env], self._views
        views["obs_frames"][row, i] = self._start_obs[env, age]
        views["next_obs_frames"][row, i] = self._obs[env]
        views["action"][row, i] = self._start_action[env, age]
        views["reward"][row, i] = ret
        views["discount"][row, i] = discount
        views["param_version"][row, i] = self._start_version[env, age]
        self._q_taken[row, i] = self._start_q[env, age]
        self._bootstrap[row, i] = bootstrap[env]
        self._count[env] += 1
        self._pending[env] -= 1
        self._close_where(env[self._count[env] >= self._limit[env]])

    def _begin(self, envs: np.ndarray, obs: np.ndarray) -> None:
        """Store the first observation of an episode; equal neighbours share a row, zero frames need none."""
        self._obs[envs] = ZERO_FRAME  # release the frames of the previous episode
        self._close_where(envs[self._frames[envs] + self.spec.stack > self._frame_rows])
        zeros = bytes(self.spec.frame_nbytes)
        for env in envs:
            last, before = ZERO_FRAME, zeros
            for s, frame in enumerate(obs[env]):
                now = frame.tobytes()  # compared as bytes: -0.0 is no zero
                if now == zeros:
                    last = ZERO_FRAME
                elif now != before:
                    last = self._store_frame(env, frame)
                self._obs[env, s], before = last, now

    def _store_frame(self, env: int, frame: np.ndarray) -> int:
        at = int(self._frames[env])
        self._views["frames"][self._row[env], at] = frame
        self._frames[env] += 1
        return at

    def _close_where(self, envs: np.ndarray) -> None:
        for env in envs:
            self._close(env)

    def _close(self, env: int) -> None:
        """Complete the environment's batch and copy its open windows into a new one."""
        old, new, count = int(self._row[env]), self._free.pop(), int(self._count[env])
        self._finish_batch(old, count, int(self._frames[env]))
        pending = self._start_obs[env, : self._pending[env]]
        needed = np.append(pending, self._obs[env])
        needed = needed[needed != ZERO_FRAME]
        first = int(needed.min()) if needed.size else int(self._frames[env])
        carried = int(self._frames[env]) - first
        frames = self._views["frames"]
        frames[new, :carried] = frames[old, first : first + carried]
        for pointers in (pending, self._obs[env]):  # views: renumbered in place
            pointers[pointers != ZERO_FRAME] -= first
        self._row[env], self._count[env], self._frames[env], self._limit[env] = new, 0, carried, self.batch

    def _finish_batch(self, row: int, count: int, frames: int) -> None:
        views = self._views
        views["header"][row] = (count, frames, self.actor, self._sequence)
        self._sequence += 1
        used = (self._q_taken[row], views["reward"][row], views["discount"][row], self._bootstrap[row])
        views["priority"][row, :count] = self.priority(*(column[:count] for column in used))
        self.ready.append(row)
