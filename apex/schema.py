"""From an environment's shape to the byte layout of every message.

One home for what travels: each message is one contiguous buffer whose fields (dtype, shape, offset)
are fixed by a :class:`Layout`. Nothing on the intake, sample, priority or weight path is pickled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import DTypeLike

from apex.config import Config

ALIGNMENT = 64  # bytes; every field starts on a cache line


@dataclass(frozen=True)
class EnvSpec:
    """What an environment looks like to the rest of the system.

    An observation is a stack of ``stack`` frames, oldest first: shape ``(stack, *frame_shape)``.
    Environments without frame stacking have ``stack == 1``, so every environment shares frames the
    same way. ``env_frames_per_step`` is 1 except for emulators with frame skip.
    """

    frame_shape: tuple[int, ...]
    frame_dtype: str
    stack: int
    num_actions: int
    env_frames_per_step: int = 1

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation: ``(stack, *frame_shape)``."""
        return (self.stack, *self.frame_shape)

    @cached_property
    def frame_nbytes(self) -> int:
        """Bytes of one frame."""
        return math.prod(self.frame_shape) * np.dtype(self.frame_dtype).itemsize


@dataclass(frozen=True)
class Field:
    """One array inside a message: name, dtype, shape, and byte offset from the message's start."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """The fields of one message kind, in order, each aligned to 64 bytes.

    ``views(buffer)`` maps names to arrays over ``buffer`` without copying: a 1-d uint8 array of
    ``nbytes`` gives each field its own shape; a 2-d array ``[k, nbytes]`` gives ``(k, *shape)``.
    """

    def __init__(self, *fields: tuple[str, DTypeLike, tuple[int, ...]]):
        self.fields: dict[str, Field] = {}
        offset = 0
        for name, dtype, shape in fields:
            field = Field(name, np.dtype(dtype), tuple(shape), offset)
            self.fields[name] = field
            offset = align(offset + field.nbytes)
        self.nbytes = offset

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Return name -> array over ``buffer`` (uint8, C-contiguous, last axis ``nbytes``)."""
        if buffer.dtype != np.uint8 or buffer.shape[-1] != self.nbytes or not buffer.flags.c_contiguous:
            raise ValueError(
                f"message buffer must be contiguous uint8 [..., {self.nbytes}], "
                f"got {buffer.dtype}{buffer.shape}"
            )
        return {name: self._view(buffer, field) for name, field in self.fields.items()}

    def _view(self, buffer: np.ndarray, field: Field) -> np.ndarray:
        lead = buffer.shape[:-1]
        strides = buffer.strides[:-1] + _c_strides(field.shape, field.dtype.itemsize)
        return np.ndarray(lead + field.shape, field.dtype, buffer, field.offset, strides)


def aligned_bytes(*shape: int) -> np.ndarray:
    """Return a zeroed uint8 array of ``shape`` whose first byte lies on a cache line."""
    nbytes = math.prod(shape)
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + nbytes].reshape(shape)


def align(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))


def frame_rows(spec: EnvSpec, intake_batch: int, n_step: int) -> int:
    """Return the frames an intake batch has room for.

    ``intake_batch`` consecutive steps touch ``intake_batch + n_step + stack - 1`` frames; each
    episode end inside the batch adds a few. A batch that runs out of room is sent short. The least
    that always fits one step is a carried window, a reset stack and the new frame.
    """
    steady = intake_batch + n_step + spec.stack - 1
    return max(steady + intake_batch // 10, n_step + 3 * spec.stack + 2)


def intake_layout(spec: EnvSpec, intake_batch: int, n_step: int) -> Layout:
    """Return the layout of an :data:`IntakeBatch`: up to ``intake_batch`` transitions of one environment.

    ``header`` int64[4] = count, frames used, actor index, and the actor's number of the batch. ``obs_frames``
    and ``next_obs_frames`` int16[b, stack] are rows of ``frames``, or -1 for an all-zero frame, for s_tm1 and
    s_t. Frames come last, so that only the used ones travel.
    """
    b, rows = intake_batch, frame_rows(spec, intake_batch, n_step)
    if rows > np.iinfo(np.int16).max:
        raise ValueError(
            f"an intake batch of {b} needs {rows} frame rows; the most is {np.iinfo(np.int16).max}"
        )
    return Layout(
        ("header", np.int64, (4,)),
        ("obs_frames", np.int16, (b, spec.stack)),
        ("next_obs_frames", np.int16, (b, spec.stack)),
        ("action", np.int32, (b,)),
        ("reward", np.float32, (b,)),
        ("discount", np.float32, (b,)),
        ("priority", np.float32, (b,)),
        ("param_version", np.int64, (b,)),
        ("frames", spec.frame_dtype, (rows, *spec.frame_shape)),
    )


def intake_nbytes(layout: Layout, spec: EnvSpec, frames_used: int) -> int:
    """Return how many leading bytes of an intake batch carry ``frames_used`` frames."""
    return layout.fields["frames"].offset + frames_used * spec.frame_nbytes


def sample_layout(spec: EnvSpec, batch_size: int) -> Layout:
    """Return the layout of a SampleBatch of ``batch_size`` transitions, full observation stacks gathered.

    ``size`` int64[1] and ``total``, ``minimum`` float64[1] describe the replay rank when the batch
    was drawn: stored transitions, total mass, smallest mass. ``key`` int64 and ``probability``
    float64 identify and weigh each row.
    """
    b = batch_size
    return Layout(
        ("size", np.int64, (1,)),
        ("total", np.float64, (1,)),
        ("minimum", np.float64, (1,)),
        ("key", np.int64, (b,)),
        ("probability", np.float64, (b,)),
        ("param_version", np.int64, (b,)),
        ("action", np.int32, (b,)),
        ("reward", np.float32, (b,)),
        ("discount", np.float32, (b,)),
        ("obs", spec.frame_dtype, (b, *spec.observation_shape)),
        ("next_obs", spec.frame_dtype, (b, *spec.observation_shape)),
    )


def priority_layout(batch_size: int) -> Layout:
    """Return the layout of a priority message: ``key`` int64[b], raw ``priority`` float32[b] = |TD error|."""
    return Layout(("key", np.int64, (batch_size,)), ("priority", np.float32, (batch_size,)))


def weight_layout(num_parameters: int) -> Layout:
    """Return the layout of a publish: ``header`` int64[param_version, learner steps], ``vector`` float32."""
    return Layout(("header", np.int64, (2,)), ("vector", np.float32, (num_parameters,)))


def weight_header(message: np.ndarray) -> tuple[int, int]:
    """Return ``(param_version, learner_steps)`` of a weight message."""
    version, learner_steps = message[:16].view(np.int64)
    return int(version), int(learner_steps)


@dataclass(frozen=True)
class Limits:
    """What bounds a transport: message sizes in bytes and how many messages may be in flight."""

    sample_nbytes: int
    priority_nbytes: int
    prefetch: int
    intake_in_flight: int
    intake_nbytes: int | None = None  # None: not bounded


def limits(config: Config, spec: EnvSpec) -> Limits:
    """Return the limits of a configured run."""
    return Limits(
        sample_layout(spec, config.learner.batch_size).nbytes,
        priority_layout(config.learner.batch_size).nbytes,
        config.learner.prefetch,
        config.actor.in_flight,
        intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step).nbytes,
    )
