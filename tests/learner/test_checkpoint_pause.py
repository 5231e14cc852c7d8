"""A checkpoint of the network of the paper's size keeps the learner from training for less than 100 ms."""

import time

import numpy as np

from apex.config import load
from apex.run_folder import RunFolder
from apex.schema import EnvSpec, limits, sample_layout
from apex.topology import make
from launch.run.local import make_ports
from learner.learner import Learner
from learner.run_log import RunLog


def test_a_checkpoint_of_three_million_parameters_pauses_the_learner_for_less_than_100_ms(
    tmp_path, one_torch_thread
):
    config = load(
        "pong",
        ["learner.batch_size=2", f"run.directory={tmp_path}", "replay.min_size=2", "replay.error_buffer=9"],
    )
    spec, topology = EnvSpec((84, 84), "uint8", 4, 6, 4), make(config)
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    ports = make_ports(topology, limits(config, spec))
    learner = Learner(config, spec, ports[0], topology, RunLog(config, topology, folder, "pong"))
    assert sum(parameter.numel() for parameter in learner.train.online.parameters()) > 3_000_000
    layout = sample_layout(spec, 2)
    learner.train(
        layout.views(np.zeros(layout.nbytes, np.uint8)), np.ones(2, np.float32)
    )  # now the optimiser has its moments
    pauses = []
    for _ in range(5):
        start = time.thread_time()  # of this thread, whatever else the machine does
        learner._copy_state()
        pauses.append(time.thread_time() - start)
    assert min(pauses) < 0.1, pauses
