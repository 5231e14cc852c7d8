"""A checkpoint that cannot be written is told of once for each reason, not at every period."""

from apex.config import load
from apex.topology import make
from learner.checkpointing import Checkpoints


def test_a_folder_that_is_gone_is_told_of_once(tmp_path, capsys):
    config = load("cartpole", ["learner.checkpoint_period=10"])
    checkpoints = Checkpoints(config, make(config), tmp_path / "gone", port=None)
    for steps in (10, 20, 30):
        assert checkpoints.is_due(steps)
        checkpoints.start(steps, copy_state=None)
    told = capsys.readouterr().err
    assert told.count("apex: warning: no checkpoint") == 1 and "No such file or directory" in told
