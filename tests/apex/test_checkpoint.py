"""Checkpoints: old or new, never torn."""

import os
import pickle

import pytest
import torch

from apex import checkpoint
from apex.config import ConfigError

STATE = {
    "online": {"a.weight": torch.arange(6.0).reshape(2, 3)},
    "learner_steps": 7,
    "eval_return": -21.0,
    "note": "text",
}


def same(a, b):
    return a["learner_steps"] == b["learner_steps"] and torch.equal(
        a["online"]["a.weight"], b["online"]["a.weight"]
    )


def refusal(path):
    with pytest.raises(ConfigError) as error:
        checkpoint.load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


def test_what_is_saved_is_loaded(tmp_path):
    path = tmp_path / "new" / "latest.pt"
    checkpoint.save(path, STATE)
    loaded = checkpoint.load(path)
    assert same(loaded, STATE) and (loaded["eval_return"], loaded["note"]) == (-21.0, "text")
    assert [p.name for p in path.parent.iterdir()] == ["latest.pt"]


def test_a_state_with_an_optimiser_is_loaded(tmp_path):
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "x.pt", {"optimizer": optimizer.state_dict()})
    other = torch.optim.Adam(torch.nn.Linear(2, 1).parameters())
    other.load_state_dict(checkpoint.load(tmp_path / "x.pt")["optimizer"])
    assert torch.equal(*(o.state_dict()["state"][0]["exp_avg"] for o in (optimizer, other)))


def test_saving_again_replaces(tmp_path):
    path = tmp_path / "latest.pt"
    checkpoint.save(path, STATE)
    checkpoint.save(path, STATE | {"learner_steps": 8})
    assert checkpoint.load(path)["learner_steps"] == 8


@pytest.mark.parametrize("dies_in", ["torch.save", "os.fsync", "os.replace"])
def test_a_save_that_dies_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch, dies_in):
    path = tmp_path / "latest.pt"
    checkpoint.save(path, STATE)

    def die(*args, **kwargs):
        if dies_in == "torch.save":
            args[1].write(b"half a checkpoint")
        raise OSError("no space left")

    owner, name = {"torch.save": (torch, "save"), "os.fsync": (os, "fsync"), "os.replace": (os, "replace")}[
        dies_in
    ]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(OSError, match="no space"):
            checkpoint.save(path, STATE | {"learner_steps": 8})
    assert same(checkpoint.load(path), STATE)
    checkpoint.save(path, STATE | {"learner_steps": 9})  # what the dead save left is no obstacle
    assert checkpoint.load(path)["learner_steps"] == 9


def test_the_new_file_is_complete_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, order = tmp_path / "latest.pt", []

    def fsync(fd, real=os.fsync):
        order.append("fsync")
        real(fd)

    def replace(source, target, real=os.replace):
        order.append("replace")
        assert same(checkpoint.load(source), STATE) and target == path
        real(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    checkpoint.save(path, STATE)
    assert order == ["fsync", "replace"]


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
def test_a_torn_checkpoint_is_refused(tmp_path, keep):
    path = tmp_path / "latest.pt"
    checkpoint.save(path, STATE)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    assert "cannot be read" in refusal(path)


def test_a_missing_checkpoint_is_refused(tmp_path):
    assert "no checkpoint at" in refusal(tmp_path / "none.pt")
    assert "no checkpoint at" in refusal(tmp_path)


class Evil:
    def __reduce__(self):
        return (os.makedirs, ("evil-was-here",))


@pytest.mark.parametrize(
    "write", [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state, protocol=2))]
)
def test_a_checkpoint_that_would_run_code_is_refused_and_runs_none(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    write({"online": Evil()}, tmp_path / "x.pt")
    assert "cannot be read" in refusal(tmp_path / "x.pt")
    assert not (tmp_path / "evil-was-here").exists()
