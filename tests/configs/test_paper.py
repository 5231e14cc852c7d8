"""The preset ``paper`` has the constants of Horgan et al. 2018.

Docs/paper.md says where each formula places them.
"""

import pytest

from apex.config import load

PAPER = {
    "algorithm": {
        "n_step": 3,
        "discount": 0.99,
        "double": True,
        "dueling": True,
        "network": "nature_cnn",
        "hidden": 512,
    },
    "actor": {"count": 360, "envs": 1, "intake_batch": 50, "epsilon_base": 0.4, "epsilon_alpha": 7.0},
    "replay": {"capacity": 2_000_000, "alpha": 0.6, "min_size": 50_000},
    "learner": {
        "batch_size": 512,
        "optimizer": "rmsprop",
        "learning_rate": 0.00025 / 4,
        "rmsprop_decay": 0.95,
        "optimizer_eps": 1.5e-7,
        "max_grad_norm": 40.0,
        "target_period": 2_500,
        "beta": 0.4,
    },
    "env": {
        "frame_skip": 4,
        "frame_size": 84,
        "stack": 4,
        "noop_max": 30,
        "clip_rewards": True,
        "max_episode_frames": 108_000,
    },
}


@pytest.mark.parametrize("section", PAPER)
def test_the_preset_has_the_papers_constants(section):
    config = load("paper")
    values = vars(getattr(config, section))
    assert {name: values[name] for name in PAPER[section]} == PAPER[section]


def test_an_actor_asks_for_parameters_every_400_frames():
    config = load("paper")
    assert config.actor.refresh_period * config.env.frame_skip == 400
