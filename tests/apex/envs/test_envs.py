"""VectorEnv in every autoreset mode by known answers; real CartPole and Atari; refusals by name."""

import gymnasium
import numpy as np
import pytest
from counting_env import FLAVOURS, SPEC, CountingEnv, counting_envs, wrapped
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from apex.config import ConfigError, EnvConfig
from apex.envs import VectorEnv, env_spec, families, make_envs
from apex.schema import EnvSpec

CARTPOLE = EnvConfig(family="gymnasium", id="CartPole-v1")
GO_ON = np.zeros(1, np.int64)


def atari(rom, **options):
    return EnvConfig(family="atari", id=rom, **{"frame_size": 42, **options})


def place(obs):
    """The (episode, t) of row 0 of a counting environment."""
    return tuple(int(x) for x in obs[0, 0, 1:])


# (place of obs, place of last_obs, terminated, truncated, valid, first), episodes of 2 and 1 steps
NEXT_STEP = [
    ((0, 1), (0, 1), False, False, True, False),
    ((0, 2), (0, 2), True, False, True, False),
    ((1, 0), (1, 0), False, False, False, True),
    ((1, 1), (1, 1), False, True, True, False),
    ((2, 0), (2, 0), False, False, False, True),
]
SAME_STEP = [
    ((0, 1), (0, 1), False, False, True, False),
    ((1, 0), (0, 2), True, False, True, True),
    ((2, 0), (1, 1), False, True, True, True),
    ((2, 1), (2, 1), False, False, True, False),
    ((3, 0), (2, 2), True, False, True, True),
]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_each_autoreset_mode_gives_the_timesteps_of_the_contract(flavour):
    envs = counting_envs(flavour, lengths=(2, 1), ends=("terminated", "truncated"))
    assert place(envs.reset()) == (0, 0)
    seen = [envs.step(GO_ON) for _ in range(5)]
    flags = [[bool(f[0]) for f in (t.terminated, t.truncated, t.valid, t.first)] for t in seen]
    rows = [(place(t.obs), place(t.last_obs), *f) for t, f in zip(seen, flags, strict=True)]
    assert rows == (NEXT_STEP if flavour.startswith("next") else SAME_STEP)
    assert all((t.obs is t.last_obs) == np.array_equal(t.obs, t.last_obs) for t in seen)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_rows_that_go_on_are_untouched_by_the_end_of_another(flavour):
    envs = counting_envs(flavour, 2, lengths=(2, 5))
    envs.reset()
    envs.step(np.zeros(2, int))
    t = envs.step(np.zeros(2, int))
    assert t.terminated.tolist() == [True, False]
    assert t.obs[1, 0].tolist() == t.last_obs[1, 0].tolist() == [1, 0, 2]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_arrays_handed_out_are_never_written_to_again(flavour):
    envs = counting_envs(flavour, 2, lengths=(2, 3))
    kept = [(envs.reset(),)]
    kept += [envs.step(np.zeros(2, int)) for _ in range(12)]
    again = counting_envs(flavour, 2, lengths=(2, 3))
    fresh = [[again.reset().tolist()]]
    fresh += [[a.tolist() for a in again.step(np.zeros(2, int))] for _ in range(12)]
    assert [[a.tolist() for a in arrays] for arrays in kept] == fresh


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_termination_wins_where_both_flags_are_set(flavour):
    envs = counting_envs(flavour, lengths=(1,), ends=("both",))
    envs.reset()
    t = envs.step(GO_ON)
    assert t.terminated.tolist() == [True] and t.truncated.tolist() == [False]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_reset_in_the_middle_of_an_episode_starts_again_with_a_valid_step(flavour):
    envs = counting_envs(flavour, lengths=(1,))
    envs.reset()
    envs.step(GO_ON)
    assert place(envs.reset()) == (0, 0)
    assert envs.step(GO_ON).valid.tolist() == [True]


class Unsaid(gymnasium.vector.VectorEnv):
    num_envs = 1

    def __init__(self, metadata=None):
        if metadata is not None:
            self.metadata = metadata


@pytest.mark.parametrize("metadata", [None, {}, {"autoreset_mode": "Sometimes"}])
def test_an_environment_that_does_not_say_its_autoreset_mode_is_refused(metadata):
    with pytest.raises(ConfigError, match="Unsaid does not say its autoreset mode"):
        VectorEnv(Unsaid(metadata), SPEC, 0)


def test_a_mode_written_into_the_dictionary_all_environments_share_is_not_believed(monkeypatch):
    monkeypatch.setitem(gymnasium.vector.VectorEnv.metadata, "autoreset_mode", AutoresetMode.NEXT_STEP)
    with pytest.raises(ConfigError, match="does not say"):
        VectorEnv(Unsaid(), SPEC, 0)


def test_atari_does_not_write_its_mode_into_the_dictionary_all_environments_share():
    make_envs(atari("pong"), 1, 0).close()
    assert "autoreset_mode" not in gymnasium.vector.VectorEnv.metadata


def test_an_end_without_its_final_observation_is_an_error():
    class Forgetful(SyncVectorEnv):
        def step(self, actions):
            return (*super().step(actions)[:4], {})

    envs = VectorEnv(
        Forgetful([lambda: CountingEnv(lengths=(1,))], autoreset_mode=AutoresetMode.SAME_STEP), SPEC, 0
    )
    envs.reset()
    with pytest.raises(RuntimeError, match="final_obs"):
        envs.step(GO_ON)


def test_the_families_are_the_modules_of_the_folder():
    assert {"atari", "gymnasium"} <= set(families()) and "vector" not in families()


# --- CartPole ---------------------------------------------------------------------------------


def balance(obs):
    """Actions int64[V] of a hand-written policy that keeps the pole up for good."""
    x, velocity, angle, turning = obs[:, 0].T
    return (3 * angle + turning + 0.1 * x + 0.2 * velocity > 0).astype(np.int64)


def test_cartpole_looks_like_one_unstacked_frame_of_four_numbers():
    assert env_spec(CARTPOLE) == EnvSpec((4,), "float32", 1, 2, 1)
    assert make_envs(CARTPOLE, 5, 0).reset().shape == (5, 1, 4)


def test_first_observations_differ_over_rows_and_over_seeds_and_repeat():
    for evaluation in (False, True):
        first = [make_envs(CARTPOLE, 16, seed, evaluation=evaluation).reset() for seed in (0, 0, 16)]
        assert np.array_equal(first[0], first[1])
        assert len(np.unique(np.concatenate([first[0], first[2]]), axis=0)) == 32


@pytest.mark.parametrize("evaluation", [False, True])
def test_cartpole_is_truncated_after_500_steps_and_not_terminated(evaluation):
    envs = make_envs(CARTPOLE, 2, 3, evaluation=evaluation)
    obs, total = envs.reset(), np.zeros(2)
    for step in range(1, 501):
        t = envs.step(balance(obs))
        obs, total = t.obs, total + t.reward
        assert t.truncated.tolist() == [step == 500] * 2 and not t.terminated.any()
    assert total.tolist() == [500, 500]


def test_cartpole_steps_the_same_in_training_and_in_evaluation():
    training, evaluation = (make_envs(CARTPOLE, 1, 3, evaluation=e) for e in (False, True))
    training.reset()
    start = evaluation.reset()
    training._env.state[:] = start[0].T  # the two draw first states differently
    for action in np.random.default_rng(0).integers(2, size=30):
        a, b = training.step(np.array([action])), evaluation.step(np.array([action]))
        assert np.allclose(a.last_obs, b.last_obs, atol=1e-5)
        assert a.reward == b.reward and a.terminated == b.terminated
        if a.terminated:
            break
    assert a.terminated


# --- other Gymnasium environments ---------------------------------------------------------------


class Shaped(gymnasium.Env):
    def __init__(self, observation_space, action_space, render_mode):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(self.observation_space.shape, self.observation_space.dtype), {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


@pytest.fixture
def registered():
    def register(observation_space, action_space):
        gymnasium.register(
            "Shaped-v0", lambda render_mode=None: Shaped(observation_space, action_space, render_mode)
        )
        return EnvConfig(family="gymnasium", id="Shaped-v0")

    yield register
    gymnasium.registry.pop("Shaped-v0", None)


@pytest.mark.parametrize(
    "given, dtype",
    [
        (np.uint8, "uint8"),
        (np.bool_, "bool"),
        (np.float64, "float32"),
        (np.float32, "float32"),
        (np.int32, "float32"),
    ],
)
def test_observations_stay_uint8_or_bool_or_are_cast_to_float32(registered, given, dtype):
    env = registered(Box(0, 1, (3, 2, 5), given), Discrete(3))
    spec, envs = env_spec(env), make_envs(env, 2, 0)
    assert spec == EnvSpec((3, 2, 5), dtype, 1, 3, 1)
    for obs in (envs.reset(), envs.step(np.zeros(2, int)).obs):
        assert obs.dtype == dtype and obs.shape == (2, 1, 3, 2, 5) and (obs == 1).all()


def test_actions_that_do_not_start_at_zero_are_refused(registered):
    env = registered(Box(0, 1, (3,)), Discrete(3, start=1))
    assert "'Shaped-v0' has actions" in refusal(env)


# --- Atari --------------------------------------------------------------------------------------


def test_atari_looks_as_configured():
    env = atari("pong", frame_size=50, stack=3, frame_skip=2)
    assert env_spec(env) == EnvSpec((50, 50), "uint8", 3, 6, 2)
    assert make_envs(env, 2, 0).reset().shape == (2, 3, 50, 50)


def test_the_end_of_an_atari_episode_is_what_next_step_mode_shows():
    """SAME_STEP's final and reset observations against the terminal and reset rows of NEXT_STEP."""
    from ale_py import AtariVectorEnv

    options = {
        "stack_num": 2,
        "img_height": 42,
        "img_width": 42,
        "num_threads": 1,
        "reward_clipping": False,
        "noop_max": 32,
    }
    same = make_envs(atari("breakout", stack=2, clip_rewards=False), 1, 5)
    other = AtariVectorEnv("breakout", 1, autoreset_mode="NextStep", **options)
    other.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    del gymnasium.vector.VectorEnv.metadata["autoreset_mode"]
    step = VectorEnv(other, same.spec, 5)
    assert np.array_equal(same.reset(), step.reset())
    ends = 0
    for action in np.random.default_rng(1).integers(4, size=(700, 1)):
        a, b = same.step(action), step.step(action)
        assert (
            np.array_equal(a.last_obs, b.last_obs) and a.reward == b.reward and a.terminated == b.terminated
        )
        if a.terminated:
            ends += 1
            b = step.step(action)
            assert not b.valid[0] and b.reward[0] == 0
        assert np.array_equal(a.obs, b.obs) and np.array_equal(a.first, b.first)
    assert ends >= 3


def rewards(env, **options):
    envs = make_envs(env, 1, 0, **options)
    envs.reset()
    actions = np.random.default_rng(0).integers(envs.spec.num_actions, size=(300, 1))
    return np.array([envs.step(a).reward for a in actions])


def test_training_rewards_are_clipped_and_evaluation_rewards_are_not():
    env = atari("space_invaders")
    clipped, full = rewards(env), rewards(env, evaluation=True)
    assert full.max() >= 5
    assert set(np.unique(clipped)) == {0, 1} and np.array_equal(np.sign(full), clipped)
    assert np.array_equal(full, rewards(atari("space_invaders", clip_rewards=False)))


def test_a_lost_life_ends_training_episodes_if_asked_and_evaluation_episodes_never():
    def ends(evaluation, **options):
        envs = make_envs(atari("breakout", **options), 1, 1, evaluation=evaluation)
        envs.reset()
        actions = np.random.default_rng(0).integers(4, size=(300, 1))
        return sum(bool(envs.step(a).terminated[0]) for a in actions)

    assert ends(False, episodic_life=True) >= 4 * ends(True, episodic_life=True) > 0
    assert ends(True, episodic_life=True) == ends(False)


def test_sticky_actions_change_the_game_as_configured():
    def last(sticky):
        envs = make_envs(atari("pong", sticky_actions=sticky), 1, 0)
        envs.reset()
        return [envs.step(np.array([a])).obs for a in [2, 3] * 40][-1]

    assert np.array_equal(last(0.0), last(0.0)) and not np.array_equal(last(0.0), last(0.25))


def test_seeds_beyond_31_bits_are_usable_and_reproducible():
    first = [make_envs(atari("breakout"), 2, 2**40 + 2**31 - 1).reset() for _ in range(2)]
    assert np.array_equal(*first)


def test_the_screen_of_an_atari_game_is_the_game_that_is_played_in_colour_and_at_full_size():
    # Blocks of 21 x 16 pixels of the 210 x 160 screen make a frame of 10 x 10.
    envs = make_envs(
        atari("space_invaders", frame_size=10, sticky_actions=0.25), 1, 4, evaluation=True, render=True
    )
    envs.reset()
    for action in np.random.default_rng(0).integers(6, size=(100, 1)):
        newest = envs.step(action).obs[0, -1]
        picture = envs.render()
        assert picture.shape == (210, 160, 3)
        grey = picture @ np.array([0.299, 0.587, 0.114])
        assert np.abs(grey.reshape(10, 21, 10, 16).mean((1, 3)) - newest).max() < 1
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 3


@pytest.mark.parametrize("skip, steps", [(1, 100), (2, 50), (3, 34)])
def test_an_atari_step_is_frame_skip_frames_and_the_cap_counts_frames_after_the_no_ops(skip, steps):
    envs = make_envs(atari("pong", frame_skip=skip, max_episode_frames=100), 1, 0)
    envs.reset()
    assert [bool(envs.step(GO_ON).truncated[0]) for _ in range(steps)] == [False] * (steps - 1) + [True]


def test_the_playable_roms_are_those_that_ale_registers():
    from apex.envs.atari import rom_names

    registered = {s.kwargs["game"] for s in gymnasium.registry.values() if s.namespace == "ALE"}
    assert set(rom_names()) == registered


# --- refusals -----------------------------------------------------------------------------------


def refusal(env):
    """Return the one line with which both entry points refuse ``env``."""
    with pytest.raises(ConfigError) as first:
        make_envs(env, 1, 0)
    with pytest.raises(ConfigError) as second:
        env_spec(env)
    assert str(first.value) == str(second.value)
    assert "\n" not in str(first.value) and len(str(first.value)) < 200
    return str(first.value)


@pytest.mark.parametrize(
    "family, name, expected",
    [
        ("atary", "pong", "did you mean 'atari'?"),
        ("vector", "pong", "env.family = 'vector' is unknown"),
        ("gymnasium", "CartPol-v1", "did you mean 'CartPole-v1'?"),
        ("gymnasium", "cartpole-v1", "did you mean 'CartPole-v1'?"),
        ("gymnasium", "CartPole-v9", "did you mean 'CartPole-v1'?"),
        ("gymnasium", "???", "a valid one is 'CartPole-v1'"),
        ("gymnasium", "no_such_module:Game-v0", "No module named 'no_such_module'"),
        ("gymnasium", "Pendulum-v1", "only Discrete(n)"),
        ("gymnasium", "FrozenLake-v1", "only Box"),
        ("gymnasium", "Blackjack-v1", "only Box"),
        ("gymnasium", "ALE/Pong-v5", "use env.family = 'atari' with env.id = 'pong'"),
        ("gymnasium", "PongNoFrameskip-v4", "use env.family = 'atari' with env.id = 'pong'"),
        ("gymnasium", "Pong-v4", "use env.family = 'atari' with env.id = 'pong'"),
        ("gymnasium", "ALE/MsPacman-v5", "use env.family = 'atari' with env.id = 'ms_pacman'"),
        ("gymnasium", "ALE/TicTacToe3D-v5", "use env.family = 'atari' with env.id = 'tic_tac_toe_3d'"),
        ("gymnasium", "pong", "use env.family = 'atari' with env.id = 'pong'"),
        ("atari", "pnog", "did you mean 'pong'?"),
        ("atari", "ALE/Pong-v5", "write env.id = 'pong'"),
        ("atari", "MsPacman", "write env.id = 'ms_pacman'"),
        ("atari", "combat", "two players only"),
        ("atari", "../../pong", "not an Atari ROM name"),
    ],
)
def test_what_cannot_be_made_is_refused_with_one_line_and_the_nearest_choice(family, name, expected):
    message = refusal(EnvConfig(family=family, id=name))
    assert expected in message and name in (message if family in families() else name)


def test_an_environment_that_cannot_draw_itself_is_refused_when_asked_to(registered):
    env = registered(Box(0, 1, (3,)), Discrete(2))
    with pytest.raises(ConfigError, match="cannot draw itself"):
        make_envs(env, 1, 0, render=True)


def test_a_wrapped_environment_renders_only_if_made_to():
    with pytest.raises(RuntimeError, match="render=True"):
        wrapped("next_step", [CountingEnv]).render()
