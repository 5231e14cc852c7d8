"""Environments whose code fails in every way that code can: ``env.id=nasty_envs:NAME-v0``."""

import os
import sys

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Plain(gymnasium.Env):
    """Episodes of four steps; everything as it should be."""

    observation_space = Box(-1, 1, (3,), np.float32)
    action_space = Discrete(2)

    def __init__(self, render_mode=None):
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observation(), {}

    def step(self, action):
        self.t += 1
        return self.observation(), 1.0, self.t == 4, False, {}

    def observation(self):
        return np.full(self.observation_space.shape, 0.5, self.observation_space.dtype)


class Panic(BaseException):
    """As the panics of extension modules written in Rust."""


class Unspeakable(Exception):
    """An error whose text cannot be made."""

    def __str__(self):
        raise RuntimeError("no text")


class Constructor(Plain):
    error: BaseException = RuntimeError()

    def __init__(self, render_mode=None):
        raise self.error


class Reset(Plain):
    error: BaseException = RuntimeError()

    def reset(self, **options):
        raise self.error


class Step(Plain):
    error: BaseException = RuntimeError()

    def step(self, action):
        raise self.error


class Spaceless(Plain):
    observation_space = None


class WrongShape(Plain):
    def observation(self):
        return np.zeros((2, 2), np.float32)


class NotFinite(Plain):
    def observation(self):
        return np.full(3, np.nan, np.float32)


class NaNReward(Plain):
    def step(self, action):
        return (*super().step(action)[:1], np.nan, False, False, {})


class FourValues(Plain):
    def step(self, action):
        return self.observation(), 1.0, False, {}


class OnlyObservation(Plain):
    def reset(self, **options):
        return self.observation()


class Empty(Plain):
    observation_space = Box(-1, 1, (0,), np.float32)


class EmptyPicture(Plain):
    observation_space = Box(0, 255, (84, 0), np.uint8)


class Many(SyncVectorEnv):
    """A vector environment of its own."""

    def __init__(self, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, single=Plain, **options):
        super().__init__([single] * num_envs, autoreset_mode=autoreset_mode)


class Modeless(Many):
    """It does not say its autoreset mode."""

    def __init__(self, num_envs, **options):
        super().__init__(num_envs)
        self.metadata = {}


class OneTooMany(Many):
    """It makes one environment more than it was asked for, but for a single one."""

    def __init__(self, num_envs, **options):
        super().__init__(num_envs if num_envs == 1 else num_envs + 1)


class Forgetful(Many):
    """It ends episodes without their last observations."""

    def step(self, actions):
        return (*super().step(actions)[:4], {})


class FlagsInAColumn(Many):
    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        return obs, reward, terminated[:, None], truncated, info


class OtherWhenMany(Many):
    """Its observations have another shape than those of the single environment."""

    def __init__(self, num_envs, **options):
        super().__init__(num_envs, single=WrongShapeAndSpace)


class WrongShapeAndSpace(Plain):
    observation_space = Box(-1, 1, (5,), np.float32)


def register(name, **entry):
    """Register ``NAME-v0`` and return the id by which a run finds it."""
    gymnasium.register(f"{name}-v0", disable_env_checker=True, **entry)
    return f"nasty_envs:{name}-v0"


ERRORS = {
    "Attribute": AttributeError("'NoneType' object has no attribute 'rom'"),
    "File": FileNotFoundError(2, "No such file or directory", "levels.dat"),
    "Key": KeyError("level"),
    "Os": OSError("no display"),
    "Assertion": AssertionError(),
    "Lines": ValueError("one\ntwo\n  three"),
    "Long": RuntimeError("x" * 5000),
    "Exit": SystemExit(3),
    "Panic": Panic("index out of bounds"),
    "Unspeakable": Unspeakable(),
}
"""What constructors, resets and steps raise, each from each: ids ``ConstructorAttribute-v0`` …"""

for place in (Constructor, Reset, Step):
    for key, error in ERRORS.items():
        kind = type(f"{place.__name__}{key}", (place,), {"error": error})
        register(kind.__name__, entry_point=kind)

REFUSED = {
    "Spaceless": (Spaceless, None, ""),
    "WrongShape": (WrongShape, None, ""),
    "NotFinite": (NotFinite, None, "an observation is not finite"),
    "NaNReward": (NaNReward, None, "finite numbers"),
    "FourValues": (FourValues, None, "ValueError: not enough values to unpack"),
    "OnlyObservation": (OnlyObservation, None, ""),
    "Empty": (Empty, None, "has observations of shape [0], without any element"),
    "EmptyPicture": (EmptyPicture, None, "has observations of shape [84, 0], without any element"),
    "OnlyMany": (None, Many, "exists only as a vector environment"),
    "Modeless": (Plain, Modeless, "Modeless does not say its autoreset mode"),
    "OneTooMany": (Plain, OneTooMany, "in training, expected"),
    "Forgetful": (Plain, Forgetful, "final_obs"),
    "FlagsInAColumn": (Plain, FlagsInAColumn, "in training"),
    "OtherWhenMany": (Plain, OtherWhenMany, "in evaluation, expected"),
    "Missing": ("nasty_envs:NoSuchClass", None, "AttributeError"),
    "MissingModule": ("no_such_module:NoSuchClass", None, "ModuleNotFoundError"),
}
"""Other environments that cannot be trained with: single and vector entry point, part of the refusal."""

for key, (single, many, _) in REFUSED.items():
    register(key, entry_point=single, vector_entry_point=many)
register("Plain", entry_point=Plain)
register("PlainMany", entry_point=Plain, vector_entry_point=Many)

if os.environ.get("NASTY_ENVS_EXIT"):
    sys.exit("this module ends whoever imports it")
