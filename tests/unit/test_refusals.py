"""Odd input is refused in one line, before anything starts; a disk that is full hides no cause."""

import errno

import pytest

from apex import config as configuration
from apex.config import ConfigError
from apex.run_folder import RunFolder, resolve
from launch import rank, world
from launch.main import main


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
    assert "unknown preset" in refusal(configuration.load, name)
    assert "no run" in refusal(resolve, name[:60] if "\0" not in name else name)


@pytest.mark.parametrize("setting", ["algorithm.hidden=9999999", "evaluator.episodes=9999999", "env.stack=999", "run.seed=1" + "0" * 30])
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
    assert "name no rank of a world" in refusal(world.from_environment)
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
