"""The files that commands are asked to write: one rule for all, refused before any work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from apex import output_file
from apex.output_file import JSON, PICTURE, OutputFile
from apex.run_folder import RunFolder, create
from launch.cli.main import main

ROW = {
    "wall_s": 1.0, "env_frames": 10, "agent_steps": 10, "train_return": 1.0, "eval_return": 2.0,
    "evaluations": 1, "learner_steps": 1,
}  # fmt: skip
# Every option that names a file to write, in a command that would otherwise start working, and a suffix that
# it takes.
OPTIONS = [
    (["plot", "{run}", "--out"], ".png"), (["play", "{run}", "--gif"], ".gif"),
    (["doctor", "--json"], ".json"),
    (["bench", "index", "--json"], ".json"), (["bench", "index", "--png"], ".png"),
    (["bench", "system", "--json"], ".json"),
    (["bench", "rates", "--json"], ".json"), (["compare", "--json"], ".json"), (["compare", "--png"], ".svg"),
    (["compare", "--report"], ".md"),
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """A run with one row in its log."""
    folder = RunFolder(create(tmp_path / "runs", "cartpole", 0))
    folder.append_row(ROW)
    folder.append_row(ROW | {"wall_s": 2.0})
    return folder.path


def refused(capsys, words, path, run) -> str:
    """Return the one line of a refusal."""
    assert main([word.format(run=run) for word in words] + [str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    return told.err


@pytest.mark.parametrize("words, suffix", OPTIONS, ids=[" ".join(words) for words, _ in OPTIONS])
class TestEveryOption:
    def test_another_suffix_is_refused_and_those_that_it_takes_are_named(
        self, run, capsys, tmp_path, words, suffix
    ):
        said = refused(capsys, words, tmp_path / "new" / "file.exe", run)
        assert f"{words[-1]} {tmp_path}/new/file.exe: the name must end in " in said and suffix in said
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("place", ["/proc/none/file", "/dev/null/file"])
    def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(
        self, run, capsys, words, suffix, place
    ):
        assert f"{words[-1]} {place}{suffix} cannot be written: " in refused(
            capsys, words, place + suffix, run
        )

    def test_a_folder_of_that_name_is_refused(self, run, capsys, tmp_path, words, suffix):
        (tmp_path / f"folder{suffix}").mkdir()
        assert "is a folder or a device" in refused(capsys, words, tmp_path / f"folder{suffix}", run)


@pytest.mark.parametrize(
    "suffix, start", [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml"), (".PDF", b"%PDF")]
)
def test_the_suffix_says_what_a_plot_is_written_as(run, tmp_path, suffix, start):
    out = tmp_path / "a new" / f"curve{suffix}"
    assert main(["plot", str(run), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(start) and os.listdir(out.parent) == [out.name]


def test_a_file_that_was_there_is_said_to_be_replaced(run, tmp_path, capsys):
    out = tmp_path / "curve.svg"
    said = []
    for _ in range(2):
        assert main(["plot", str(run), "--out", str(out)]) == 0
        said.append(capsys.readouterr().out)
    assert said == [f"apex: {out}: written\n", f"apex: {out}: replaced\n"]


def test_a_run_that_is_named_twice_is_drawn_once(run, tmp_path):
    out = tmp_path / "curve.svg"
    assert main(["plot", *map(str, sorted((tmp_path / "runs").glob("*"))), str(run), "--out", str(out)]) == 0
    assert out.read_text().count(f"<!-- {run.name} -->") == 1


def test_an_old_file_stays_where_the_new_one_cannot_be_finished(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("old")
    out = OutputFile("--json", path, JSON)
    with pytest.raises(
        output_file.ConfigError, match=r"--json .*rows.json cannot be written: No space left on device"
    ):
        out.write(lambda aside: Path("/dev/full").write_text("x"))
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["rows.json"]


def test_a_link_stays_one_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    OutputFile("--json", tmp_path / "link.json", JSON).write_text("new")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "real.json").read_text() == "new"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user_s_folder_is_refused_before_any_work(run, tmp_path):
    # Imported here: the other user may not read it.
    imports = "import os, sys, launch.cli.doctor; from launch.cli.main import main"
    program = (
        f"{imports}; os.setuid(65534); sys.exit(main(['doctor', '--json', {str(tmp_path / 'x.json')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "x.json cannot be written: Permission denied" in done.stderr


def test_asking_leaves_nothing_behind(tmp_path):
    OutputFile("--out", tmp_path / "x.png", PICTURE)
    assert os.listdir(tmp_path) == []
