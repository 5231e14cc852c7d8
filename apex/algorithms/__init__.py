"""Algorithms, one file each and found by name: network, action values, initial priority, loss.

A module ``apex/algorithms/NAME.py`` offers

``make_network(config, spec) -> torch.nn.Module``
    uint8 or float observations ``[B, *spec.observation_shape]`` to Q-values ``[B, spec.num_actions]``.
``initial_priority(q_taken, reward, discount, bootstrap) -> float32[m]``
    the actor's |TD error| from Q-values that acting already produced.
``td_error(online, target, batch, config) -> (td_error [B], q_taken [B])``
    the learner's TD error, with gradients through the online network only.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from apex.config import ConfigError, nearest


def load(name: str) -> ModuleType:
    """Return the algorithm module called ``name``; raises :class:`ConfigError` naming the nearest one."""
    known = [m.name for m in pkgutil.iter_modules(__path__) if m.name != "networks"]
    if name not in known:
        raise ConfigError(f"algorithm.name = '{name}' is not a module of apex/algorithms; {nearest(name, known)}")
    return importlib.import_module(f"{__name__}.{name}")
