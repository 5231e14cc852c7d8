"""A ring of intake batches that share frames: where transitions live.

The ring is one array of intake-batch messages. A batch is received straight into its place and never
copied or unpacked; a sample batch is gathered from it, frame by frame, into the send buffer.
"""

from __future__ import annotations

import numpy as np

import native
from apex.schema import EnvSpec, Layout, aligned_bytes, intake_nbytes

_COLUMNS = ("action", "reward", "discount", "param_version")


class FrameStore:
    """``num_batches`` intake batches of up to ``batch`` transitions; slot = place in the ring * batch + row.

    ``views[name]`` has shape ``(num_batches, *field shape)``. Memory is taken as batches arrive.
    """

    def __init__(self, spec: EnvSpec, layout: Layout, num_batches: int):
        self.spec, self.layout = spec, layout
        self.batch = layout.fields["action"].shape[0]
        self.buffer = aligned_bytes(num_batches, layout.nbytes)
        self.views = layout.views(self.buffer)

    def check_batch(self, place: int, nbytes: int) -> int:
        """Return the transitions of the batch that landed at ``place``; ValueError says what is wrong with it."""
        count, frames, actor, _ = (int(x) for x in self.views["header"][place])
        wrong = self._what_is_wrong(place, nbytes, count, frames)
        if wrong is not None:
            raise ValueError(f"intake batch of actor {actor}: {wrong}")
        return count

    def _what_is_wrong(self, place: int, nbytes: int, count: int, frames: int) -> str | None:
        rows = self.layout.fields["frames"].shape[0]
        if not 1 <= count <= self.batch or not 0 <= frames <= rows:
            return f"{count} transitions and {frames} frames; the most are {self.batch} and {rows}"
        expected = intake_nbytes(self.layout, self.spec, frames)
        if nbytes != expected:
            return f"{nbytes} bytes for {frames} frames, expected {expected}"
        for name in ("obs_frames", "next_obs_frames"):
            used = self.views[name][place, :count]
            if used.min() < -1 or used.max() >= frames:
                return f"{name} points outside its {frames} frames"
        return None

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
        offset = np.where(frame >= 0, start[:, None] + frame * self.spec.frame_nbytes, -1)
        native.gather_rows(self.buffer, offset.reshape(-1), self.spec.frame_nbytes, out)
