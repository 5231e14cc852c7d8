"""Acting with the learner's newest weights: what actors and the evaluator share."""

from __future__ import annotations

import numpy as np
import torch

from apex import algorithms, weights
from apex.config import Config
from apex.ports import WeightsPort
from apex.schema import EnvSpec, aligned_bytes, weight_header, weight_layout
from apex.state import fill, is_word, require

_STATE = {
    "param_version": is_word, "learner_steps": is_word,
    "asked": lambda value: value is None or is_word(value),
}  # fmt: skip


class Policy:
    """A network that follows the learner's publishes.

    ``param_version`` and ``learner_steps`` are those of the weights in use, -1 before the first.
    """

    def __init__(self, config: Config, spec: EnvSpec, port: WeightsPort):
        self.network = algorithms.load(config.algorithm.name).make_network(config, spec).eval()
        self.port = port
        layout = weight_layout(weights.size(self.network))
        self._message = aligned_bytes(layout.nbytes)
        self._vector = layout.views(self._message)["vector"]
        self.param_version = self.learner_steps = -1
        self.asked: int | None = None  # learner steps of the request that is open

    def request(self, min_learner_steps: int) -> None:
        """Ask for weights of at least that many learner steps."""
        self.asked = min_learner_steps if self.asked is None else self.asked
        self.port.request_weights(min_learner_steps, self._message)

    def refresh(self) -> bool:
        """Load the weights asked for if they have arrived; return whether they had."""
        if not self.port.poll_weights():
            return False
        self.asked = None
        weights.unflatten(self.network, self._vector)
        self.param_version, self.learner_steps = weight_header(self._message)
        return True

    def state_dict(self) -> dict:
        """Return the weights in use, as the message uint8[nbytes] they came in, and the open request."""
        versions = {"param_version": self.param_version, "learner_steps": self.learner_steps}
        return versions | {"message": self._message.copy(), "asked": self.asked}

    def load_state_dict(self, state: dict) -> None:
        """Go on with the weights of ``state_dict``, and ask again for what had been asked for."""
        require(state, _STATE)
        fill(self._message, state, "message")
        if state["param_version"] >= 0:
            weights.unflatten(self.network, self._vector)
        self.param_version, self.learner_steps = state["param_version"], state["learner_steps"]
        if state["asked"] is not None:
            self.request(state["asked"])

    def q_values(self, obs: np.ndarray) -> np.ndarray:
        """Return Q-values float32[B, num_actions] of observations [B, stack, *frame_shape]."""
        with torch.inference_mode():
            return self.network(torch.from_numpy(obs)).numpy()
