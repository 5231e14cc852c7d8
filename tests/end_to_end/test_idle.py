"""A rank that has nothing to do leaves its core to others."""

import json

import pytest

from launch.bench.transports_run import command

SECONDS, RANKS = 4.0, 5
MOST_STEPS_PER_S = 75  # 50 where nothing comes, and some around each report


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi", "zmq"])
def test_after_a_second_without_messages_every_rank_looks_for_some_fifty_times_a_second(
    run_to_end, tmp_path, figure, transport
):
    """Counted, since what a step costs depends on the processor; the share of a core is noted as a figure."""
    arguments = [
        "--transport",
        transport,
        "--workload",
        "idle",
        "--seconds",
        str(SECONDS),
        "--folder",
        str(tmp_path),
    ]
    ended = run_to_end(command(transport, RANKS, "launch.bench.synthetic_rank", arguments), timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
    used = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    for rank in used:
        settled = rank["settled"]
        figure(
            f"idle over {transport}, {rank['role']}: % of a core", 100 * settled["cpu_s"] / settled["seconds"]
        )
        assert settled["steps"] / settled["seconds"] < MOST_STEPS_PER_S, rank
