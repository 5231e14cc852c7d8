"""A rank that has nothing to do leaves its core to others."""

import json

import pytest

from launch.compare_run import command

SECONDS, RANKS = 4.0, 5


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi", "zmq"])
def test_every_idle_rank_uses_less_than_a_twentieth_of_a_core(run_to_end, tmp_path, transport):
    """Two actors send one batch each second; nobody has anything else to do."""
    arguments = ["--transport", transport, "--seconds", str(SECONDS), "--rate", "50", "--folder", str(tmp_path)]
    ended = run_to_end(command(transport, RANKS, "launch.synthetic_rank", arguments), timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    used = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    shares = {f"{rank['role']} {rank['index']}": round(rank["cpu_s"] / rank["seconds"], 4) for rank in used}
    print(shares)
    assert all(rank["seconds"] > SECONDS for rank in used)
    assert max(shares.values()) < 0.05, shares
