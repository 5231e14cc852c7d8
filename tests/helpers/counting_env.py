"""An environment whose every observation says where it is from, in real Gymnasium vector environments."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from apex.envs import VectorEnv
from apex.schema import EnvSpec

SPEC = EnvSpec((3,), "float32", 1, 2)


def reward_of(row, episode, t):
    """The reward of the step made from ``(row, episode, t)``: no two are equal, and their sums are exact."""
    return float(1 + t + 32 * episode + 4096 * row)


class CountingEnv(gymnasium.Env):
    """Observation t of episode e is [row, e, t]; episode e takes ``lengths[e % len(lengths)]`` steps.

    ``ends[e % len(ends)]`` says how: "terminated", "truncated" or "both". Rewards can be given.
    """

    observation_space = Box(0, np.inf, (3,), np.float32)
    action_space = Discrete(2)

    def __init__(self, row=0, lengths=(3,), ends=("terminated",), rewards=None):
        self.row, self.lengths, self.ends, self.rewards = row, lengths, ends, rewards
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode = 0 if seed is not None else self.episode + 1
        self.t = 0
        return self.observation(), {}

    def step(self, action):
        reward = self.rewards[self.t] if self.rewards else reward_of(self.row, self.episode, self.t)
        self.t += 1
        over = self.t == self.lengths[self.episode % len(self.lengths)]
        end = self.ends[self.episode % len(self.ends)] if over else "no"
        return self.observation(), reward, end in ("terminated", "both"), end in ("truncated", "both"), {}

    def observation(self):
        return np.array([self.row, self.episode, self.t], np.float32)


class FinalObsInOneArray(SyncVectorEnv):
    """Gives the final observations as AtariVectorEnv does: one array without a mask, junk elsewhere."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        if "final_obs" in info:
            mask = info.pop("_final_obs")
            final = np.full_like(obs, 1e9)
            final[mask] = np.stack(list(info["final_obs"][mask]))
            info["final_obs"] = final
        return obs, reward, terminated, truncated, info


# How an episode's end can reach us: the three modes, the second form of final_obs, reused arrays.
FLAVOURS = {
    "next_step": lambda fns: SyncVectorEnv(fns, autoreset_mode=AutoresetMode.NEXT_STEP),
    "same_step": lambda fns: SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP),
    "disabled": lambda fns: SyncVectorEnv(fns, autoreset_mode=AutoresetMode.DISABLED),
    "same_step_one_array": lambda fns: FinalObsInOneArray(fns, autoreset_mode=AutoresetMode.SAME_STEP),
    "next_step_reused": lambda fns: SyncVectorEnv(fns, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP),
    "same_step_reused": lambda fns: SyncVectorEnv(fns, copy=False, autoreset_mode=AutoresetMode.SAME_STEP),
    "disabled_reused": lambda fns: SyncVectorEnv(fns, copy=False, autoreset_mode=AutoresetMode.DISABLED),
}


def wrapped(flavour, env_fns):
    """Return the environments in one of the ``FLAVOURS``, seen through a ``VectorEnv``."""
    return VectorEnv(FLAVOURS[flavour](env_fns), SPEC, seed=0)


def counting_envs(flavour, num_envs=1, **options):
    """Return ``num_envs`` counting environments, row i with row number i and lengths rotated by i."""
    lengths = options.pop("lengths", (3,))

    def make(row):
        return lambda: CountingEnv(
            row, lengths[row % len(lengths) :] + lengths[: row % len(lengths)], **options
        )

    return wrapped(flavour, [make(row) for row in range(num_envs)])
