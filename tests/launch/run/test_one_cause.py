"""Copies with one cause: a damaged segment costs its own places; what cannot be looked at is not missing.

One job a folder.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import segment_keeper
from hypothesis import example, given, settings
from hypothesis import strategies as st
from segment_keeper import BATCH, Keeper, everything
from small_checkpoints import verify, write
from users import NOBODY, as_root, names_below

from apex import checkpoint, look, run_lock
from apex.config import ConfigError, load, to_toml
from apex.look import Unreadable
from apex.metrics import ROW_FIELDS
from apex.run_folder import RunFolder
from launch.cli.main import main
from launch.cli.plot import _figure
from launch.run import resume

pytestmark = pytest.mark.usefixtures("as_before")


def flip(path):
    """Change one byte in place, for all that hold a link to the file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def drop(replay, places):
    """Take places out of a replay as an eviction does, one by one: what is to be left, to the last bit."""
    for place in places:
        count = int(replay.count[place])
        replay.index.set_range(place * replay.batch, np.zeros(count))
        replay.size -= count
        replay.count[place] = 0
        replay.generation[place] += 1


@pytest.mark.parametrize("index", ["wide", "wide32", "numpy", "rank"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_segment_costs_its_own_places_to_the_last_bit(tmp_path, index, which):
    keeper = Keeper(tmp_path, 30, index)
    for batches in (4, 3, 2):
        for _ in range(batches):
            keeper.replay.put([1.0, 2.0, 3.0][: 1 + batches % BATCH])
        folder = keeper.save()
    values = json.loads((folder / "replay-0.json").read_text())["values"]
    with np.load(folder / "replay-0.npz") as arrays:
        places = np.flatnonzero(arrays["segment"] == sorted(map(int, values["segments"]))[which])
    expected = keeper.reload(3)[0]
    drop(expected, places)
    name = values["segments"][sorted(values["segments"], key=int)[which]][0]
    (folder / name).rename(folder / f"damaged-{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_keeper, "verify", lambda folder: None)
        found, segments = keeper.reload(3)
    assert everything(found) == everything(expected) and len(places) > 0
    assert name not in {file[0] for file in segments.located.files.values()}


def test_keys_of_lost_places_are_stale_and_never_given_out_again(tmp_path):
    keeper = Keeper(tmp_path, 9)
    keeper.replay.put([1.0, 2.0, 3.0])
    out, _ = keeper.replay.draw(8)
    folder = keeper.save()
    next(folder.glob("*.bin")).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_keeper, "verify", lambda folder: None)
        found, _ = keeper.reload(1)
    assert found.size == 0 and found.update_priorities(out["key"], np.ones(8, np.float32)) == 8
    assert (found.generation * found.slots).max() > out["key"].max()


def losses_told(text):
    """Return how many transitions a run says are lost, and of how many."""
    words = text.split(" replay transitions are lost")[0].split()
    return int(words[-3]), int(words[-1])


@pytest.mark.parametrize("files", ["one", "all"])
def test_one_byte_in_a_shared_segment_costs_its_transitions_and_no_checkpoint(runs, capsys, files):
    run = runs("a")
    run.train(90)
    folder = checkpoint.complete(run.folder.checkpoints)[0]
    segments = sorted(folder.glob("*.bin"), key=lambda path: path.stat().st_nlink)
    for path in segments if files == "all" else segments[-1:]:
        flip(path)
    capsys.readouterr()
    assert max(run.resume(120)) == 120
    told = capsys.readouterr().err
    lost, total = losses_told(told)
    assert 0 < lost <= total and (lost == total) == (files == "all")
    assert f"{segments[-1].name} has been changed; it is now called damaged-" in told
    assert not list(run.folder.checkpoints.glob("damaged-step*"))
    for role in run.roles:
        if role.counters.role == "replay":
            role.replay.check()


def test_one_byte_in_an_actors_part_costs_its_checkpoint_and_is_found_before_the_start(runs, capsys):
    run = runs("a")
    run.train(60)
    newest, before = checkpoint.complete(run.folder.checkpoints)[:2]
    flip(newest / "actor-1.npz")
    capsys.readouterr()
    assert min(run.resume(70)) == checkpoint.steps_of(before) + 1
    assert f"{newest}: actor-1.npz has been changed; it is passed over" in capsys.readouterr().err


@as_root
@pytest.mark.parametrize(
    "part",
    ["learner.pt", "manifest.json", "replay-0.npz", "bin", ".", "..", "../../config.toml", "../best.pt"],
)
def test_what_another_user_may_not_read_is_refused_and_nothing_changes(runs, part):
    run = runs("a")
    run.train(60)
    newest = checkpoint.complete(run.folder.checkpoints)[0]
    path = next(newest.glob("*.bin")) if part == "bin" else newest / part
    path = Path(os.path.normpath(path))
    before = names_below(run.folder.path)
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        refused = as_nobody(run.folder)
    finally:
        path.chmod(mode & 0o7777)
    assert (
        "Permission denied" in refused
        and str(path.relative_to(run.folder.path)) in refused
        and refused.count("\n") == 0
    ), refused
    assert names_below(run.folder.path) == before


def as_nobody(folder):
    """Return how ``apex train --resume`` is refused in a child that is another user and stands in the run
    folder.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(folder.path)  # the folders above are not for others
            os.setgroups([]), os.setgid(NOBODY), os.setuid(NOBODY)
            config, found = resume.configure(".", None, [])
            resume.choose(config, found)
            text = "not refused"
        except ConfigError as error:
            text = str(error)
        except BaseException as error:
            text = f"traceback: {error!r}\n"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_the_disk_does_not_give_is_not_called_damaged(tmp_path, monkeypatch, number):
    write(tmp_path, 100)
    last = write(tmp_path, 200)
    stat = os.stat

    def failing(path, *args, **options):
        if str(path) == str(last / "learner.bin"):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(Unreadable, match=f"learner.bin cannot be read: {os.strerror(number)}"):
        resume.newest(tmp_path, load("cartpole"))


def test_reads_that_the_kernel_fails_are_refused_and_a_pipe_is_no_file(tmp_path):
    with pytest.raises(Unreadable, match="Input/output error"):
        look.read("/proc/self/mem")
    os.mkfifo(tmp_path / "pipe")
    assert (
        look.read(tmp_path / "pipe") is None
        and look.read(tmp_path) is None
        and look.read(tmp_path / "none") is None
    )
    last = write(tmp_path / "c", 200)
    before = write(tmp_path / "c", 100)
    (last / "learner.bin").unlink()
    os.mkfifo(last / "learner.bin")
    assert resume.newest(tmp_path / "c", load("cartpole"))[0].folder == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
ROWS = JSON | st.dictionaries(
    st.sampled_from(["wall_s", "env_frames", "agent_steps", "evaluations", "eval_return", "train_return"]),
    JSON,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=4), JSON)
@example([{"wall_s": -1}], None)
@example([{"wall_s": True}], {"reason": "signal"})
def test_json_that_is_not_ours_is_refused_in_one_line(tmp_path_factory, rows, other):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = [row for row in rows if isinstance(row, dict)]
    wrong = not all(is_number_or_none(row.get(name)) for row in ours for name in ROW_FIELDS)
    assert refuses(folder.check_rows, "metrics.jsonl") == wrong
    nothing = all(row.get("wall_s") is None for row in ours)
    assert refuses(lambda: _figure([folder.path]), "metrics.jsonl", "nothing to plot yet") == (
        wrong or nothing
    )
    (folder.path / "result.json").write_text(json.dumps(other))
    assert refuses(folder.result, "result.json")
    step = folder.checkpoints / "step-000000100"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({"manifest": other, "sha256": checkpoint._digest(other)}))
    assert refuses(lambda: verify(step), "manifest.json", "format")
    shutil.rmtree(folder.path)


def is_number_or_none(value):
    return value is None or (
        isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
    )


def refuses(call, *names):
    """Return whether a call refuses, which it does in one line that holds one of the names."""
    try:
        call()
        return False
    except ConfigError as error:
        assert "\n" not in str(error) and any(name in str(error) for name in names)
        return True


def test_a_row_of_text_in_place_of_a_number_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"wall_s": "soon"}\n')
    with pytest.raises(
        ConfigError, match=r"metrics\.jsonl is not a run's log: wall_s = \"soon\" is not a finite number"
    ):
        _figure([tmp_path])


HOLD = "import sys; from apex import run_lock; run_lock.take(sys.argv[1]); "
HOLD += "print('held', flush=True); sys.stdin.read()"


def test_a_second_job_in_a_folder_is_refused_in_one_line_and_changes_nothing(runs, capsys):
    run = runs("a")
    run.train(30)
    folder = run.folder.path.resolve()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        before = names_below(folder)
        assert main(["train", "--resume", str(folder)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and f"is in use by process {holder.pid} on " in told
        assert names_below(folder) == before
        assert main(["plot", str(folder), "--out", str(folder.parent / "x.png")]) == 0
        holder.kill()
    assert max(run.resume(60)) == 60  # the kernel has freed it


def test_a_resume_that_is_refused_leaves_no_lock_behind_and_no_other_s_removed(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    folder.write_config(to_toml(load("cartpole")))
    for _ in range(2):
        assert main(["train", "--resume", str(folder.path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not (folder.path / run_lock.NAME).exists()
    (folder.path / run_lock.NAME).write_text("of an earlier run\n")
    assert main(["train", "--resume", str(folder.path)]) == 2
    assert (folder.path / run_lock.NAME).exists()


def test_a_lock_on_a_file_that_has_been_removed_meanwhile_is_none(tmp_path, monkeypatch):
    flock, calls = run_lock.fcntl.flock, []

    def removed_before(descriptor, how):
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / run_lock.NAME).unlink()  # as one whose resume was refused does
        flock(descriptor, how)

    monkeypatch.setattr(run_lock.fcntl, "flock", removed_before)
    run_lock.take(tmp_path)
    assert len(calls) == 2
    refused = subprocess.run(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert "is in use by process" in refused.stderr
    run_lock.give(tmp_path)


def test_a_lock_is_not_inherited_by_what_the_holder_starts(tmp_path):
    run_lock.take(tmp_path)
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False
    )
    with sleeper:
        run_lock.give(tmp_path)
        assert (
            subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.DEVNULL).returncode
            == 0
        )
        sleeper.stdin.close()


def test_without_locks_on_the_file_system_one_warning_is_given(tmp_path, monkeypatch, capsys):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)
    run_lock.take(tmp_path)
    run_lock.give(tmp_path)
    assert capsys.readouterr().err.count("cannot be locked (No locks available)") == 1
