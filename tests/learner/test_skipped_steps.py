"""A batch that gives a loss that is not finite: skipped, counted, kept, and too many of them end the run."""

import numpy as np
import pytest
import torch
from local_runs import STEPS, Run

from apex import checkpoint
from learner.train_step import NotFinite
from replay_rank.replay import Replay

pytestmark = pytest.mark.usefixtures("as_before")


@pytest.fixture
def poison(monkeypatch):
    """Return ``poison(numbers)``.

    Sample batches of these numbers, from 1 on, come with a reward that is NaN.
    """

    def poisoned(numbers):
        count, whole = [0], Replay.sample

        def sample(replay, out):
            whole(replay, out)
            count[0] += 1
            if count[0] in numbers:
                out["reward"][3] = np.nan

        monkeypatch.setattr(Replay, "sample", sample)

    return poisoned


def test_the_run_goes_on_without_the_steps_and_keeps_what_they_were_made_from(tmp_path, poison, capfd):
    poison({5, 20})
    run = Run(tmp_path).start()
    assert len(run.losses) == run.learner.train.learner_steps == STEPS and np.isfinite(run.losses).all()
    assert run.folder.rows()[-1]["skipped_steps"] == 2
    kept = sorted(path.name for path in (run.folder.path / "skipped").iterdir())
    assert kept == [
        f"{stem}{end}" for stem in ("0001-after-step-4", "0002-after-step-18") for end in (".npz", ".pt")
    ]
    batch = np.load(run.folder.path / "skipped" / "0001-after-step-4.npz", allow_pickle=False)
    assert np.flatnonzero(np.isnan(batch["reward"])).tolist() == [3] and batch["obs"].shape[0] == 16
    state = checkpoint.load(run.folder.path / "skipped" / "0001-after-step-4.pt")
    assert state["learner_steps"] == 4 and all(
        torch.isfinite(tensor).all() for tensor in state["online"].values()
    )
    told = capfd.readouterr().err
    assert "the loss of learner step 5 is nan; the step is skipped (1; the run fails after 10)" in told


def test_their_priorities_stay_as_they_were(tmp_path, poison, monkeypatch):
    keys, returned = [], []
    poison({5})
    update = Replay.update_priorities
    sample = Replay.sample
    monkeypatch.setattr(
        Replay, "sample", lambda replay, out: (sample(replay, out), keys.append(out["key"].copy()))[0]
    )
    monkeypatch.setattr(
        Replay, "update_priorities", lambda replay, k, p: (returned.append(k.copy()), update(replay, k, p))[1]
    )
    Run(tmp_path).start()
    assert [k.tolist() for k in returned[:6]] == [
        k.tolist() for number, k in enumerate(keys[:7], 1) if number != 5
    ]


def test_one_more_than_allowed_ends_the_run(tmp_path, poison):
    poison({2, 3, 4})
    with pytest.raises(NotFinite, match="the loss of learner step 2 is nan"):
        Run(tmp_path, "learner.max_skipped_steps=2").start()


def test_a_disk_that_does_not_take_the_batch_costs_the_copy_and_not_the_run(
    tmp_path, poison, monkeypatch, capfd
):
    def full(*args, **arrays):
        raise OSError(28, "No space left on device")

    poison({5})
    monkeypatch.setattr(np, "savez", full)
    run = Run(tmp_path).start()
    assert len(run.losses) == STEPS
    assert "its batch cannot be written: No space left on device" in capfd.readouterr().err
