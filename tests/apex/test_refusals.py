"""Odd input is refused in one line, before anything starts; a disk that is full hides no cause."""

import errno
import subprocess
import sys

import pytest
from places import ROOT

from apex import config as configuration
from apex.config import ConfigError
from apex.run_folder import RunFolder, resolve
from launch.cli.main import _parser, main
from launch.run import rank, world


def refused(capsys, *words: str) -> str:
    """Return the one line with which the command refuses its arguments."""
    assert main(list(words)) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and len(told.err) < 500, told
    return told.err


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"[run]\ntarget_return = 1" + b"0" * 400,
        b"[run]\nseed = 1" + b"0" * 5000,
        b"a=" + b"[" * 20_000,
        b'[run]\ndirectory = "a\\u0000b"',
        b"\xff\xfe",
        b"run = 3",
    ],
    ids=["no float holds it", "too many digits", "too deep", "NUL in a path", "not UTF-8", "no section"],
)
def test_a_preset_file_with_odd_content_is_refused(tmp_path, content):
    path = tmp_path / "odd.toml"
    path.write_bytes(content)
    refusal(configuration.load, str(path))


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + ".toml", "a\0b"], ids=["long", "long path", "NUL"])
def test_a_name_that_no_file_can_have_is_refused(name):
    assert ("there is no file" if name.endswith(".toml") else "unknown preset") in refusal(
        configuration.load, name
    )
    assert "no run" in refusal(resolve, name[:60] if "\0" not in name else name)


@pytest.mark.parametrize(
    "setting",
    ["algorithm.hidden=9999999", "evaluator.episodes=9999999", "env.stack=999", "run.seed=1" + "0" * 30],
)
def test_a_number_that_no_machine_can_hold_is_refused(setting):
    assert "is too large; the most is" in refusal(configuration.load, "cartpole", [setting])


def test_text_that_is_not_unicode_is_refused():
    assert "holds characters" in refusal(configuration.load, "cartpole", ["run.directory=\udcff"])


@pytest.mark.parametrize("values", [("x", "4"), ("5", "4"), ("-1", "4"), ("0", "")])
def test_variables_that_name_no_rank_are_refused_and_told(monkeypatch, capsys, values):
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", values[0])
    monkeypatch.setenv("PMI_SIZE", values[1])
    assert "are no rank of a world" in refusal(world.from_environment)
    assert main(["train", "cartpole"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_interrupt_before_a_run_has_started_ends_in_one_line(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("apex.config.load", interrupted)
    assert main(["train", "cartpole"]) == 130
    assert capsys.readouterr().err == "apex: interrupted\n"


def test_a_full_disk_leaves_no_temporary_and_does_not_hide_the_cause(monkeypatch, tmp_path):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    folder = RunFolder(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        folder.write_result({})
    assert not rank.leave_error(folder, "Traceback")
    assert list(tmp_path.iterdir()) == []


# --- the command line -------------------------------------------------------------------------------

COMMANDS = [
    (["train", "cartpole"], "ranks"), (["eval", "latest"], "episodes"), (["play", "latest"], "frames"),
    (["plot"], "out"),
    (["bench", "index"], "leaves"), (["bench", "system"], "actors"), (["bench", "rates"], "seconds"),
    (["compare"], "actors"),
    (["submit", "cartpole"], "nodes"), (["doctor"], "ranks"),
]  # fmt: skip


@pytest.mark.parametrize("command, option", COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
@pytest.mark.parametrize("form", ["apart", "in one", "first"])
def test_an_abbreviation_is_refused_and_the_option_in_full_is_named(command, option, form):
    short = f"--{option[:-1]}"
    words = {
        "apart": [*command, short, "4"],
        "in one": [*command, f"{short}=4"],
        "first": [*command[:1], short, "4", *command[1:]],
    }[form]
    if command[0] == "bench" and form == "first":
        words = [*command, short, "4", "--json", "x.json"]
    assert f"unknown option '{short}'; did you mean '--{option}'?" in refusal(_parser().parse_args, words)


def test_no_parser_of_ours_takes_abbreviations():
    sources = [
        path for path in (ROOT / "launch").rglob("*.py") if "argparse.ArgumentParser(" in path.read_text()
    ]
    assert [path.name for path in sources if "allow_abbrev=False" not in path.read_text()] == []


def test_spawn_refuses_an_abbreviation_in_one_line_and_passes_on_what_follows_the_dashes():
    spawn = [sys.executable, "-m", "launch.run.spawn", "-n", "1"]
    done = subprocess.run(
        [*spawn, "--endpoin", "tcp", "--", "true"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 2
        and "did you mean '--endpoint'" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
    done = subprocess.run(
        [*spawn, "--", "echo", "--endpoin"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "--endpoin\n")


@pytest.mark.parametrize(
    "words", [["train", "cartpole", "pong"], ["eval", "a", "b"], ["doctor", "pong", "pong"]]
)
def test_an_argument_too_many_is_named(capsys, words):
    assert f"unexpected argument '{words[-1]}'" in refused(capsys, *words)


@pytest.mark.parametrize("name", ["missing.toml", "configs/missing", "/nowhere/missing.toml"])
def test_a_preset_file_that_is_not_there_is_said_to_be_missing(capsys, name):
    for words in (["train", name], ["submit", name, "--dry-run"], ["doctor", name]):
        assert f"there is no file '{name}'" in refused(capsys, *words)


@pytest.mark.parametrize(
    "words, start",
    [
        (["train", "cartpole", "--seed", "-1"], "--seed -1 is too small; the least is 0"),
        (["train", "cartpole", "--seed", "x"], "--seed 'x' must be a whole number"),
        (
            ["train", "cartpole", "--transport", "mpii"],
            "--transport 'mpii' is not a choice; did you mean 'mpi'",
        ),
        (["train", "cartpole", "--tolerate", "x"], "--tolerate 'x' is not a choice"),
        (
            ["train", "cartpole", "--tolerate", "actors", "--transport", "local"],
            "--tolerate 'actors' needs a process for each",
        ),
        (["train", "--resume", "no-such-run"], "--resume no-such-run: "),
        (["submit", "cartpole", "--seed", "-1"], "--seed -1 is too small"),
        (["submit", "cartpole", "--transport", "local"], "--transport 'local' cannot run on many nodes"),
        (["doctor", "cartpole", "--transport", "local"], "--transport 'local' has no ranks to check"),
        (["bench", "system", "--preset", "cartpole", "--actors", "999999"], "--actors 999999 is too large"),
        (["bench", "rates", "--seconds", "nan"], "argument --seconds: 'nan' must be a number above 0"),
        (["bench", "system", "--seconds", "-5"], "argument --seconds: '-5' must be a number above 0"),
        (["train", "cartpole", "--set", "run.seed=-1"], "--set: run.seed = -1 is too small"),
        (["eval", "no-such-run", "--seed", "-1"], "argument --seed: '-1' must be"),
    ],
)
def test_a_refusal_names_the_option_that_was_typed(capsys, words, start):
    assert refused(capsys, *words).startswith(f"apex: {start}")


def test_a_refusal_of_what_a_preset_file_says_names_the_file_whatever_was_typed(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[run]\nseed = -1\n")
    assert f"preset '{path}': run.seed = -1 is too small" in refused(
        capsys, "train", str(path), "--seed", "3"
    )
