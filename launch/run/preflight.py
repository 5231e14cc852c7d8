"""Everything that can be refused is refused here, in one line, before anything starts."""

from __future__ import annotations

from apex import algorithms
from apex.config import Config, ConfigError
from apex.envs import env_spec, is_always_the_same
from apex.envs.trial import try_out
from apex.say import warn
from apex.schema import EnvSpec, intake_layout
from replay_rank.index import index_class, make_index
from replay_rank.rate_limit import RateLimiter


def check(config: Config) -> EnvSpec:
    """Return the environment's spec; raises :class:`ConfigError` where the configuration cannot run."""
    # First: a wheel of torch may bring a libgomp without OpenACC, and the first one loaded serves all.
    _check_index(config)
    from learner.train_step import device  # imports torch, which takes a second

    spec = env_spec(config.env)
    RateLimiter(config)
    _layout_or_refuse(config, spec)
    algorithms.load(config.algorithm.name).make_network(config, spec)
    device(config.learner.device)
    _tell_of_equal_episodes(config)
    try_out(config, spec)  # last, since it takes longest
    return spec


def _tell_of_equal_episodes(config: Config) -> None:
    """Warn where every evaluation will play one episode many times, so that its mean is one return."""
    evaluator = config.evaluator
    if evaluator.episodes > 1 and evaluator.epsilon == 0.0 and is_always_the_same(config.env):
        warn(
            f"apex: the {evaluator.episodes} episodes of an evaluation will be identical: nothing varies them"
            " (env.noop_max, env.sticky_actions and evaluator.epsilon are 0)"
        )


def _check_index(config: Config) -> None:
    """Refuse an index that cannot be made."""
    replay = config.replay
    try:
        # A device is only looked for: using it is for the replay ranks.
        lives_here = replay.index_device if not index_class(replay.index).on_any_device else "cpu"
        make_index(replay.index, 1, alpha=replay.alpha, device=lives_here)
    except (ValueError, ImportError) as error:  # unknown, or its library is not built
        raise ConfigError(f"replay.index: {error}") from None
    if replay.index_device != "cpu":
        from learner.train_step import device

        device(replay.index_device, "replay.index_device")


def _layout_or_refuse(config: Config, spec: EnvSpec) -> None:
    try:
        intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step)
    except ValueError as error:
        raise ConfigError(f"actor.intake_batch: {error}") from None
