"""The line, the live table and the learning curve."""

import io
import subprocess
from types import SimpleNamespace

import pytest

from apex import numbers, say
from apex.config import ConfigError, load
from apex.metrics import ROW_FIELDS, Hub
from apex.output_file import PICTURE, OutputFile
from apex.run_folder import RunFolder
from apex.topology import make
from launch.cli import plot
from launch.run import job, view
from launch.run.meeting import Meeting

ROW = dict.fromkeys(ROW_FIELDS) | {
    "wall_s": 12.34, "learner_steps": 4210, "learner_steps_per_s": 512.3, "agent_steps": 83_456,
    "env_frames": 83_456,
    "agent_steps_per_s": 5_120.0, "transitions_per_s": 4_900.0, "replay_size": 42_000, "replay_fill": 0.42,
    "samples_per_insert": 6.13, "staleness": 0.84, "learner_wait_pct": 3.2, "actor_wait_pct": 55.0,
    "loss": 0.0212,
    "train_return": 187.3, "eval_return": 412.0, "eval_episodes": 20, "evaluations": 4, "stale_updates": 7,
}  # fmt: skip


def console(terminal, width=130):
    from rich.console import Console

    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def render(row, width=130):
    screen = console(False, width)
    screen.print(view.table(row, "cartpole"))
    return screen.file.getvalue()


def test_a_line_says_all_that_matters_in_its_documented_form():
    assert view.line(ROW) == (
        "  12.3s  learner 4210 (512/s)  agent 83K (5.1K/s)  replay 42% ratio 6.1  staleness 0.8  wait 3%"
        "  loss 0.021  train 187.3  eval 412.0"
    )


@pytest.mark.parametrize("row", [{}, dict.fromkeys(ROW_FIELDS)])
def test_a_line_shows_a_dash_for_every_unknown_value(row):
    assert view.line(row) == (
        "     -s  learner - (-)  agent - (-)  replay - ratio -  staleness -  wait -  loss -  train -  eval -"
    )


def test_the_first_row_of_a_hub_is_a_line_and_a_table():
    row = Hub(1, 1).row()
    assert "learner 0" in view.line(row) and "replay 0% ratio 0.0" in view.line(row)
    assert "0 steps" in render(row)


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (9_999, "9999"),
        (10_000, "10K"),
        (83_456, "83K"),
        (999_400, "999K"),
        (999_600, "1.0M"),
        (12.3e6, "12M"),
        (1.234e9, "1.2G"),
        (5e13, "50000G"),
    ],
)
def test_counts_are_short(value, text):
    assert numbers.count(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0.0/s"), (0.34, "0.3/s"), (9.96, "10/s"), (512.3, "512/s"), (999.7, "1.0K/s"), (5120, "5.1K/s")],
)
def test_rates_are_short(value, text):
    assert numbers.rate(value) == text


def test_the_table_has_a_line_for_each_role():
    text = render(ROW)
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert list(lines) == ["learner", "actors", "replay", "evaluator"]
    for role, parts in {
        "learner": ("4210 steps", "512/s", "3%", "loss 0.021"),
        "actors": ("83K steps", "5.1K/s", "55%", "train return 187.3"),
        "replay": (
            "42K transitions",
            "4.9K/s",
            "42% full",
            "replay ratio 6.1",
            "staleness 0.8",
            "stale updates 7",
        ),
        "evaluator": ("4 evaluations", "eval return 412.0", "episodes 20"),
    }.items():
        assert [part for part in parts if part not in lines[role]] == []
    assert "cartpole" in text and "12.3 s" in text


def test_the_table_fits_a_narrow_terminal():
    assert max(map(len, render(ROW, width=60).splitlines())) <= 60


class Run:
    """A run that appends one row each time it is asked whether it is alive, then ends."""

    def __init__(self, path, rows):
        self.folder, self.left = RunFolder(path), list(rows)

    def is_alive(self):
        if self.left:
            self.folder.append_row(self.left.pop(0))
            return True
        self.folder.append_row(ROW | {"learner_steps": 7777})  # written between the last look and the end
        return False


def test_follow_prints_each_row_as_a_line_where_there_is_no_terminal(tmp_path):
    rows = [ROW | {"learner_steps": n} for n in (1, 2)]
    screen = console(False, width=40)
    view.follow(tmp_path, Run(tmp_path, rows).is_alive, "title", screen, period_s=0.001)
    expected = [view.line(row) for row in (*rows, ROW | {"learner_steps": 7777})]
    assert screen.file.getvalue().splitlines() == expected


def test_follow_shows_a_live_table_on_a_terminal_up_to_the_last_row(tmp_path):
    screen = console(True)
    view.follow(tmp_path, Run(tmp_path, [ROW]).is_alive, "cartpole", screen, period_s=0.001)
    text = screen.file.getvalue()
    assert "cartpole" in text and "4210 steps" in text
    assert text.rindex("7777 steps") > text.rindex("4210 steps")


def test_codes_in_what_is_told_do_not_move_the_cursor_of_the_live_table(tmp_path):
    screen = console(True)

    def is_alive():
        say.say("\x1b[3Aup \x1b[2Jgone\rback\x07")
        return False

    view.follow(tmp_path, is_alive, "cartpole", screen)
    shown = screen.file.getvalue()
    assert "up gone" in shown or "back" in shown
    assert "\x1b[3A" not in shown and "\x1b[2J" not in shown and "\x07" not in shown


def test_the_table_below_what_is_told_is_drawn_as_before(tmp_path):
    screen, captions = console(True), []

    def is_alive():
        captions.append(screen.file.getvalue().rpartition("\n")[2])
        if len(captions) == 1:
            say.say("a rank speaks")
        return len(captions) < 2

    view.follow(tmp_path, is_alive, "cartpole", screen, period_s=0.001)
    assert captions[0].strip() == "- s" and captions[1] == captions[0]


def test_the_live_table_shows_the_newest_of_several_rows(tmp_path):
    for steps in (1111, 2222, 3333):
        RunFolder(tmp_path).append_row(ROW | {"learner_steps": steps})
    screen = console(True)
    view.follow(tmp_path, lambda: False, "cartpole", screen)
    assert "3333 steps" in screen.file.getvalue() and "1111 steps" not in screen.file.getvalue()


def test_follow_ends_when_a_run_dies_before_its_first_row(tmp_path):
    screen = console(True)
    view.follow(tmp_path, lambda: False, "cartpole", screen)
    assert "cartpole" in screen.file.getvalue()


def test_a_run_whose_folder_the_disk_does_not_give_goes_on(tmp_path):
    for name in ("metrics.jsonl", "error.txt"):
        (tmp_path / name).symlink_to("/proc/self/mem")  # whose first byte cannot be read: EIO
    folder, config, looks = RunFolder(tmp_path), load("cartpole"), []
    with pytest.raises(ConfigError, match="cannot be read"):
        folder.error()
    with subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, start_new_session=True
    ) as process:  # ends with the block
        meeting = Meeting(tmp_path, make(config), 600.0, 600.0)
        running = job._Job(process, folder, config, meeting, SimpleNamespace(first=None, is_forced=False))
        view.follow(
            tmp_path,
            lambda: looks.append(running.is_running()) or len(looks) < 2,
            "title",
            console(False),
            0.0,
        )
    assert looks == [True, True]


def write_run(path, frames_per_step=1, config=""):
    folder = RunFolder(path)
    path.mkdir()
    if config:
        folder.write_config(config)
    for n in range(1, 7):
        steps = 100 * n
        changes = {"agent_steps": steps, "env_frames": frames_per_step * steps, "wall_s": 300.0 * n}
        changes |= {"train_return": None if n == 3 else 10.0 * n}
        changes |= {"eval_return": 20.0 * (n // 2) or None, "evaluations": n // 2}
        folder.append_row(ROW | changes)
    return path


def curves(panel):
    return [list(zip(*line.get_data())) for line in panel.get_lines()]


def test_curves_hold_finished_episodes_and_one_point_for_each_evaluation(tmp_path):
    left, right = plot._figure([write_run(tmp_path / "a")]).axes
    train, greedy = curves(left)
    assert train == [(5, 10), (10, 20), (20, 40), (25, 50), (30, 60)]
    assert greedy == [(10, 20), (20, 40), (30, 60)]
    assert curves(right)[1] == [(200, 20), (400, 40), (600, 60)]
    assert (left.get_xlabel(), right.get_xlabel()) == ("wall time (min)", "agent steps")


def test_runs_that_skip_frames_are_drawn_over_env_frames(tmp_path):
    right = plot._figure([write_run(tmp_path / "a", frames_per_step=4)]).axes[1]
    assert right.get_xlabel() == "env frames" and curves(right)[1][0] == (800, 20)


def test_several_runs_share_the_axes_and_are_named_in_the_legend(tmp_path):
    config = "[run]\nstop_at_target = true\ntarget_return = 55.0\n"
    runs = [write_run(tmp_path / name, config=config) for name in ("seed0", "seed1")]
    figure = plot._figure(runs)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["seed0", "seed1", "training episodes", "greedy evaluation", "target return"]
    lines = figure.axes[0].get_lines()
    assert len(lines) == 5 and lines[0].get_color() != lines[2].get_color()
    assert list(lines[-1].get_ydata()) == [55.0, 55.0]  # one line for a target that both share


def test_a_target_that_ends_nothing_is_not_drawn(tmp_path):
    config = "[run]\nstop_at_target = false\ntarget_return = 55.0\n"
    figure = plot._figure([write_run(tmp_path / "a", config=config)])
    assert len(figure.axes[0].get_lines()) == 2


def test_the_curve_is_a_png_even_in_a_new_folder(tmp_path):
    path = tmp_path / "new" / "curve.png"
    plot.learning_curve([write_run(tmp_path / "a")], OutputFile("--out", path, PICTURE))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_runs_without_a_row_are_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no rows in .*empty"):
        plot.learning_curve([tmp_path / "empty"], OutputFile("--out", tmp_path / "out.png", PICTURE))
