"""What every algorithm must satisfy. A new one subclasses ``AlgorithmConformance`` and names itself."""

from typing import ClassVar

import numpy as np
import torch

from apex import algorithms
from apex.config import from_tables
from apex.schema import EnvSpec

B = 32


class AlgorithmConformance:
    """Subclass with ``name`` and, where needed, ``settings``: fields of the section ``algorithm``."""

    name: str
    settings: ClassVar[dict] = {}
    spec = EnvSpec((5,), "float32", 2, 3)

    def make(self, seed: int):
        """Return ``(module, config, network)`` with random weights."""
        config = from_tables([("test", {"algorithm": {"name": self.name, **self.settings}})])
        torch.manual_seed(seed)
        module = algorithms.load(self.name)
        return module, config, module.make_network(config, self.spec)

    def batch(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return a random batch, a third of it terminal."""
        rng = np.random.default_rng(seed)
        arrays = {
            "obs": rng.normal(size=(B, *self.spec.observation_shape)).astype(np.float32),
            "next_obs": rng.normal(size=(B, *self.spec.observation_shape)).astype(np.float32),
            "action": rng.integers(self.spec.num_actions, size=B).astype(np.int32),
            "reward": rng.normal(size=B).astype(np.float32),
            "discount": np.where(rng.random(B) < 1 / 3, 0, 0.97).astype(np.float32),
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def test_q_values_have_one_column_per_action(self):
        _, _, network = self.make(0)
        assert network(self.batch()["obs"]).shape == (B, self.spec.num_actions)

    def test_the_initial_priority_is_the_absolute_td_error_for_the_same_weights(self):
        module, config, network = self.make(0)
        batch = self.batch()
        error, _ = module.td_error(network, network, batch, config)
        with torch.no_grad():
            q = network(batch["obs"]).gather(1, batch["action"].long()[:, None]).squeeze(1).numpy()
            bootstrap = network(batch["next_obs"]).max(dim=1).values.numpy()
        priority = module.initial_priority(q, batch["reward"].numpy(), batch["discount"].numpy(), bootstrap)
        np.testing.assert_allclose(priority, error.detach().abs().numpy(), atol=1e-5)

    def test_gradients_flow_through_the_online_network_only(self):
        module, config, online = self.make(0)
        _, _, target = self.make(1)
        module.td_error(online, target, self.batch(), config)[0].pow(2).mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in online.parameters())
        assert all(p.grad is None for p in target.parameters())

    def test_what_follows_a_terminal_state_does_not_matter(self):
        module, config, online = self.make(0)
        _, _, target = self.make(1)
        batch, other = self.batch(), self.batch()
        other["next_obs"] = other["next_obs"] + 1.0
        terminal = batch["discount"] == 0
        errors = [module.td_error(online, target, b, config)[0] for b in (batch, other)]
        assert torch.equal(errors[0][terminal], errors[1][terminal])
        assert not torch.allclose(errors[0][~terminal], errors[1][~terminal])
