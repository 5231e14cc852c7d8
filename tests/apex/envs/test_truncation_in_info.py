"""A truncation that only ``info`` tells, as before Gym 0.26, is a truncation: the discount is kept."""

import gymnasium
import numpy as np
import pytest
from counting_env import FLAVOURS, SPEC, CountingEnv, wrapped
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from apex.config import EnvConfig
from apex.envs import VectorEnv, make_envs

GO_ON = np.zeros(1, np.int64)


class LegacyEnd(CountingEnv):
    """Ends every episode as environments made for Gym before 0.26 do: cut ones only say so in ``info``."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated or truncated, False, {"TimeLimit.truncated": truncated}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_truncation_told_in_info_is_a_truncation_in_each_autoreset_mode(flavour):
    runs = []
    for kind in (CountingEnv, LegacyEnd):
        envs = wrapped(flavour, [lambda kind=kind: kind(lengths=(2, 1), ends=("terminated", "truncated"))])
        runs.append([envs.reset(), *(array for _ in range(5) for array in envs.step(GO_ON))])
    assert all(np.array_equal(plain, legacy) for plain, legacy in zip(*runs, strict=True))


class DictionaryARow(SyncVectorEnv):
    """Gives infos as vector environments made for Gym before 0.24 did: one dictionary a row."""

    def step(self, actions):
        *rest, info = super().step(actions)
        told = info.get("TimeLimit.truncated", np.zeros(self.num_envs, bool))
        return (*rest, [{"TimeLimit.truncated": cut} if cut else {} for cut in told])


class FinalDictionaryARow(SyncVectorEnv):
    """Gives the infos of last steps as Gymnasium before 1.0 did: an object array of dictionaries, or None."""

    def step(self, actions):
        *rest, info = super().step(actions)
        if "final_info" in info:
            cut = info["final_info"]["TimeLimit.truncated"]
            rows = [
                {"TimeLimit.truncated": c} if ended else None
                for c, ended in zip(cut, info["_final_info"], strict=True)
            ]
            info["final_info"] = np.array(rows, object)
        return (*rest, info)


@pytest.mark.parametrize(
    "kind, mode", [(DictionaryARow, AutoresetMode.NEXT_STEP), (FinalDictionaryARow, AutoresetMode.SAME_STEP)]
)
def test_a_truncation_told_in_a_dictionary_a_row_is_one_of_that_row_alone(kind, mode):
    ends = [("truncated",), ("terminated",), ("truncated",)]
    envs = VectorEnv(
        kind([lambda e=e: LegacyEnd(lengths=(2,), ends=e) for e in ends], autoreset_mode=mode), SPEC, 0
    )
    envs.reset()
    envs.step(np.zeros(3, np.int64))
    last = envs.step(np.zeros(3, np.int64))
    assert last.truncated.tolist() == [True, False, True] and last.terminated.tolist() == [False, True, False]


class Unended(CountingEnv):
    """Tells its cut in info and neither flag, and goes on."""

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, False, {"TimeLimit.truncated": True} if truncated else {}


def test_a_row_cut_in_info_alone_is_reset_where_that_can_be_done_and_refused_elsewhere():
    envs = wrapped("disabled", [lambda: Unended(lengths=(1,), ends=("truncated",))])
    envs.reset()
    step = envs.step(GO_ON)
    assert step.truncated[0] and step.first[0] and step.obs[0, 0].tolist() == [0, 1, 0]
    envs = wrapped("same_step", [lambda: Unended(lengths=(1,), ends=("truncated",))])
    envs.reset()
    with pytest.raises(ValueError, match="a row that has not ended"):
        envs.step(GO_ON)


@pytest.mark.parametrize("kind", [LegacyEnd, Unended])
@pytest.mark.parametrize("evaluation", [False, True])
def test_an_id_whose_environments_tell_cuts_in_info_is_truncated_in_both_forms(kind, evaluation):
    gymnasium.register(
        "Legacy-v0",
        lambda render_mode=None: kind(lengths=(3,), ends=("truncated",)),
        disable_env_checker=True,
    )
    envs = make_envs(EnvConfig(id="Legacy-v0"), 2, 0, evaluation=evaluation)
    envs.reset()
    seen = [envs.step(np.zeros(2, np.int64)) for _ in range(3)]
    assert [t.truncated.all() for t in seen] == [False, False, True] and not any(
        t.terminated.any() for t in seen
    )
    del gymnasium.registry["Legacy-v0"]
