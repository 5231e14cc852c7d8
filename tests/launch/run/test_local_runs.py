"""Whole runs of real CartPole in one process.

Repeatable, apart from each other, ended and limited as configured.
"""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from local_runs import STEPS, TINY, Run

from apex import checkpoint, seeds, weights
from apex.config import load
from apex.run_folder import RunFolder
from apex.schema import aligned_bytes, weight_header, weight_layout
from apex.transport.learner_endpoint import LearnerEndpoint
from launch.cli import main as command
from learner.learner import Learner
from replay_rank.service import ReplayService

pytestmark = pytest.mark.usefixtures("as_before")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run that several tests look at."""
    return Run(tmp_path_factory.mktemp("runs"), "replay.samples_per_insert=2").start()


# --- repeatable -------------------------------------------------------------------------------------


def test_two_runs_with_one_seed_are_the_same_to_the_last_bit_and_another_seed_is_another_run(tmp_path):
    one, same, other = (Run(tmp_path, f"run.seed={seed}").start() for seed in (3, 3, 4))
    assert len(one.losses) == STEPS and one.losses == same.losses
    assert one.everything() == same.everything()
    assert not set(one.losses) & set(other.losses)


@pytest.mark.parametrize("change", ["replay.index=numpy", "run.log_period_s=5"])
def test_a_run_does_not_depend_on_which_index_draws_or_how_often_it_logs(tmp_path, finished, change):
    assert Run(tmp_path, "replay.samples_per_insert=2", change).start().everything() == finished.everything()


# --- seeds ----------------------------------------------------------------------------------------


class Beginnings:
    """A ``make_envs`` that keeps each vector's seeds and first observations, and what the actors explore
    with.
    """

    def __init__(self, real):
        self.real, self.seeds, self.observations, self.explorations = real, [], [], []

    def __call__(self, env, num_envs, seed, **options):
        made = self.real(env, num_envs, seed, **options)
        self.seeds += range(seed, seed + num_envs)
        self.observations += [row.tobytes() for row in made.reset()]
        return made


def beginnings(config, monkeypatch):
    """Return what all actors of a run begin with."""
    from actors import actor
    from apex.envs import env_spec, make_envs

    kept, spec = Beginnings(make_envs), env_spec(config.env)
    monkeypatch.setattr(actor, "make_envs", kept)
    for index in range(config.actor.count):
        made = actor.Actor(
            config,
            spec,
            SimpleNamespace(intake_memory=aligned_bytes, handover=None),
            index,
            config.actor.count,
        )
        kept.explorations.append(made.rng.random())
        made.close()
    return kept


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1"])
def test_no_two_environments_of_a_run_start_alike_and_another_run_starts_otherwise(name, monkeypatch):
    settings = [*TINY, f"env.id={name}", "actor.count=4", "actor.envs=3"]
    one, same, other = (
        beginnings(load("cartpole", [*settings, f"run.seed={seed}"]), monkeypatch) for seed in (0, 0, 1)
    )
    assert len(set(one.seeds)) == 12 and (one.seeds, one.observations) == (same.seeds, same.observations)
    assert not set(one.seeds) & set(other.seeds)
    assert len({*one.observations, *other.observations}) == 24
    assert one.explorations == same.explorations and len({*one.explorations, *other.explorations}) == 8


def test_the_environments_of_360_actors_and_of_neighbouring_runs_have_seeds_of_their_own():
    taken = [
        seeds.environment_seed(run, actor * 16) + row
        for run in range(5)
        for actor in range(360)
        for row in range(16)
    ]
    assert len(set(taken)) == 5 * 360 * 16 and all(0 <= seed < 2**31 for seed in taken)


def test_every_random_stream_of_a_run_differs_and_repeats():
    names = [
        (run, stream, index)
        for run in range(3)
        for stream in ("learner", "replay", "actor")
        for index in range(20)
    ]
    for draw in (lambda *name: seeds.generator(*name).integers(2**62), seeds.integer):
        drawn = [draw(*name) for name in names]
        assert len(set(drawn)) == len(names) and drawn == [draw(*name) for name in names]


# --- ends -----------------------------------------------------------------------------------------


def test_a_run_ends_by_its_step_budget_and_says_so(finished):
    result = finished.folder.result()
    assert (result["reason"], result["status"], result["learner_steps"]) == ("learner_steps", 0, STEPS)
    assert len(finished.losses) == STEPS and np.isfinite(finished.losses).all()
    assert (result["transport"], result["ranks"], result["seed"]) == ("local", 5, 0)


def test_the_last_checkpoint_is_the_network_as_it_ended(finished):
    state = checkpoint.load(finished.folder.checkpoints / "latest.pt")
    assert state["learner_steps"] == STEPS
    for name, tensor in finished.learner.train.online.state_dict().items():
        assert torch.equal(state["online"][name], tensor)


def test_the_last_row_of_the_log_counts_all_that_happened(finished):
    row = finished.folder.rows()[-1]
    made = sum(actor.counters["transitions"] for actor in finished.actors)
    assert row["learner_steps"] == STEPS and row["transitions"] == made
    assert row["agent_steps"] == sum(actor.counters["agent_steps"] for actor in finished.actors) >= made
    assert json.loads(finished.folder.metrics_path.read_text().splitlines()[-1]) == row


def test_everything_an_actor_sent_is_in_replay_at_the_end(finished):
    sent = sum(actor.counters["transitions"] for actor in finished.actors)
    assert sum(role.replay.inserted for role in finished.replays) == sent > 0
    assert all(role.finished for role in finished.roles)
    for role in finished.replays:
        role.replay.check()


def test_evaluation_happened_and_the_best_weights_were_kept(finished):
    result = finished.folder.result()
    assert result["eval_return"] > 0 and result["eval_episodes"] == 2
    best = checkpoint.load(finished.folder.checkpoints / "best.pt")
    assert best["learner_steps"] <= STEPS and set(best["online"]) == set(
        finished.learner.train.online.state_dict()
    )


def test_a_run_ends_at_its_target_return(tmp_path):
    run = Run(
        tmp_path, "run.max_learner_steps=100000", "run.target_return=5", "run.stop_at_target=true"
    ).start()
    result = run.folder.result()
    assert result["reason"] == "target_return" and result["eval_return"] >= 5 and len(run.losses) < 1000


# --- limits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio, ranks", [(0.5, 1), (2, 2), (16, 1)])
def test_the_replay_ratio_stays_in_the_limiters_band_for_the_whole_run(tmp_path, monkeypatch, ratio, ranks):
    owed = []

    def work(self, real=ReplayService.work):
        done, limit = real(self), self.limiter
        if limit.sampled:
            owed.append(
                ((limit.ratio * limit.inserted - limit.sampled), limit.low, limit.high + limit.ratio * 10)
            )
        return done

    monkeypatch.setattr(ReplayService, "work", work)
    run = Run(
        tmp_path, f"replay.samples_per_insert={ratio}", f"replay.ranks={ranks}", "replay.error_buffer=1"
    ).start()
    assert len(owed) > 50 and all(low <= d <= high for d, low, high in owed)
    assert all(role.replay.sampled > 0 and role.replay.inserted > 0 for role in run.replays)
    drawn, inserted = (
        sum(getattr(role.replay, name) for role in run.replays) for name in ("sampled", "inserted")
    )
    assert drawn >= STEPS * 16
    slack = 2 * ratio * 100 + ranks * 10 * ratio * (
        1 + 2 * run.config.actor.in_flight
    )  # the band, and what was still on its way
    assert abs(ratio * inserted - drawn) <= slack


def test_transitions_carry_versions_the_learner_has_published(finished):
    versions, replay = set(), finished.replays[0].replay
    for place, count in enumerate(replay.count):
        versions |= set(replay.store.views["param_version"][place, :count].tolist())
    assert len(versions) > 1 and min(versions) >= 1
    assert max(versions) <= finished.learner.counters["param_version"]


@pytest.mark.parametrize("transport", ["local", "zmq"])
def test_a_publish_is_the_network_of_its_version_and_step_and_somebody_waits_for_it(
    tmp_path, monkeypatch, transport
):
    publishes, real = [], Learner._publish_if_requested

    def publish_if_wanted(learner, steps):
        before, waits = learner.counters["param_version"], learner.port.wants_weights(steps)
        real(learner, steps)
        if learner.counters["param_version"] > before:
            newest = LearnerEndpoint.state_dict(learner.port)["weights"]["newest"]
            network = learner.train.online
            vector = np.zeros(weights.size(network), np.float32)
            weights.flatten(network, vector)
            same = weight_layout(len(vector)).views(newest)["vector"].tobytes() == vector.tobytes()
            publishes.append(
                (weight_header(newest) == (before + 1, steps), waits or transport == "local", same, steps)
            )

    monkeypatch.setattr(Learner, "_publish_if_requested", publish_if_wanted)
    Run(tmp_path, f"run.transport={transport}", "learner.checkpoint_period=100000").start()
    assert all(part is True for publish in publishes for part in publish[:3])
    steps = [steps for *_, steps in publishes]
    assert steps[0] == 0 and len(steps) > 2
    assert all(later // 10 > earlier // 10 for earlier, later in itertools.pairwise(steps)), (
        "learner.publish_period is 10"
    )
    assert transport == "zmq" or steps == list(range(0, STEPS, 10))


# --- the command ------------------------------------------------------------------------------------


def arguments(folder, *more):
    overrides = [*TINY, f"run.directory={folder}", "run.max_learner_steps=10"]
    return [
        "train",
        "cartpole",
        "--transport",
        "local",
        *itertools.chain.from_iterable(("--set", o) for o in overrides),
        *more,
    ]


def test_the_command_trains_and_sums_up(tmp_path, capfd):
    assert command.main(arguments(tmp_path, "--seed", "7")) == 0
    lines = capfd.readouterr().out.splitlines()
    assert (
        "5 ranks over local" in lines[0]
        and "ended by learner_steps" in lines[-1]
        and "10 learner steps" in lines[-1]
    )
    folder = RunFolder(tmp_path / "latest")
    assert folder.result()["seed"] == 7 and load(str(folder.config_path)).run.seed == 7


@pytest.mark.parametrize(
    "more, expected",
    [
        (["--set", "run.sed=1"], "did you mean 'seed'?"),
        (["--ranks", "3"], "3 ranks are too few"),
        (["--set", "env.id=CartPol-v1"], "did you mean 'CartPole-v1'?"),
        (["--set", "replay.capacity=100000000000"], "the largest that fits is"),
        (["--sed", "1"], "--sed"),
    ],
)
def test_the_command_refuses_in_one_line_with_status_two_and_leaves_no_run(tmp_path, capfd, more, expected):
    assert command.main(arguments(tmp_path / "runs", *more)) == 2
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and err.startswith("apex: ") and expected in err and not out
    assert not (tmp_path / "runs").exists()


# --- the last row -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_last_row_of_the_log_holds_what_was_on_its_way_when_the_run_ended(tmp_path, ranks):
    run = Run(tmp_path, f"replay.ranks={ranks}", "replay.capacity=5000").start()
    row, result = run.folder.rows()[-1], run.folder.result()
    assert row["replay_size"] == sum(r.replay.size for r in run.replays)
    assert row["transitions"] == sum(a.counters["transitions"] for a in run.actors) == row["replay_size"]
    assert row["stale_updates"] == sum(r.replay.stale_updates for r in run.replays)
    for name in ("agent_steps", "env_frames", "episodes"):
        assert row[name] == sum(a.counters[name] for a in run.actors)
    assert row["learner_steps"] == run.learner.train.learner_steps
    assert {name: result[name] for name in ("learner_steps", "agent_steps", "env_frames")} == {
        name: row[name] for name in ("learner_steps", "agent_steps", "env_frames")
    }
