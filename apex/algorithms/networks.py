"""Q-networks: a torso for vectors or pixels and a plain or dueling head."""

from __future__ import annotations

import math

import torch
from torch import nn

from apex.config import AlgorithmConfig, ConfigError
from apex.schema import EnvSpec

_CNN_LAYERS = {
    # (channels, kernel, stride) per layer. nature_cnn: Mnih et al. 2015, for 84x84.
    "nature_cnn": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "small_cnn": ((16, 6, 3), (32, 3, 2), (32, 3, 1)),
}


class PixelConv2d(nn.Conv2d):
    """The first layer over pixels in [0, 255], scaled to [0, 1] in its weights, which are fewer."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the convolution of ``pixels / 255``."""
        return self._conv_forward(pixels, self.weight * (1.0 / 255.0), self.bias)


class PixelLinear(nn.Linear):
    """The same for a layer without convolution."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the layer of ``pixels / 255``."""
        return nn.functional.linear(pixels, self.weight * (1.0 / 255.0), self.bias)


class QNetwork(nn.Module):
    """Observations ``[B, stack, *frame_shape]`` of any dtype to Q-values ``[B, num_actions]`` float32.

    With ``dueling``, Q = V + A - mean(A) (Wang et al. 2016, equation 9).
    """

    def __init__(self, torso: nn.Module, features: int, hidden: int, num_actions: int, dueling: bool):
        super().__init__()
        self.torso = torso
        self.advantage = _head(features, hidden, num_actions)
        self.value = _head(features, hidden, 1) if dueling else None

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return Q-values of a batch of observations."""
        features = self.torso(obs.float())
        advantage = self.advantage(features)
        if self.value is None:
            return advantage
        return self.value(features) + advantage - advantage.mean(dim=1, keepdim=True)


def make(config: AlgorithmConfig, spec: EnvSpec) -> QNetwork:
    """Return the configured network; raises :class:`ConfigError` where it cannot take the observations."""
    if config.network == "mlp":
        torso, features = _mlp(spec, config.hidden)
        return QNetwork(torso, features, config.hidden, spec.num_actions, config.dueling)
    torso, features = _cnn(config.network, spec)
    return QNetwork(torso, features, config.hidden, spec.num_actions, config.dueling)


def _head(features: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _mlp(spec: EnvSpec, hidden: int) -> tuple[nn.Module, int]:
    linear = PixelLinear if spec.frame_dtype == "uint8" else nn.Linear
    torso = nn.Sequential(nn.Flatten(), linear(math.prod(spec.observation_shape), hidden), nn.ReLU())
    return torso, hidden


def _cnn(name: str, spec: EnvSpec) -> tuple[nn.Module, int]:
    if len(spec.frame_shape) != 2:
        raise ConfigError(
            f"algorithm.network = '{name}' needs image frames [height, width], "
            f"got {list(spec.frame_shape)}; use 'mlp'"
        )
    layers: list[nn.Module] = []
    channels, size = spec.stack, min(spec.frame_shape)
    for out, kernel, stride in _CNN_LAYERS[name]:
        if size < kernel:
            raise ConfigError(
                f"algorithm.network = '{name}' is too deep for {list(spec.frame_shape)} frames; "
                "raise env.frame_size"
            )
        convolution = PixelConv2d if not layers and spec.frame_dtype == "uint8" else nn.Conv2d
        layers += [convolution(channels, out, kernel, stride), nn.ReLU()]
        channels, size = out, (size - kernel) // stride + 1
    torso = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        features = torso(torch.zeros(1, *spec.observation_shape)).shape[1]
    return torso, features
