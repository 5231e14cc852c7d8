"""Model checkpoints: written aside, flushed, renamed; a torn one is never loaded."""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch

from apex import look
from apex.config import ConfigError


def save(path: Path, state: dict) -> None:
    """Write ``state`` (tensors, numbers, text, dictionaries) so that ``path`` is old or new, never torn. Raises OSError."""
    path.parent.mkdir(exist_ok=True)  # without parents: a run folder that is removed stays removed
    aside = path.with_name(path.name + ".tmp")
    try:
        with open(aside, "wb") as file:
            file.write(as_bytes(state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def as_bytes(state: dict) -> memoryview:
    """Return what ``torch.save`` writes: made first, since it hides the errors of a disk behind others of its own."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


def load(path: Path) -> dict:
    """Read a checkpoint on the CPU; raises :class:`ConfigError` naming a missing or unreadable file."""
    text = look.read(path)
    if text is None:
        raise ConfigError(f"no checkpoint at {path}")
    try:
        state = torch.load(io.BytesIO(text), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {type(error).__name__}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"checkpoint {path} was not written by this program: it holds a {type(state).__name__}")
    return state
