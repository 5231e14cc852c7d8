"""Checkpoint folders: whole or not there.

Torn and edited ones are refused by name and the one before is used.
"""

import errno
import json
import os
import shutil
import threading

import numpy as np
import pytest
from small_checkpoints import ABOUT, PARTS, STATES, newest, verify, write, write_parts

from apex import checkpoint, files
from apex.checkpoint import Corrupt, Part
from apex.config import ConfigError, load
from apex.files import NewFile
from apex.state import split


def test_a_whole_checkpoint_is_read_back(tmp_path):
    folder = write(tmp_path, 120)
    manifest = verify(folder)
    assert (folder.name, manifest["learner_steps"]) == ("step-000000120", 120)
    held = checkpoint.Reader(folder, load("cartpole"), 1)
    assert held.values("replay-0") == split(STATES["replay-0"])[0]
    state = held.state("replay-0")
    assert (state["replay"]["index"]["mass"] == np.arange(50.0)).all() and state["replay"]["strata"] == {
        "state": 1
    }
    assert not list(tmp_path.glob(".step*"))


def test_a_part_that_is_not_seen_is_named_and_the_checkpoint_is_not_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PARTS_SEEN_S", 0.1)
    partial, target = write_parts(tmp_path, 100)
    with pytest.raises(OSError, match="its part replay-1 was written but is not seen in"):
        checkpoint.commit(partial, target, ABOUT, [*PARTS, "replay-1"])
    assert checkpoint.complete(tmp_path) == [] and not (partial / "manifest.json").exists()


def test_a_part_that_is_seen_a_moment_later_is_waited_for(tmp_path):
    partial, target = write_parts(tmp_path, 100)
    late = partial / "replay-0.json"
    late.rename(tmp_path / "elsewhere")
    timer = threading.Timer(0.2, (tmp_path / "elsewhere").rename, [late])
    timer.start()
    checkpoint.commit(partial, target, ABOUT | {"learner_steps": 100}, PARTS)
    timer.join()
    assert set(verify(target)["files"]) == {*FILES} - {"manifest.json"}


FILES = [
    "manifest.json",
    "learner.json",
    "learner.npz",
    "learner.bin",
    "replay-0.json",
    "replay-0.npz",
    "replay-0.bin",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["torn", "edited", "longer", "missing", "empty"])
def test_a_damaged_one_is_refused_by_name_and_the_one_before_it_is_used(tmp_path, capsys, name, how):
    before, last = write(tmp_path, 100), write(tmp_path, 200)
    path, data = last / name, (last / name).read_bytes()
    changed = {"torn": data[: len(data) // 2], "longer": data + b"x", "empty": b""}
    if how == "missing":
        path.unlink()
    elif how == "edited":
        at = len(data) // 2
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    else:
        path.write_bytes(changed[how])
    if (name, how) == ("manifest.json", "longer"):
        with pytest.raises(Corrupt):
            verify(last)
    assert newest(tmp_path) == before
    told = capsys.readouterr().err
    assert str(last) in told and name in told and told.count("\n") == 1


def test_every_single_bit_of_a_small_checkpoint_counts(tmp_path):
    folder = write(tmp_path, 100)
    for name in FILES:
        data = (folder / name).read_bytes()
        for at in range(0, len(data), 37):
            (folder / name).write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
            try:
                verify(folder)
            except Corrupt:
                pass
            else:  # white space, or the case of a digit's letter, may change without a change of content
                assert (
                    name == "manifest.json"
                    and json.loads((folder / name).read_bytes())["manifest"]["learner_steps"] == 100
                )
        (folder / name).write_bytes(data)
    verify(folder)


def test_without_a_whole_one_the_refusal_names_the_folder(tmp_path):
    with pytest.raises(ConfigError, match="there is no whole checkpoint in"):
        newest(tmp_path)
    (write(tmp_path, 100) / "learner.bin").unlink()
    with pytest.raises(ConfigError, match=str(tmp_path)):
        newest(tmp_path)


def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path):
    folder = write(tmp_path, 100)
    held = json.loads((folder / "manifest.json").read_bytes())
    held["manifest"]["files"]["../../etc/passwd"] = [1, "x"]
    held["sha256"] = checkpoint._digest(held["manifest"])
    (folder / "manifest.json").write_text(json.dumps(held))
    with pytest.raises(Corrupt, match="is missing"):
        verify(folder)


def test_a_checkpoint_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    folder = write(tmp_path, 100)
    monkeypatch.undo()
    ours = checkpoint.FORMAT
    with pytest.raises(Corrupt, match=f"format {ours + 1}, this program reads {ours}"):
        verify(folder)


def test_arrays_that_hold_objects_are_refused_and_run_no_code(tmp_path):
    folder = write(tmp_path, 100)
    with open(folder / "learner.npz", "wb") as file:
        np.savez(file, mass=np.array([os.getcwd], object))
    with pytest.raises(Corrupt, match="cannot be read"):
        checkpoint.Reader(folder, load("cartpole"), 1).arrays("learner")


def test_only_the_newest_are_kept_and_leftovers_are_removed(tmp_path):
    for steps in (100, 200, 1_000_000_000, 999_999_999):
        write(tmp_path, steps)
    (tmp_path / "step-by-step").mkdir()
    (tmp_path / ".step-000000400-7.partial").mkdir()
    checkpoint.remove_leftovers(tmp_path)
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-1000000000",
        "step-999999999",
        "step-by-step",
    ]
    assert newest(tmp_path).name == "step-1000000000"


def test_without_hard_links_a_file_of_an_older_checkpoint_is_copied(tmp_path, monkeypatch):
    old = write(tmp_path, 100)
    new = tmp_path / "new"
    new.mkdir()

    def no_links(*args):
        raise OSError(errno.EPERM, "no hard links here")

    size, digest = verify(old)["files"]["replay-0.bin"]
    part = Part(new, "replay-0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        part.adopt(old / "replay-0.bin", size, digest)
    shutil.rmtree(old)
    assert part.files == {"replay-0.bin": (size, digest)}
    assert checkpoint._size_and_digest(new, "replay-0.bin") == (size, digest)


def test_a_file_that_could_not_be_written_to_its_end_belongs_to_no_part(tmp_path, monkeypatch):
    part = Part(tmp_path, "x")
    with pytest.raises(OSError), part.file("x.bin") as file:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "no space")
    assert part.files == {}


def test_room_on_the_disk_is_asked_for_with_some_to_be_left(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    files.check_room(tmp_path, free // 4)
    with pytest.raises(OSError, match="MiB are needed") as error:
        files.check_room(tmp_path, 2 * free)
    assert error.value.errno == errno.ENOSPC


def test_files_are_on_the_disk_before_the_folder_gets_its_name(tmp_path, monkeypatch):
    order = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append("rename"), rename(a, b)))
    write(tmp_path, 100)
    names = [path.rpartition("/")[2] for path in order]
    assert sorted(names[:7]) == sorted(FILES) and names[6] == "manifest.json"
    assert names[7:] == [".step-000000100-1.partial", "rename", tmp_path.name]


def test_a_new_file_tells_its_size_and_digest_and_never_replaces_another(tmp_path):
    with NewFile(tmp_path / "a") as file:
        file.write(np.arange(10)), file.write(b"xyz")
    assert (file.nbytes, file.digest) == checkpoint._size_and_digest(tmp_path, "a")
    with pytest.raises(FileExistsError):
        NewFile(tmp_path / "a")
