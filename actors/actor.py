"""The actor: steps environments, explores, and streams intake batches (Horgan et al. 2018, algorithm 1)."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np

from actors.env_history import EnvHistory
from actors.exploration import actor_epsilons, epsilon_greedy
from actors.intake import Intake
from apex import algorithms, seeds
from apex.checkpoint import Part, Reader
from apex.config import Config
from apex.control import CheckpointAck, CheckpointRequest, EpsilonAck, EpsilonAssignment, Request
from apex.envs import GuardedEnvs, Timestep, VectorEnv, make_envs
from apex.metrics import Counters
from apex.policy import Policy
from apex.ports import ActorPort
from apex.role import Role
from apex.schema import EnvSpec
from apex.state import fill, is_count, is_word, require
from apex.topology import ACTOR

_STATE = {"env_seed": is_count, "steps": is_count, "q_version": is_word}


class Actor(Role):
    """One vector of environments, one batched forward pass per step.

    With ``reader`` the actor resumes its random state and its counters, with new episodes. Where all roles
    share one process, it resumes exactly where it stopped, from its part in the folder ``checkpoints``.
    """

    port: ActorPort

    def __init__(
        self, config: Config, spec: EnvSpec, port: ActorPort, index: int, num_actors: int,
        checkpoints: Path = Path(), reader: Reader | None = None,
    ):  # fmt: skip
        super().__init__(ACTOR, port, config.run.log_period_s)
        handover = port.handover or {"life": 0}
        envs, seed = config.actor.envs, config.run.seed
        self.config, self.index, self.checkpoints = config, index, checkpoints
        self._life = handover["life"]
        self._resumed_at = reader.learner_steps + 1 if reader is not None else 0
        self.env_seed = self._seed_of_attempt(0)
        self.envs = self._guarded_envs()
        self.policy = Policy(config, spec, port)
        priority = algorithms.load(config.algorithm.name).initial_priority
        self.intake = Intake(config, spec, index, priority, port.intake_memory)
        self.epsilons = actor_epsilons(config.actor, index, num_actors)
        self.rng = seeds.generator(seed, "actor", index, self._life)
        self._frames_per_step = spec.env_frames_per_step
        self._refresh_period, self._steps = config.actor.refresh_period, 0
        self._every_env = np.arange(envs)
        self._q: np.ndarray | None = None  # Q-values of the observation to act from
        self._q_version = -1  # version of the weights that gave them
        self._return = np.zeros(envs)  # full scores of the current games
        if "counters" in handover:  # of the process that this one replaces
            self.counters = Counters.from_vector(ACTOR, np.array(handover["counters"]))
        elif reader is not None and reader.exact:
            with reader.reading(self._part):
                self.load_state_dict(reader.state(self._part))
        elif reader is not None:
            with reader.reading(f"the answer of {ACTOR} {index}"):
                self.counters = reader.counters(ACTOR, index, num_actors)
                rng = reader.answers(ACTOR).get(index, {}).get("rng")
                if rng is not None:  # otherwise new, or it did not reply: it starts from its seed
                    seeds.load_state_dict(self.rng, rng)
        self._restarts_before = self.counters["env_restarts"]

    def work(self) -> bool:
        """Send ready batches; then make one vector step if the pool has room for its transitions."""
        sent = self._send_ready()
        self.policy.refresh()
        if self.policy.param_version < 0:
            self.policy.request(0)
            return sent
        if not self.intake.has_room():
            return sent
        self._step()
        return True

    def on_checkpoint(self, request: CheckpointRequest) -> None:
        """Reply with random state and counters; in one process write the whole state first."""
        error = 0 if self.history is None else self._write_part(request)
        state = {"counters": self.counters.state_dict(), "rng": seeds.state_dict(self.rng)}
        self.port.acknowledge(CheckpointAck(request.number, error, state))

    def on_request(self, request: Request) -> None:
        """Handle an epsilon assignment here, and every other request in the base class."""
        if type(request) is EpsilonAssignment:
            self.epsilons = actor_epsilons(self.config.actor, *request)
            self.port.acknowledge(EpsilonAck())
        else:
            super().on_request(request)

    def waiting_for(self) -> str:
        """Say what the actor waits for."""
        if self.policy.param_version < 0:
            return "the learner's first weights"
        return f"replay to take intake batches ({self.port.waits_for()})"

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()

    def state_dict(self) -> dict:
        """Return the whole state, exact to the last bit.

        This requires environments that are a function of their seed and actions.
        """
        values = {"env_seed": self.env_seed, "steps": self._steps, "q_version": self._q_version}
        arrays = {"q": np.zeros(0) if self._q is None else self._q.copy(), "return": self._return.copy()}
        assert self.history is not None, "only a run in one process keeps a history of its environments"
        state = {
            "rng": seeds.state_dict(self.rng), "counters": self.counters.state_dict(),
            "intake": self.intake.state_dict(), "policy": self.policy.state_dict(),
            "history": self.history.state_dict(),
        }  # fmt: skip
        return values | arrays | state

    def load_state_dict(self, state: dict) -> None:
        """Restore ``state_dict``: make the environments again, and repeat all their actions."""
        require(state, _STATE)
        seeds.load_state_dict(self.rng, state["rng"])
        self.counters.load_state_dict(state["counters"])
        self.intake.load_state_dict(state["intake"])
        self.policy.load_state_dict(state["policy"])
        self._restarts_before = self.counters["env_restarts"]
        fill(self._return, state, "return")
        self._steps, self._q_version, self.env_seed = state["steps"], state["q_version"], state["env_seed"]
        self.envs.close()
        self.envs = self._guarded_envs()
        if state["q"].size:
            if len(state["q"]) != self.config.actor.envs:
                raise ValueError("its Q-values belong to another number of environments")
            assert self.history is not None, "only a run in one process has a state"
            self._q = state["q"]
            self.history.load_state_dict(state["history"], self.envs)

    def _guarded_envs(self) -> GuardedEnvs:
        return GuardedEnvs(self._make_envs, self.config.env.max_restarts, f"{ACTOR} {self.index}")

    def _seed_of_attempt(self, attempt: int) -> int:
        attempt += self._life << 32
        first = self.index * self.config.actor.envs
        return seeds.environment_seed(self.config.run.seed, first, self._resumed_at, attempt)

    def _make_envs(self, attempt: int) -> VectorEnv:
        """Return environments with other episodes for every attempt, and start their history."""
        if attempt:
            self.env_seed = self._seed_of_attempt(attempt)
        self.history = EnvHistory(self.config.actor.envs) if self.config.run.transport == "local" else None
        return make_envs(self.config.env, self.config.actor.envs, self.env_seed)

    @property
    def _part(self) -> str:
        return f"{ACTOR}-{self.index}"

    def _write_part(self, request: CheckpointRequest) -> int:
        """Return 0 or the error number."""
        part = Part(request.partial(self.checkpoints), self._part)
        try:
            part.write(self.state_dict())
            return 0
        except OSError as error:
            return error.errno or errno.EIO

    def _step(self) -> None:
        acting = self._begin() if self._q is None else self._q
        action = epsilon_greedy(acting, self.epsilons, self.rng)
        history = self.history
        step = self.envs.step(action)
        if history is not None and history is self.history:
            history.add(action)
        q = self.policy.q_values(step.obs)
        q_taken = acting[self._every_env, action]
        self.intake.add(step, action, q_taken, self._q_version, self._bootstrap(step, q))
        self._q, self._q_version = q, self.policy.param_version
        self._count(step)
        self._steps += 1
        if self._steps % self._refresh_period == 0:
            self.policy.request(self.policy.learner_steps + 1)

    def _begin(self) -> np.ndarray:
        """Start the first episodes; return the Q-values to act with."""
        obs = self.envs.reset()
        self.intake.begin(obs)
        q, self._q_version = self.policy.q_values(obs), self.policy.param_version
        return q

    def _bootstrap(self, step: Timestep, q: np.ndarray) -> np.ndarray:
        """Return max_a Q(s_t, a), float32[V].

        The acting pass gave it, except for truncated rows that were reset in the same step.
        """
        value = q.max(axis=1)
        rows = np.flatnonzero(step.truncated & step.first)
        if rows.size:
            value[rows] = self.policy.q_values(step.last_obs[rows]).max(axis=1)
        return value

    def _send_ready(self) -> bool:
        for row in self.port.completed_intake():
            self.intake.recycle(row)
        sent = False
        while self.intake.ready and self.port.can_send_intake():
            row = self.intake.ready.popleft()
            self.port.send_intake(row, self.intake.message(row))
            self.counters.add("transitions", self.intake.transitions(row))
            sent = True
        return sent

    def _count(self, step: Timestep) -> None:
        steps = int(step.valid.sum())
        self.counters.add("agent_steps", steps)
        self.counters.add("env_frames", steps * self._frames_per_step)
        self.counters.set("env_restarts", self._restarts_before + self.envs.restarts)
        self._return[~step.valid] = 0.0
        self._return += step.score
        ended = np.flatnonzero(step.game_over)
        if ended.size:
            self.counters.add("episodes", ended.size)
            self.counters.add("return_sum", self._return[ended].sum())
            self._return[ended] = 0.0
