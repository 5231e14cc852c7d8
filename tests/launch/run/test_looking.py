"""Looking that fails: another user's files, and a disk that does not answer, are neither missing nor the end
of a run.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from resumed_runs import Runs
from users import NOBODY, as_root, names_below

from apex import run_lock
from apex import topology as topologies
from apex.config import load
from apex.run_folder import RunFolder
from launch.cli.main import main
from launch.run import job, resume
from launch.run.meeting import Meeting

pytestmark = pytest.mark.usefixtures("as_before")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Return a run in a folder that another user can reach and owns, after each command has worked once in
    it.
    """
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        runs = Runs(tmp_path_factory.mktemp("run"), "cartpole", patch)
        runs.train(30)
        run = Path(folder) / "run"
        shutil.copytree(runs.folder.path, run, symlinks=True)
        for path in (Path(folder), run, *run.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        for name in ("eval", "plot"):
            assert (
                main([*COMMANDS[name], str(run), *(["--out", str(run / "x.png")] if name == "plot" else [])])
                == 0
            )
        (run / "x.png").unlink()
        # The other user may not be able to import what is not imported yet.
        resume.newest(run / "checkpoints", load(str(run / "config.toml")))
        yield run


COMMANDS = {
    "train": ["train", "--set", "run.max_learner_steps=40", "--resume"], "eval": ["eval", "--episodes", "1"],
    "plot": ["plot"],
}  # fmt: skip
NEEDS = {
    "train": [
        "config.toml",
        "metrics.jsonl",
        ".",
        "checkpoints",
        "checkpoints/best.pt",
        "checkpoints/step-000000030/learner.pt",
    ],
    "eval": ["config.toml", ".", "checkpoints", "checkpoints/best.pt"],
    "plot": ["config.toml", "metrics.jsonl", "."],
}


@as_root
@pytest.mark.parametrize(
    "command, part", [(command, part) for command, parts in NEEDS.items() for part in parts]
)
def test_what_is_closed_to_the_user_of_a_command_is_named_in_one_line_and_not_called_missing(
    theirs, command, part
):
    path = Path(os.path.normpath(theirs / part))
    more = ["--out", str(theirs / "x.png")] if command == "plot" and part != "." else []
    more = more or (["--out", str(theirs.parent / "x.png")] if command == "plot" else [])
    before, mode = names_below(theirs), path.stat().st_mode
    os.chown(path, 0, 0), path.chmod(0)
    try:
        status, told = as_other_user([*COMMANDS[command], str(theirs), *more])
    finally:
        os.chown(path, NOBODY, NOBODY), path.chmod(mode & 0o7777)
    (theirs / run_lock.NAME).write_bytes(dict(before).get(run_lock.NAME) or b"")  # it tells who has held it
    assert status == 2 and told.count("\n") == 1, told
    assert "Permission denied" in told and str(path) in told, told
    assert names_below(theirs) == before


def as_other_user(arguments):
    """Return how a command ends in a child that is another user, and what it says on stderr."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
            os.dup2(writer, 2)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            status = main(arguments)
        except BaseException as error:
            os.write(writer, f"traceback: {error!r}\n".encode())
        sys.stderr.flush()
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


@pytest.fixture
def failing_disk(monkeypatch):
    """Return ``failing_disk(path, times)``: so many looks at a path fail with EIO."""
    stat = os.stat

    def fail(path, times):
        left = [times]

        def failing(asked, *args, **options):
            if str(asked) == str(path) and left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return stat(asked, *args, **options)

        monkeypatch.setattr(os, "stat", failing)

    return fail


@pytest.mark.parametrize("name", ["error.txt", ".starting", ".starting/begun", ".starting/3"])
def test_a_disk_that_does_not_answer_the_launcher_ends_no_run(tmp_path, failing_disk, name):
    config, folder = load("cartpole"), RunFolder(tmp_path)
    meeting = Meeting(tmp_path, topologies.make(config, None), 60.0, 60.0)
    meeting.open()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        held = job._Job(process, folder, config, meeting, job.Asked())
        failing_disk(tmp_path / name, 3)
        assert all(held.is_running() for _ in range(5))
        process.stdin.close()
    meeting.close()


def test_roles_are_taken_to_have_begun_once_the_run_folder_is_removed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    meeting = Meeting(folder, topologies.make(load("cartpole"), None), 60.0, 60.0)
    meeting.open()
    assert not meeting.has_begun()
    shutil.rmtree(folder)
    assert meeting.has_begun(), "a signal would end the run as if there were nothing to save"
