"""Environments with awkward ends, a player that writes down what they gave, and each transition made again
the slow way.

Every step made is known by a number of its own, which travels as its action: number = time * num_envs + row.
"""

from collections import deque
from typing import NamedTuple

import gymnasium
import numpy as np
from counting_env import FLAVOURS
from gymnasium.spaces import Box, Discrete

from actors.intake import Intake
from apex.algorithms.double_dqn import initial_priority
from apex.config import from_tables
from apex.envs import VectorEnv
from apex.schema import EnvSpec, intake_layout

RESETS = ("zero", "repeat", "other")
JUNK = 0xAB


class StackingEnv(gymnasium.Env):
    """Observations are the newest ``stack`` frames of an episode, uint8 [stack, 2, 2], oldest first.

    ``resets`` says what stands before an episode's first frame: zeros, that frame again, or frames of
    its own. Some frames are blank and some repeat the one before, as on a real screen.
    """

    action_space = Discrete(2)

    def __init__(self, row, stack, resets, lengths, ends):
        self.row, self.stack, self.resets, self.lengths, self.ends = row, stack, resets, lengths, ends
        self.observation_space = Box(0, 255, (stack, 2, 2), np.uint8)
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.observation(), {}

    def step(self, action):
        self.t += 1
        over = self.t == self.lengths[self.episode % len(self.lengths)]
        end = self.ends[self.episode % len(self.ends)] if over else "no"
        reward = ((37 * self.t + 11 * self.episode + 5 * self.row) % 17 - 8) / 3
        return self.observation(), reward, end in ("terminated", "both"), end in ("truncated", "both"), {}

    def observation(self):
        return np.stack([self.frame(t) for t in range(self.t - self.stack + 1, self.t + 1)])

    def frame(self, t):
        if t < 0 and self.resets != "other":
            return np.zeros((2, 2), np.uint8) if self.resets == "zero" else self.frame(0)
        odd = (3 * self.episode + t) % 11
        if odd == 4:
            return np.zeros((2, 2), np.uint8)
        return np.array([[self.row, self.episode % 256], [(t - 1 if odd == 7 else t) % 256, 9]], np.uint8)


def stacking_envs(
    flavour, num_envs, stack, resets="zero", lengths=(5, 1, 2, 9, 3), ends=("terminated", "truncated")
):
    """Return ``num_envs`` stacking environments, lengths rotated by row, in one of
    ``counting_env.FLAVOURS``.
    """

    def make(row):
        turn = row % len(lengths)
        return lambda: StackingEnv(row, stack, resets, lengths[turn:] + lengths[:turn], ends)

    spec = EnvSpec((2, 2), "uint8", stack, 2)
    return VectorEnv(FLAVOURS[flavour]([make(row) for row in range(num_envs)]), spec, seed=0)


def make_config(envs=1, batch=3, n=3, in_flight=1, capacity=None, **sections):
    """Return a small configuration; ``sections`` are further tables."""
    tables = {
        "actor": {"envs": envs, "intake_batch": batch, "in_flight": in_flight},
        "algorithm": {"n_step": n, "discount": 0.9},
        "replay": {"capacity": capacity or 4 * batch, "min_size": 1},
    }
    return from_tables([("test", tables), ("test", sections)])


class Step(NamedTuple):
    """One step as the environment gave it, with what the actor knew."""

    obs: bytes
    number: int
    reward: float
    version: int
    q: np.float32
    bootstrap: np.float32
    next_obs: bytes
    terminated: bool
    over: bool


class Transition(NamedTuple):
    """One transition, all of it."""

    obs: bytes
    number: int
    reward: float
    discount: float
    version: int
    next_obs: bytes
    priority: float


def expected_transitions(steps, n, gamma):
    """Return the transitions that one environment's list of steps has completed, in order of their starts."""
    done = []
    for i, first in enumerate(steps):
        window = [first]
        while len(window) < n and not window[-1].over and i + len(window) < len(steps):
            window.append(steps[i + len(window)])
        if len(window) == n or window[-1].over:
            done.append(transition_of(window, gamma))
    return done


def transition_of(window, gamma):
    first, last, total = window[0], window[-1], 0.0
    for k, step in enumerate(window):
        total += step.reward * gamma**k
    ret, discount = np.float32(total), np.float32(0.0 if last.terminated else gamma ** len(window))
    priority = abs(ret + discount * last.bootstrap - first.q)
    return Transition(
        first.obs, first.number, float(ret), float(discount), first.version, last.next_obs, float(priority)
    )


class Player:
    """Plays environments into an Intake as an actor does, with ``in_flight`` batches on the wire."""

    def __init__(self, config, envs, actor=5):
        self.config, self.envs, self.actor = config, envs, actor
        self.intake = Intake(config, envs.spec, actor, initial_priority)
        self.rng, self.time, self.wire = np.random.default_rng(0), 0, deque()
        self.steps = [[] for _ in range(envs.num_envs)]
        self.before = [[] for _ in range(envs.num_envs)]  # transitions from before the row was last cut off
        self.obs = envs.reset()
        self.intake.begin(self.obs)

    def play(self, steps):
        """Make vector steps; yield every batch as the bytes that travel (uint8)."""
        for _ in range(steps):
            yield from self._send()
            assert self.intake.has_room(), "no room with no more on the wire than allowed"
            self._step()
        yield from self._send()

    def expected(self, row):
        """Return the transitions of one environment so far."""
        algorithm = self.config.algorithm
        return self.before[row] + expected_transitions(self.steps[row], algorithm.n_step, algorithm.discount)

    def _send(self):
        while self.intake.ready:
            row = self.intake.ready.popleft()
            message = self.intake.message(row)
            self.wire.append((row, message, message.tobytes()))
            yield np.frombuffer(self.wire[-1][2], np.uint8)
            if len(self.wire) > self.config.actor.in_flight:
                self._receive()

    def _receive(self):
        row, message, sent = self.wire.popleft()
        assert message.tobytes() == sent, "a batch changed while it was on the wire"
        message[:] = JUNK  # whoever still reads it will notice
        self.intake.recycle(row)

    def _step(self):
        v = self.envs.num_envs
        numbers = self.time * v + np.arange(v)
        q, bootstrap = self.rng.normal(size=(2, v)).astype(np.float32)
        version = self.time // 3
        t = self.envs.step(self.rng.integers(self.envs.spec.num_actions, size=v))
        self.intake.add(t, numbers, q, version, bootstrap)
        for row in np.flatnonzero(~t.valid):
            self.before[row], self.steps[row] = self.expected(row), []
        for row in np.flatnonzero(t.valid):
            ends = bool(t.terminated[row]), bool(t.terminated[row] or t.truncated[row])
            known = float(t.reward[row]), version, q[row], bootstrap[row], t.last_obs[row].tobytes()
            self.steps[row].append(Step(self.obs[row].tobytes(), int(numbers[row]), *known, *ends))
        self.obs, self.time = t.obs, self.time + 1


def decode(config, spec, message):
    """Return ``(header, transitions)`` of an intake batch, read in plain Python."""
    layout = intake_layout(spec, config.actor.intake_batch, config.algorithm.n_step)
    whole = np.full(layout.nbytes, JUNK, np.uint8)
    whole[: len(message)] = message
    views = layout.views(whole)
    count, used, *_ = header = views["header"].tolist()
    frames = [views["frames"][i].tobytes() for i in range(used)]
    assert len(message) == layout.fields["frames"].offset + used * spec.frame_nbytes
    return header, [_decode_row(views, frames, spec, i) for i in range(count)]


def _decode_row(views, frames, spec, i):
    def stack(name):
        pointers = views[name][i].tolist()
        assert all(-1 <= p < len(frames) for p in pointers)
        return b"".join(bytes(spec.frame_nbytes) if p == -1 else frames[p] for p in pointers)

    columns = [views[name][i].item() for name in ("action", "reward", "discount", "param_version")]
    return Transition(stack("obs_frames"), *columns, stack("next_obs_frames"), views["priority"][i].item())


def check_delivery(player, delivered):
    """Check that each environment's transitions came once, in order and complete, but for an unfinished
    batch.
    """
    v = player.envs.num_envs
    for row in range(v):
        mine, expected = [t for t in delivered if t.number % v == row], player.expected(row)
        wrong = next((i for i, (a, b) in enumerate(zip(mine, expected)) if a != b), None)
        assert wrong is None, f"environment {row}, transition {wrong}: {mine[wrong]} is not {expected[wrong]}"
        assert 0 <= len(expected) - len(mine) < player.config.actor.intake_batch
