"""What a run is said to need of memory is what its ranks then take."""

import sys
from pathlib import Path

import pytest

from apex.config import load
from apex.envs import env_spec
from apex.run_folder import RunFolder
from apex.topology import make
from launch.run import memory
from replay_rank.service import memory_bytes

SETTINGS = {"actor.count": 1, "run.log_period_s": 0.2, "evaluator.episodes": 2, "evaluator.period": 1,
            "replay.min_size": 200, "replay.capacity": 1000, "learner.batch_size": 16}  # fmt: skip
TOLERATED = 0.9, 1.6  # estimate over measured


def memory_of(pid: int) -> tuple[int, int]:
    """Return the bytes that a process has for itself, and those that it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return 1024 * (kib["Private_Clean"] + kib["Private_Dirty"]), 1024 * (
        kib["Shared_Clean"] + kib["Shared_Dirty"]
    )


@pytest.mark.parametrize("transport", ["mpi", "zmq"])
def test_each_role_takes_what_it_was_said_to_and_not_half_of_it(start, tmp_path, transport):
    overrides = [f"{name}={value}" for name, value in SETTINGS.items()]
    sets = [
        word for override in (*overrides, f"run.directory={tmp_path}/runs") for word in ("--set", override)
    ]
    job = start(
        [sys.executable, "-m", "launch.cli.main", "train", "cartpole", "--transport", transport, *sets]
    )
    folder = RunFolder(tmp_path / "runs" / "latest")
    job.wait_until(lambda: any(row["eval_return"] is not None for row in folder.rows()), 120, "an evaluation")
    config = load("cartpole", overrides)
    spec, topology = env_spec(config.env), make(config)
    for rank in range(topology.size):
        private, shared = memory_of(job.rank(rank))
        role = topology.role(rank)[0]
        told = memory._rest_bytes(config, spec, role) + (
            memory_bytes(config, spec) if role == "replay" else 0
        )
        least, most = TOLERATED
        assert least * private <= told <= most * private, (
            f"{role}: said to take {told >> 20} MiB, takes {private >> 20}"
        )
        assert shared <= memory._SHARED_BYTES
