"""The evaluator: greedy episodes on fixed seeds, at full scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.best_weights import BestWeights
from actors.exploration import epsilon_greedy
from apex.checkpoint import Reader
from apex.config import Config
from apex.control import CheckpointAck, CheckpointRequest
from apex.envs import GuardedEnvs, VectorEnv, make_envs
from apex.metrics import Counters
from apex.policy import Policy
from apex.ports import WeightsPort
from apex.role import Role
from apex.say import warn
from apex.schema import EnvSpec
from apex.state import is_number, is_word, require
from apex.topology import EVALUATOR

_STATE = {"next_steps": is_word, "best_return": is_number}


class Episodes:
    """One episode in each of V environments, stepped together, with the environments' own seeds.

    ``returns`` float64[V] and ``lengths`` int64[V] (agent steps) belong to the first episode of each
    environment. An episode longer than ``max_frames`` env frames is cut there and counted in ``cut``.
    ``identical`` says whether all environments have shown the same observations so far.
    """

    def __init__(self, envs: VectorEnv | GuardedEnvs, epsilon: float, seed: int, max_frames: int):
        self.envs, self.obs = envs, envs.reset()
        # One step more, so that an emulator with the same limit truncates first.
        self.max_steps = max_frames // envs.spec.env_frames_per_step + 1
        self.cut = 0
        self.rng = np.random.default_rng(seed)
        self.epsilons = np.full(envs.num_envs, epsilon)
        self.returns = np.zeros(envs.num_envs)
        self.lengths = np.zeros(envs.num_envs, np.int64)
        self.running = np.ones(envs.num_envs, bool)
        self.identical = envs.num_envs > 1 and bool((self.obs == self.obs[:1]).all())

    @property
    def done(self) -> bool:
        """Whether every environment has ended its first episode."""
        return not self.running.any()

    def step(self, q_values: Callable[[np.ndarray], np.ndarray]) -> None:
        """Make one vector step with ``q_values(obs) -> float32[V, A]``."""
        step = self.envs.step(epsilon_greedy(q_values(self.obs), self.epsilons, self.rng))
        self.identical = self.identical and bool((step.last_obs == step.last_obs[:1]).all())
        self.returns += np.where(self.running, step.reward, 0.0)
        self.lengths += self.running
        self.running &= ~(step.terminated | step.truncated)
        self.obs = step.obs
        endless = self.running & (self.lengths >= self.max_steps)
        self.cut += int(endless.sum())
        self.running &= ~endless

    def complaint(self) -> str | None:
        """Return a warning if episodes have been cut, else None."""
        if not self.cut:
            return None
        why = "env.max_episode_frames; the return up to there counts"
        cut = f"{self.cut} of {len(self.running)} episodes"
        return f"{cut} did not end within {self.max_steps} steps and were cut ({why})"


class Evaluator(Role):
    """Evaluates weights at least ``evaluator.period`` learner steps apart, until the run ends.

    It writes the best weights into the folder ``checkpoints`` before it reports their return. A resumed run
    repeats an interrupted evaluation with the newest weights.
    """

    port: WeightsPort

    def __init__(
        self, config: Config, spec: EnvSpec, port: WeightsPort, checkpoints: Path,
        reader: Reader | None = None,
    ):  # fmt: skip
        super().__init__(EVALUATOR, port, config.run.log_period_s)
        self.config = config.evaluator
        self.policy = Policy(config, spec, port)
        self._envs = GuardedEnvs(
            lambda attempt: make_envs(config.env, self.config.episodes, self.config.seed, evaluation=True),
            config.env.max_restarts, EVALUATOR,
        )  # fmt: skip
        self._max_frames = config.env.max_episode_frames
        self._complained = False
        self._episodes: Episodes | None = None
        self._unreported = False
        self._warned_identical = False
        self.best = BestWeights(checkpoints)
        self._next_steps = 0  # the next evaluation needs weights of at least so many learner steps
        if port.handover is not None:  # of the process that this one replaces
            self.counters = Counters.from_vector(EVALUATOR, np.array(port.handover["counters"]))
        self._restarts_before = self.counters["env_restarts"]
        if reader is not None and port.handover is None:
            with reader.reading(f"the answer of {EVALUATOR}"):
                counters = {"counters": reader.counters(EVALUATOR, 0, 1).state_dict()}
                self.load_state_dict(self.state_dict() | reader.answers(EVALUATOR).get(0, {}) | counters)

    def work(self) -> bool:
        """Make one vector step of the running evaluation, or report it, or ask for the next weights."""
        if self._unreported:
            self._unreported = not self.report()
            return not self._unreported
        if self._episodes is not None:
            self._step(self._episodes)
            return True
        if not self.policy.refresh():
            self.policy.request(self._next_steps)
            return False
        self._begin()
        return True

    def on_checkpoint(self, request: CheckpointRequest) -> None:
        """Reply with the counters, the best return, and the learner steps of the next evaluation."""
        self.update_counters()
        self.port.acknowledge(CheckpointAck(request.number, 0, self.state_dict()))

    def state_dict(self) -> dict:
        """Return ``next_steps``, ``best_return`` and the counters."""
        values = {"next_steps": self._next_steps, "best_return": self.best.eval_return}
        return {**values, "counters": self.counters.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict``."""
        require(state, _STATE)
        self.counters.load_state_dict(state["counters"])
        self.best.load_state_dict(state["best_return"])
        self._next_steps, self._restarts_before = state["next_steps"], self.counters["env_restarts"]

    def waiting_for(self) -> str | None:
        """Say what the evaluator waits for; None between evaluations, where a long wait is normal."""
        return "the learner's first weights" if self.policy.param_version < 0 else None

    def update_counters(self) -> None:
        """Count the restarts of the environments, including those before a resumption."""
        self.counters.set("env_restarts", self._restarts_before + self._envs.restarts)

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()

    def _begin(self) -> None:
        self._episodes = Episodes(self._envs, self.config.epsilon, self.config.seed, self._max_frames)

    def _complain(self, episodes: Episodes) -> None:
        """Warn once that evaluation episodes do not end."""
        complaint = episodes.complaint()
        if complaint is not None and not self._complained:
            self._complained = True
            warn(f"apex: {EVALUATOR}: {complaint}")

    def _step(self, episodes: Episodes) -> None:
        restarts = self._envs.restarts
        episodes.step(self.policy.q_values)
        if self._envs.restarts > restarts:  # a restart ends every episode: evaluate from the start
            self._begin()
            return
        if not episodes.done:
            return
        self._complain(episodes)
        eval_return = float(episodes.returns.mean())
        self.best.offer(self.policy, eval_return)
        self.counters.add("evaluations", 1)
        self.counters.set("eval_return", eval_return)
        self.counters.set("eval_episodes", len(episodes.returns))
        self.counters.set("eval_version", self.policy.param_version)
        self._warn_if_identical(episodes)
        self._episodes, self._unreported = None, True
        self._next_steps = self.policy.learner_steps + self.config.period

    def _warn_if_identical(self, episodes: Episodes) -> None:
        """Warn once that all episodes of an evaluation were identical."""
        if episodes.identical and not self._warned_identical:
            self._warned_identical = True
            what = f"all {len(episodes.returns)} episodes were identical, step by step"
            warn(f"apex: {EVALUATOR}: {what}; their mean is one return")
