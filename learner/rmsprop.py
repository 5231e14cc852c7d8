"""Centred RMSProp with epsilon inside the root, as the constants of Horgan et al. 2018 require."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import Optimizer

from apex.say import warn


class CentredRMSprop(Optimizer):
    """Divides each gradient by the root of its running variance plus epsilon.

    With gradient x, decay rho, and running means g of x and v of x^2, which start at 0::

        g <- rho g + (1 - rho) x
        v <- rho v + (1 - rho) x^2
        parameter <- parameter - lr x / sqrt(v - g^2 + eps)

    (Horgan et al. 2018, appendix C; Mnih et al. 2015.) ``torch.optim.RMSprop`` adds eps to the root instead,
    which for eps = 1.5e-7 is another optimiser. The state is g and the variance s = v - g^2, which obeys::

        s <- rho (s + (1 - rho) (x - g)^2)      with g before its update

    It cannot fall below 0, and does not cancel if x is nearly constant. An update costs O(1) kernels for all
    parameters together. Gradients are dense; a parameter without a gradient stays unchanged.
    """

    def __init__(self, params: Iterable[torch.Tensor], lr: float, decay: float, eps: float):
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # without overloads
        """Update every parameter that has a gradient; return what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group["lr"], group["decay"], group["eps"])
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore ``state_dict``, or that of torch's centred RMSprop; raises ValueError for other states."""
        super().load_state_dict(_in_this_form(state_dict))

    def _update(self, params: list, lr: float, decay: float, eps: float) -> None:
        gradients = [p.grad for p in params]
        means, variances = zip(*map(self._averages, params))
        apart = torch._foreach_sub(gradients, means)
        torch._foreach_add_(means, apart, alpha=1 - decay)
        torch._foreach_addcmul_(variances, apart, apart, value=1 - decay)
        torch._foreach_mul_(variances, decay)
        root = torch._foreach_add(variances, eps)
        torch._foreach_sqrt_(root)
        torch._foreach_addcdiv_(params, gradients, root, value=-lr)

    def _averages(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            for name in ("mean", "variance"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state["mean"], state["variance"]


def _in_this_form(saved: dict) -> dict:
    """Return a state in this class's form; convert that of torch's centred RMSprop, with a warning."""
    groups, states = saved["param_groups"], saved["state"]
    if all("decay" in group for group in groups):
        return saved
    if not all(group.get("centered") for group in groups):
        raise ValueError("its optimiser is RMSProp without centring")
    warn(
        "apex: the checkpoint's RMSProp added epsilon outside the root; its averages are kept, but epsilon is"
        " now inside, so the size of steps changes"
    )
    names = {"lr": "lr", "eps": "eps", "params": "params", "decay": "alpha"}
    groups = [{new: group[old] for new, old in names.items()} for group in groups]
    return {"state": {key: _converted(state) for key, state in states.items()}, "param_groups": groups}


def _converted(state: dict) -> dict:
    mean, square = state["grad_avg"], state["square_avg"]
    return {"mean": mean, "variance": (square - mean * mean).clamp(min=0)}
