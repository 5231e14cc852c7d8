"""The ring of intake batches, which holds all transitions of a replay rank.

The ring is one array of intake messages. The port receives a batch into its place; nothing copies or unpacks
it there. A sample batch is gathered from the ring into the send buffer, frame by frame.
"""

from __future__ import annotations

import numpy as np

import native
from apex.schema import EnvSpec, Layout, aligned_bytes, intake_nbytes

_LARGEST = float(np.finfo(np.float32).max)
_COLUMNS = ("action", "reward", "discount", "param_version")


class FrameStore:
    """``num_batches`` intake batches of up to ``batch`` transitions; slot = place in the ring * batch + row.

    ``views[name]`` has shape ``(num_batches, *field shape)``. The kernel allocates memory as batches arrive.
    """

    def __init__(self, spec: EnvSpec, layout: Layout, num_batches: int):
        self.spec, self.layout = spec, layout
        self.batch = layout.fields["action"].shape[0]
        self.buffer = aligned_bytes(num_batches, layout.nbytes)
        self.views = layout.views(self.buffer)
        self._float_frames = layout.fields["frames"].dtype == np.float32
        self._pointers = self.views["obs_frames"], self.views["next_obs_frames"]
        self._max_frames, self._frame_nbytes = layout.fields["frames"].shape[0], spec.frame_nbytes

    def check_batch(self, place: int, nbytes: int) -> int:
        """Return the number of transitions of the batch at ``place``; ValueError if it is corrupt."""
        count, frames, actor, _ = self.views["header"][place].tolist()
        if not 1 <= count <= self.batch or not 0 <= frames <= self._max_frames:
            wrong = (
                f"{count} transitions and {frames} frames; the most are {self.batch} and {self._max_frames}"
            )
        elif nbytes != (expected := intake_nbytes(self.layout, self.spec, frames)):
            wrong = f"{nbytes} bytes for {frames} frames, expected {expected}"
        elif not all(native.within(pointers[place, :count], -1, frames - 1) for pointers in self._pointers):
            wrong = f"obs_frames or next_obs_frames points outside its {frames} frames"
        elif not native.within(self.views["action"][place, :count], 0, self.spec.num_actions - 1):
            wrong = f"an action is none of {self.spec.num_actions}"
        elif (name := self._not_finite(place, count, frames)) is not None:
            wrong = f"{name} holds a number that is not finite"
        else:
            return count
        raise ValueError(f"intake batch of actor {actor}: {wrong}")

    def _not_finite(self, place: int, count: int, frames: int) -> str | None:
        """Return the name of a column, or ``frames``, that holds a NaN or an infinity; not ``priority``."""
        columns = {name: self.views[name][place, :count] for name in ("reward", "discount")}
        if self._float_frames:
            columns["frames"] = self.views["frames"][place, :frames]
        bad = (name for name, column in columns.items() if not native.within(column, -_LARGEST, _LARGEST))
        return next(bad, None)

    def actor(self, place: int) -> int:
        """Return the index of the actor that sent the batch at ``place``."""
        return int(self.views["header"][place, 2])

    def gather(self, slots: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Copy the transitions of ``slots`` int64[B] into the views of a sample message."""
        place, row = np.divmod(slots, self.batch)
        for name in _COLUMNS:
            out[name][:] = self.views[name][place, row]
        self._gather_observations("obs_frames", place, row, out["obs"])
        self._gather_observations("next_obs_frames", place, row, out["next_obs"])

    def _gather_observations(self, name: str, place: np.ndarray, row: np.ndarray, out: np.ndarray) -> None:
        frame = self.views[name][place, row].astype(np.int64)  # [B, stack]
        start = place * self.layout.nbytes + self.layout.fields["frames"].offset
        offset = np.where(frame >= 0, start[:, None] + frame * self._frame_nbytes, -1)
        native.gather_rows(self.buffer, offset.reshape(-1), self._frame_nbytes, out)
