"""Algorithms, one file each and found by name: network, action values, initial priority, loss.

A module ``apex/algorithms/NAME.py`` offers what :class:`Algorithm` lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from apex import plugins
from apex.config import Config
from apex.schema import EnvSpec

if TYPE_CHECKING:
    import torch


class Algorithm(Protocol):
    """The functions of an algorithm's module."""

    def make_network(self, config: Config, spec: EnvSpec) -> torch.nn.Module:
        """Return the network: observations ``[B, *spec.observation_shape]`` to Q ``[B, num_actions]``."""

    def initial_priority(
        self, q_taken: np.ndarray, reward: np.ndarray, discount: np.ndarray, bootstrap: np.ndarray
    ) -> np.ndarray:
        """Return the actor's |TD error|, float32[m], from Q-values that acting already produced."""

    def td_error(
        self, online: torch.nn.Module, target: torch.nn.Module, batch: dict[str, torch.Tensor], config: Config
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(td_error [B], q_taken [B])``, with gradients through the online network only."""


def load(name: str) -> Algorithm:
    """Return the algorithm module called ``name``; raises :class:`ConfigError` naming the nearest one."""
    known = plugins.names(__path__, {"networks"})
    refusal = f"algorithm.name = '{name}' is not a module of apex/algorithms"
    return cast(Algorithm, plugins.load(__name__, name, known, refusal))


if TYPE_CHECKING:  # the checker compares them with the interface
    from apex.algorithms import double_dqn

    _of_this_folder: tuple[Algorithm, ...] = (double_dqn,)
