"""One optimiser update."""

from __future__ import annotations

import copy
import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from apex import algorithms, seeds
from apex.config import Config, ConfigError, LearnerConfig
from apex.schema import EnvSpec
from learner.rmsprop import CentredRMSprop

# A sample batch may be in a replay rank's memory, read-only; a train step only reads it.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", module=__name__)

_INPUTS = ("obs", "next_obs", "action", "reward", "discount")


class StepResult(NamedTuple):
    """The result of one update: raw |TD error| per row (float32[B]) and means for the log."""

    priority: np.ndarray
    loss: float
    td_error: float
    q_value: float
    grad_norm: float


class NotFinite(FloatingPointError):
    """The loss, the gradient or a new parameter is NaN or infinite; the step has changed nothing."""


class TrainStep:
    """Online and target network, optimiser, and the update of both (Horgan et al. 2018, section 3.1)."""

    def __init__(self, config: Config, spec: EnvSpec):
        self.config = config
        self.device = device(config.learner.device)
        self.algorithm = algorithms.load(config.algorithm.name)
        torch.manual_seed(seeds.integer(config.run.seed, "learner"))
        # Convolutions are 1.2 times faster on a CPU with the channels of a pixel side by side.
        network = self.algorithm.make_network(config, spec)
        self.online = network.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lists no such
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = _optimizer(self.online, config.learner)
        self._before = _Snapshot(self.optimizer)
        self.learner_steps = 0
        self._pinned: dict[str, torch.Tensor] = {}  # on CUDA: page-locked memory
        self._random: dict | None = None  # state of torch's generators to restore before the next update

    def __call__(self, views: dict[str, np.ndarray], is_weight: np.ndarray) -> StepResult:
        """Update the online network from a sample message; copy it into the target network when that is due.

        The loss is the mean of is_weight * Huber(TD error). Raises :class:`NotFinite`, and changes nothing,
        if the loss, its gradient or a resulting parameter is not finite.
        """
        self._restore_random()
        batch = {name: _as_input(self._on_device(name, views[name])) for name in _INPUTS}
        weight = self._on_device("is_weight", is_weight)
        error, q_taken = self.algorithm.td_error(self.online, self.target, batch, self.config)
        huber = nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")
        loss = (weight * huber).mean()
        if not torch.isfinite(loss):
            raise NotFinite(f"the loss of learner step {self.learner_steps + 1} is {loss.item()}")
        grad_norm = self._descend(loss)
        priority = error.detach().abs().cpu().numpy()
        return StepResult(priority, loss.item(), float(priority.mean()), q_taken.mean().item(), grad_norm)

    def _on_device(self, name: str, values: np.ndarray) -> torch.Tensor:
        """Return ``values`` on the device, copied through pinned memory that each step reuses."""
        tensor = torch.from_numpy(values)
        if self.device.type != "cuda":
            return tensor
        pinned = self._pinned.get(name)
        if pinned is None or pinned.shape != tensor.shape:
            pinned = self._pinned[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor).to(self.device, non_blocking=True)

    def check_finite(self) -> None:
        """Raise FloatingPointError if a parameter is NaN or infinite: no such weights are sent or saved."""
        for name, parameter in self.online.named_parameters():
            if not torch.isfinite(parameter).all():
                raise FloatingPointError(f"after learner step {self.learner_steps}: '{name}' is not finite")

    def state_dict(self) -> dict:
        """Return networks, optimiser, step count and torch's random state; tensors are not copied."""
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return {
            "random": {"cpu": torch.get_rng_state(), "cuda": cuda},
            "online": self.online.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "learner_steps": self.learner_steps,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict``; raises what torch does, or ValueError, if the configuration differs."""
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        self._load_optimizer(state["optimizer"])
        self.learner_steps, self._random = int(state["learner_steps"]), _checked_random(state["random"])

    def _load_optimizer(self, state: dict) -> None:
        """Restore averages and counts; step size, epsilon and decay stay as configured."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if len({"betas" in group for group in (*options, *state["param_groups"])}) > 1:
            raise ValueError("its optimiser is not that of learner.optimizer")
        self.optimizer.load_state_dict(state)
        for parameter, held in self.optimizer.state.items():
            shapes = {t.shape if isinstance(t, torch.Tensor) else None for t in held.values()}
            if not shapes <= {(), parameter.shape}:
                raise ValueError("its optimiser has averages of another shape")
        for group, own in zip(self.optimizer.param_groups, options, strict=True):
            group.update(own)

    def _restore_random(self) -> None:
        """Restore torch's generators; only now, as other objects of this process draw from them when made."""
        if self._random is not None:
            torch.set_rng_state(self._random["cpu"])
            for state in self._random["cuda"][: self.device.type == "cuda"]:
                torch.cuda.set_rng_state(state, self.device)
            self._random = None

    def _descend(self, loss: torch.Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.online.parameters(), self.config.learner.max_grad_norm)
        if not torch.isfinite(norm):
            raise NotFinite(f"the gradient of learner step {self.learner_steps + 1} has norm {norm.item()}")
        self._before.save()
        self.optimizer.step()
        if not all_finite(list(self.online.parameters())):
            self._before.restore()
            raise NotFinite(f"a parameter after learner step {self.learner_steps + 1} is not finite")
        self.learner_steps += 1
        if self.learner_steps % self.config.learner.target_period == 0:
            self.target.load_state_dict(self.online.state_dict())
        return norm.item()


def _checked_random(state: dict) -> dict:
    """Return ``state`` of torch's generators; raises TypeError or RuntimeError if torch rejects it."""
    torch.Generator().set_state(state["cpu"])
    if not all(isinstance(held, torch.Tensor) and held.dtype == torch.uint8 for held in state["cuda"]):
        raise TypeError("the random state of CUDA is malformed")
    return state


def _as_input(tensor: torch.Tensor) -> torch.Tensor:
    """Return images, which are sent as bytes, as float32 with channels last; other fields unchanged."""
    return tensor.to(torch.float32, memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def device(name: str, field: str = "learner.device") -> torch.device:
    """Return the torch device ``name``; raises :class:`ConfigError` naming ``field`` if it is not usable."""
    try:
        found = torch.device(name)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ConfigError(f"{field} = '{name}' is not a usable device; use cpu or cuda")
    seen = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= seen:
        use = "cuda:0 or cpu" if seen else "cpu"
        raise ConfigError(f"{field} = '{name}', but torch sees {seen or 'no'} CUDA devices here; use {use}")
    return found


@torch.no_grad()
def all_finite(tensors: list[torch.Tensor]) -> bool:
    """Whether no value of any of ``tensors`` is NaN or infinite; on an accelerator it synchronises once."""
    # A sum is not finite if a value is not, and costs a tenth of checking all values. It may also overflow.
    if torch.isfinite(torch.stack([t.sum() for t in tensors])).all():
        return True
    return all(bool(torch.isfinite(t).all()) for t in tensors)


class _Snapshot:
    """A copy of an optimiser's parameters and state, in memory that is reused."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._copies: list[torch.Tensor] = []

    @torch.no_grad()
    def save(self) -> None:
        """Copy them: one pass over memory, cheap beside the forward and backward pass."""
        now = self._tensors()
        if len(now) != len(self._copies):  # the first step creates the state
            self._copies = [t.detach().clone() for t in now]
        else:
            torch._foreach_copy_(self._copies, now)

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the steps since ``save``."""
        parameters = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if len(self._copies) == parameters:  # saved before the first step
            self._optimizer.state.clear()
        torch._foreach_copy_(self._tensors(), self._copies)

    def _tensors(self) -> list[torch.Tensor]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        states = [t for p in parameters for t in self._optimizer.state.get(p, {}).values()]
        return parameters + [t for t in states if isinstance(t, torch.Tensor)]


def _optimizer(network: nn.Module, config: LearnerConfig) -> torch.optim.Optimizer:
    lr, eps = config.learning_rate, config.optimizer_eps
    if config.optimizer == "adam":
        return torch.optim.Adam(network.parameters(), lr=lr, eps=eps, fused=True)
    return CentredRMSprop(network.parameters(), lr=lr, eps=eps, decay=config.rmsprop_decay)
