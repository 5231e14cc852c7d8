"""What Ape-X programs usually send: pickled lists of stacked transitions. Only for comparison.

Each transition is a tuple with both of its observation stacks, so every frame travels up to eight times.
The pointers into the shared frames travel along, so that the receiver can put an intake batch where the
ring keeps it. Stacks of consecutive frames are pickled from views: nothing is copied but by pickle itself.
"""

from __future__ import annotations

import pickle

import numpy as np

from apex.config import Config
from apex.schema import EnvSpec, intake_layout, intake_nbytes, priority_layout, sample_layout

_OBS, _NEXT_OBS = 0, 1
_SCALARS = ("action", "reward", "discount")


def dumps(content) -> bytes:
    """Return ``content`` pickled by protocol 5, arrays in-band."""
    return pickle.dumps(content, protocol=5)


class Form:
    """From flat messages (see ``apex.schema``) to lists of transitions and back."""

    def __init__(self, config: Config, spec: EnvSpec):
        self.spec = spec
        self.intake = intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step)
        self.sample = sample_layout(spec, config.learner.batch_size)
        self.priority = priority_layout(config.learner.batch_size)

    def intake_out(self, message: np.ndarray) -> tuple:
        """Return ``(header, transitions)`` of an intake message that ends with its last used frame."""
        views = self._intake_views(message)
        header = views["header"].tolist()
        columns = [views[name][: header[0]].tolist() for name in (*_SCALARS, "priority", "param_version")]
        pointers = [views[name][: header[0]] for name in ("obs_frames", "next_obs_frames")]
        stacks = [self._stacks(views["frames"], p) for p in pointers]
        return header, list(zip(*stacks, *columns, *(p.tolist() for p in pointers)))

    def intake_in(self, content: tuple, landing: np.ndarray) -> int:
        """Write the batch into ``landing``, a whole intake message; return the bytes that are used."""
        header, transitions = content
        views, count = self.intake.views(landing), len(transitions)
        views["header"][:] = header
        columns = list(zip(*transitions))
        for name, column in zip((*_SCALARS, "priority", "param_version", "obs_frames", "next_obs_frames"), columns[2:]):
            views[name][:count] = column
        self._unstack(transitions, np.hstack([columns[-2], columns[-1]]), views["frames"])
        return intake_nbytes(self.intake, self.spec, header[1])

    def sample_out(self, buffer: np.ndarray) -> tuple:
        """Return ``((size, total, minimum), transitions)`` of a sample message."""
        views = self.sample.views(buffer)
        about = tuple(views[name][0].item() for name in ("size", "total", "minimum"))
        columns = (views[name].tolist() for name in (*_SCALARS, "param_version", "key", "probability"))
        return about, list(zip(views["obs"], views["next_obs"], *columns))

    def sample_in(self, content: tuple, buffer: np.ndarray) -> None:
        """Stack the transitions into the sample message ``buffer``."""
        about, transitions = content
        views = self.sample.views(buffer)
        for name, value in zip(("size", "total", "minimum"), about):
            views[name][0] = value
        obs, next_obs, *columns = zip(*transitions)
        np.stack(obs, out=views["obs"])
        np.stack(next_obs, out=views["next_obs"])
        for name, column in zip((*_SCALARS, "param_version", "key", "probability"), columns):
            views[name][:] = column

    def priorities_out(self, message: np.ndarray) -> tuple:
        """Return ``(keys, priorities)`` of a priority message, copied."""
        views = self.priority.views(message)
        return views["key"].copy(), views["priority"].copy()

    def priorities_in(self, content: tuple, buffer: np.ndarray) -> None:
        """Write keys and priorities into the priority message ``buffer``."""
        views = self.priority.views(buffer)
        views["key"][:], views["priority"][:] = content

    def _intake_views(self, message: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of a message without its unused frames."""
        fields = self.intake.fields
        views = {name: np.ndarray(f.shape, f.dtype, message, f.offset) for name, f in fields.items() if name != "frames"}
        frames = message[fields["frames"].offset :].view(fields["frames"].dtype)
        views["frames"] = frames.reshape(-1, *self.spec.frame_shape)
        return views

    def _stacks(self, frames: np.ndarray, pointers: np.ndarray) -> list[np.ndarray]:
        """Return the stack of each row of ``pointers``: a view where its frames lie one after another."""
        consecutive = (pointers[:, 0] >= 0) & (np.diff(pointers, axis=1) == 1).all(axis=1)
        stack, first = self.spec.stack, pointers[:, 0].tolist()
        return [
            frames[at : at + stack] if straight else _gathered(frames, row)
            for straight, at, row in zip(consecutive.tolist(), first, pointers)
        ]

    def _unstack(self, transitions: list[tuple], pointers: np.ndarray, frames: np.ndarray) -> None:
        """Write each frame once, from the first stack that holds it; ``pointers`` int[b, 2 * stack]."""
        rows, first = np.unique(pointers.reshape(-1), return_index=True)
        stack = self.spec.stack
        for row, at in zip(rows.tolist(), first.tolist()):
            if row >= 0:
                number, position = divmod(at, 2 * stack)
                which = _OBS if position < stack else _NEXT_OBS
                frames[row] = transitions[number][which][position % stack]


def _gathered(frames: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return the frames of ``row``, all zero where it says -1."""
    stack = frames[np.maximum(row, 0)]
    stack[row < 0] = 0
    return stack
