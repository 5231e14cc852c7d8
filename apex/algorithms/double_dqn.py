"""Double, dueling, n-step DQN with prioritised replay: Ape-X DQN (Horgan et al. 2018, section 3.1)."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from apex.algorithms import networks
from apex.config import Config
from apex.schema import EnvSpec


def make_network(config: Config, spec: EnvSpec) -> nn.Module:
    """Return a Q-network for the configured environment (see ``networks.QNetwork``)."""
    return networks.make(config.algorithm, spec)


def initial_priority(
    q_taken: np.ndarray, reward: np.ndarray, discount: np.ndarray, bootstrap: np.ndarray
) -> np.ndarray:
    """Return |r_t + discount_t * max_a Q(s_t, a) - Q(s_tm1, a_tm1)|, float32[m].

    With one network for choosing and valuing, double Q-learning's target is the plain maximum, so
    this equals the learner's |TD error| whenever its online and target weights are the actor's.
    """
    return np.abs(reward + discount * bootstrap - q_taken)


def td_error(
    online: nn.Module, target: nn.Module, batch: dict[str, torch.Tensor], config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``(td_error [B], q_taken [B])``: r_t + discount_t * Q_target(s_t, a*) - Q(s_tm1, a_tm1).

    a* is the online network's greedy action in s_t, or the target network's without ``double``.
    """
    with torch.no_grad():
        q_t = target(batch["next_obs"])
        chooser = online(batch["next_obs"]) if config.algorithm.double else q_t
        bootstrap = q_t.gather(1, chooser.argmax(dim=1, keepdim=True)).squeeze(1)
        goal = batch["reward"] + batch["discount"] * bootstrap
    q_taken = online(batch["obs"]).gather(1, batch["action"].long().unsqueeze(1)).squeeze(1)
    return goal - q_taken, q_taken
