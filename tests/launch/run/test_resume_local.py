"""Runs in one process that are resumed: to the last bit what they would have been."""

import json

import pytest

from apex import checkpoint
from apex.checkpoint import Part
from launch.cli.main import main

pytestmark = pytest.mark.usefixtures("as_before")

CHANGES = {
    "two replay ranks": {"replay__ranks": 2},
    "rank index": {"replay__index": "rank"},
    "RMSProp, batch normaliser": {"learner__optimizer": "rmsprop", "learner__is_normalizer": "batch"},
    "Acrobot": {"env__id": "Acrobot-v1"},
    "no rate limit": {"replay__samples_per_insert": 0.0},
}


class TestToTheLastBit:
    @pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
    def test_a_run_that_ended_and_was_resumed_is_the_run_that_went_on(self, runs, changes):
        whole = runs("whole", **changes)
        losses = whole.train(160)
        everything = whole.everything()
        cut = runs("cut", **changes)
        before, after = cut.train(77), cut.resume(160)
        assert list(before) == list(range(1, 78)) and list(after) == list(range(78, 161))
        assert before | after == losses
        assert cut.everything() == everything

    @pytest.mark.parametrize("killed_at, goes_on_after", [(31, 30), (59, 30), (60, 60), (61, 60), (119, 90)])
    def test_a_run_that_was_killed_and_resumed_is_the_run_that_went_on(self, runs, killed_at, goes_on_after):
        whole = runs("whole")
        losses = whole.train(130)
        everything = whole.everything()
        cut = runs("cut")
        cut.train(130, killed_at=killed_at)
        after = cut.resume(130)
        assert list(after) == list(range(goes_on_after + 1, 131))
        assert after == {step: losses[step] for step in after}
        assert cut.everything() == everything

    def test_a_run_resumed_again_and_again_is_the_run_that_went_on(self, runs):
        whole = runs("whole", run__seed=5)
        losses = whole.train(120)
        everything = whole.everything()
        cut = runs("cut", run__seed=5)
        parts = cut.train(25) | cut.resume(51)
        cut.resume(120, killed_at=95)
        assert parts | cut.losses | cut.resume(120) == losses
        assert cut.everything() == everything

    def test_how_often_checkpoints_are_taken_does_not_change_a_run(self, runs):
        seldom, often = (
            runs("seldom", learner__checkpoint_period=1000),
            runs("often", learner__checkpoint_period=7),
        )
        assert seldom.train(90) == often.train(90)

    def test_an_atari_game_goes_on_where_it_was(self, runs):
        changes = {
            "actor__count": 1,
            "actor__envs": 2,
            "replay__min_size": 60,
            "learner__checkpoint_period": 1000,
        }
        changes |= {
            "evaluator__episodes": 1,
            "env__max_episode_frames": 200,
            "env__frame_size": 42,
            "algorithm__network": "small_cnn",
        }
        losses = runs("whole", "pong-small", **changes).train(24)
        cut = runs("cut", "pong-small", **changes)
        assert cut.train(9) | cut.resume(24) == losses


class TestTheLog:
    def test_counters_never_run_backwards_and_lost_rows_are_kept_apart(self, runs):
        cut = runs("cut")
        cut.train(130, killed_at=119)
        before = cut.folder.rows()
        cut.resume(130)
        rows = cut.folder.rows()
        for name in (
            "wall_s",
            "learner_steps",
            "agent_steps",
            "env_frames",
            "episodes",
            "transitions",
            "param_version",
            "evaluations",
        ):
            values = [row[name] for row in rows]
            assert values == sorted(values), name
        aside = cut.folder.path / "metrics-lost.jsonl"
        lost = [json.loads(line) for line in aside.read_text().splitlines()] if aside.exists() else []
        assert [row for row in before if row not in rows] == lost
        assert all(row["learner_steps"] >= 90 for row in lost)
        assert cut.folder.result()["learner_steps"] == 130


class TestRefusals:
    @pytest.mark.parametrize(
        "change, named",
        [
            ("algorithm.hidden=32", "algorithm.hidden = 32"),
            ("algorithm.dueling=false", "algorithm.dueling"),
            ("algorithm.n_step=2", "algorithm.n_step"), ("env.id=Acrobot-v1", "env.id"),
            ("actor.intake_batch=20", "actor.intake_batch"),
            ("replay.alpha=0.5", "replay.alpha"), ("replay.index=rank", "replay.index"),
            ("learner.optimizer=rmsprop", "learner.optimizer"),
            ("replay.capacity=100", "replay.capacity = 100"),
        ],
    )  # fmt: skip
    def test_what_cannot_go_on_is_refused_with_the_field_and_nothing_is_changed(
        self, runs, capsys, change, named
    ):
        run = runs("run")
        run.train(40)
        before = {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert (
            main(
                [
                    "train",
                    "--resume",
                    str(run.folder.path),
                    "--set",
                    "run.max_learner_steps=80",
                    "--set",
                    change,
                ]
            )
            == 2
        )
        told = capsys.readouterr().err
        assert named in told and told.count("\n") == 1
        assert {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()} == before

    def test_a_run_that_has_reached_its_limit_is_refused(self, runs, capsys):
        run = runs("run")
        run.train(40)
        assert main(["train", "cartpole", "--resume", str(run.folder.path)]) == 2
        assert "run.max_learner_steps = 40 has been reached" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "limits, said",
        [
            ({"run__max_wall_s": 0.001}, "run.max_wall_s = 0.001 has been reached"),
            (
                {"run__stop_at_target": "true", "run__target_return": 1},
                "run.target_return = 1 has been reached",
            ),
        ],
        ids=["time", "target"],
    )
    def test_a_run_that_has_reached_its_time_or_target_is_refused_before_anything_is_changed(
        self, runs, capsys, limits, said
    ):
        run = runs("run", **limits)
        run.train(100_000)
        before = {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()}
        capsys.readouterr()
        assert main(["train", "--resume", str(run.folder.path)]) == 2
        told = capsys.readouterr().err
        assert said in told and "--set run." in told and told.count("\n") == 1
        assert {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()} == before
        if "run__target_return" in limits:
            way_out = ["--set", "run.target_return=1e9", "--set", "run.max_learner_steps=1"]
            assert main(["train", "--resume", str(run.folder.path), *way_out]) == 0

    def test_another_environments_preset_a_run_without_checkpoints_and_no_run_are_refused(
        self, runs, capsys, tmp_path
    ):
        run = runs("run")
        run.train(40)
        for arguments, why in (
            (["pong-small", "--resume", str(run.folder.path)], "trains CartPole-v1"),
            (["--resume", str(tmp_path / "none")], "no run"),
        ):
            assert main(["train", *arguments, "--set", "run.max_learner_steps=80"]) == 2
            assert why in capsys.readouterr().err
        for folder in run.folder.checkpoints.glob("step-*"):
            (folder / "manifest.json").unlink()
        assert main(["train", "--resume", str(run.folder.path), "--set", "run.max_learner_steps=80"]) == 2
        assert "there is no whole checkpoint" in capsys.readouterr().err


class TestChanges:
    @pytest.mark.parametrize(
        "change",
        ["replay.ranks=2", "replay.capacity=1000", "actor.count=3", "actor.count=1", "replay.index=numpy"],
    )
    def test_a_change_of_ranks_capacity_or_index_keeps_counts_and_contents(self, runs, change):
        run = runs("run")
        run.train(60)
        replay = run.roles[1].replay
        masses = sorted(mass for mass in replay.index.save() if mass)
        steps = sum(role.counters["agent_steps"] for role in run.roles if role.counters.role == "actor")
        saved = json.loads((run.folder.checkpoints / "step-000000060" / "replay-0.json").read_text())[
            "values"
        ]
        run.resume(61, "--set", change)
        now = [role.replay for role in run.roles if role.counters.role == "replay"]
        assert (
            sum(r.inserted for r in now) >= saved["replay"]["inserted"]
            and sum(r.sampled for r in now) > saved["replay"]["sampled"]
        )
        assert (
            sum(role.counters["agent_steps"] for role in run.roles if role.counters.role == "actor") >= steps
        )
        assert len(masses) - 60 <= sum(r.size for r in now) <= len(masses) + 60
        for r in now:
            r.check()

    def test_a_checkpoint_of_which_a_rank_s_part_is_not_seen_is_none_and_the_run_goes_on(
        self, runs, capsys, monkeypatch
    ):
        finish = Part.finish

        def lose(part, values):
            finish(part, values)
            if part.name == "replay-1" and "000000030" in part.folder.name:
                (part.folder / "replay-1.json").unlink()

        monkeypatch.setattr(Part, "finish", lose)
        monkeypatch.setattr(checkpoint, "PARTS_SEEN_S", 0.1)
        run = runs("run", replay__ranks=2)
        assert list(run.train(65)) == list(range(1, 66))
        assert (
            "apex: warning: no checkpoint step-000000030: its part replay-1 was written but is not seen in"
            in capsys.readouterr().err
        )
        assert sorted(path.name for path in run.folder.checkpoints.glob("*step-*")) == [
            "step-000000060",
            "step-000000065",
        ]
        assert list(run.resume(70)) == list(range(66, 71))

    def test_without_replay_in_its_checkpoints_a_run_goes_on_with_an_empty_one(self, runs):
        run = runs("run", replay__checkpoint="false")
        run.train(60)
        assert not list(run.folder.checkpoints.glob("step-*/*.bin"))
        inserted = run.roles[1].replay.inserted
        after = run.resume(90)
        assert list(after) == list(range(61, 91))
        assert run.roles[1].replay.inserted > inserted
        assert run.roles[1].replay.generation.min() > 0

    def test_a_run_whose_configuration_has_old_names_goes_on(self, runs, capsys):
        run = runs("old")
        run.train(30)
        path = run.folder.path / "config.toml"
        path.write_text(
            path.read_text().replace("heartbeat_timeout_s", "silence_s").replace("error_buffer", "error_band")
        )
        assert list(run.resume(40)) == list(range(31, 41))
        told = capsys.readouterr().err
        assert (
            "'run.silence_s' is now 'run.heartbeat_timeout_s'" in told
            and "'replay.error_band' is now" in told
        )
