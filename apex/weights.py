"""state_dict <-> one flat float32 vector with a checked table.

A publish is one vector. Both ends build the same network from the same configuration, so the table
(name, shape of every tensor, in order) need not travel; it is checked by length, and by content when
a checkpoint is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

Table = tuple[tuple[str, tuple[int, ...]], ...]


def table(module: torch.nn.Module) -> Table:
    """Return ``((name, shape), ...)`` of every tensor in the module's state, in order."""
    return tuple((name, tuple(t.shape)) for name, t in module.state_dict().items())


def size(module: torch.nn.Module) -> int:
    """Return the length of the module's flat vector."""
    return sum(math.prod(shape) for _, shape in table(module))


def flatten(module: torch.nn.Module, out: np.ndarray) -> None:
    """Copy the module's state into ``out`` float32[size]; raises ValueError where the length differs."""
    _check_length(out, size(module))
    start = 0
    for tensor in module.state_dict().values():
        stop = start + tensor.numel()
        out[start:stop] = tensor.detach().to("cpu", torch.float32).reshape(-1).numpy()
        start = stop


def unflatten(module: torch.nn.Module, vector: np.ndarray) -> None:
    """Copy ``vector`` float32[size] into the module's state; raises ValueError where the length differs."""
    _check_length(vector, size(module))
    start = 0
    with torch.no_grad():
        for tensor in module.state_dict().values():
            stop = start + tensor.numel()
            tensor.copy_(torch.from_numpy(vector[start:stop]).reshape(tensor.shape))
            start = stop


def load_state(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load a state_dict; raises ValueError naming the first tensor that does not fit the network."""
    for name, shape in table(module):
        if name not in state:
            raise ValueError(
                f"weights have no tensor '{name}' of shape {shape}; they belong to another network"
            )
        if tuple(state[name].shape) != shape:
            raise ValueError(
                f"tensor '{name}' has shape {tuple(state[name].shape)}, this network needs {shape}"
            )
    extra = next((name for name in state if name not in dict(table(module))), None)
    if extra is not None:
        raise ValueError(f"this network has no tensor '{extra}'; the weights belong to another network")
    module.load_state_dict(state)


def _check_length(vector: np.ndarray, expected: int) -> None:
    if vector.dtype != np.float32 or vector.shape != (expected,):
        raise ValueError(f"weight vector must be float32[{expected}], got {vector.dtype}{list(vector.shape)}")
