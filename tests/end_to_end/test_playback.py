"""`apex eval`, `apex play` and `apex plot` on a real, short run."""

import re

import pytest
from PIL import Image, ImageSequence

from launch.cli.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short CartPole run in one process, and its folder."""
    directory = tmp_path_factory.mktemp("runs")
    short = [
        "run.max_learner_steps=60",
        "evaluator.period=10",
        "evaluator.episodes=3",
        f"run.directory={directory}",
    ]
    arguments = [
        "train",
        "cartpole",
        "--transport",
        "local",
        *(word for value in short for word in ("--set", value)),
    ]
    assert main(arguments) == 0
    return directory / "latest"


def test_eval_plays_full_episodes_on_the_same_seeds_each_time(run, capsys):
    printed = []
    for _ in range(2):
        assert main(["eval", str(run), "--episodes", "5"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    mean = float(
        re.search(r"greedy return ([\d.]+) .* over 5 episodes, seeds 1000003 to 1000007", printed[0])[1]
    )
    assert 5 <= mean <= 500


def test_eval_of_the_best_weights_gives_the_return_that_was_logged(run, capsys):
    from apex import checkpoint

    best = checkpoint.load(run / "checkpoints" / "best.pt")
    assert main(["eval", str(run), "--checkpoint", "best"]) == 0
    assert f"greedy return {best['eval_return']:.1f} " in capsys.readouterr().out


def test_play_writes_a_gif_that_shows_every_step_for_forty_milliseconds(run, tmp_path, capsys):
    gif = tmp_path / "episode.gif"
    assert main(["play", str(run), "--gif", str(gif), "--frames", "9"]) == 0
    with Image.open(gif) as image:
        assert (image.format, image.size) == ("GIF", (600, 400))
        shown_ms = sum(frame.info["duration"] for frame in ImageSequence.Iterator(image))
    assert shown_ms == 9 * 40  # equal neighbours are stored as one longer frame
    assert "9 frames" in capsys.readouterr().out


def test_plot_draws_a_picture(run, tmp_path):
    picture = tmp_path / "curve.png"
    assert main(["plot", str(run), "--out", str(picture)]) == 0
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width > 800


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["eval", "no-such-run"], "no run 'no-such-run'"),
        (["eval", "{run}", "--episodes", "0"], "whole number, from 1"),
        (["eval", "{run}", "--checkpoint", "newest"], "invalid choice: 'newest'"),
        (["play", "{run}", "--gif", "film.mp4"], "must end in .gif"),
        (["play", "{run}", "--gif", "/proc/none/film.gif"], "--gif /proc/none/film.gif cannot be written"),
        (["eval", "{run}", "--checkpoint", "best", "--seed", "-1"], "--seed: '-1' must be"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "arguments are required: command"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(run, capsys, arguments, complaint):
    assert main([word.format(run=run) for word in arguments]) == 2
    complaints = capsys.readouterr().err.splitlines()
    assert len(complaints) == 1 and complaint in complaints[0], complaints


def test_a_damaged_checkpoint_is_refused_by_name(run, tmp_path, capsys):
    copy = tmp_path / "damaged"
    (copy / "checkpoints").mkdir(parents=True)
    (copy / "config.toml").write_text((run / "config.toml").read_text())
    whole = (run / "checkpoints" / "best.pt").read_bytes()
    (copy / "checkpoints" / "best.pt").write_bytes(whole[: len(whole) // 2])
    assert main(["eval", str(copy)]) == 2
    assert "best.pt cannot be read" in capsys.readouterr().err
