"""`apex compare` for real, small.

Every transport over real processes, with nothing lost, and with one that fails.
"""

import json
import sys

import pytest

from launch.bench.transports_run import command

COMPARE = [
    sys.executable,
    "-m",
    "launch.cli.main",
    "compare",
    "--actors",
    "1",
    "--repetitions",
    "1",
    "--seconds",
    "1",
    "--regimes",
    "free",
]


@pytest.fixture(scope="module")
def compared(run_to_end, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    files = ["--json", folder / "rows.json", "--png", folder / "panels.png", "--report", folder / "report.md"]
    ended = run_to_end([*COMPARE, "--workloads", "mixed", *files], timeout=150)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads((folder / "rows.json").read_text()), (folder / "report.md").read_text()


@pytest.mark.parametrize("transport", ["mpi", "zmq", "mpi-pickle", "zmq-pickle"])
def test_a_transport_moves_intake_and_samples_and_loses_nothing(compared, transport):
    (row,) = [row for row in compared[0]["rows"] if row["transport"] == transport]
    assert "error" not in row
    assert row["lost"] == 0
    # How many fall into a second is for the machine to say.
    assert row["batches_per_s"] is not None and (row["sample_ms_p50"] or 0) <= (row["sample_ms_p99"] or 0)
    assert row["cpu_s_per_million"] > 0 and row["peak_mb"] > 100


def test_the_report_has_a_line_for_each(compared):
    assert all(
        f"| 1 | {transport} |" in compared[1] for transport in ("mpi", "zmq", "mpi-pickle", "zmq-pickle")
    )


def test_a_transport_that_cannot_start_is_reported_and_the_rest_goes_on(run_to_end, tmp_path):
    command = [
        *COMPARE,
        "--workloads",
        "intake",
        "--transports",
        "mpi,zmq-pickle",
        "--json",
        tmp_path / "rows.json",
    ]
    ended = run_to_end(command, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    mpi, pickled = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert "RuntimeError" in mpi["error"] and mpi["transitions_per_s"] is None
    assert (
        pickled["transitions_per_s"] is not None and pickled["lost"] == 0 and pickled["cpu_s_per_million"] > 0
    )
    assert "failed: mpi, 1 actors, intake, free" in ended.stdout


def test_a_synthetic_rank_that_fails_ends_all_with_its_traceback_and_status_1(run_to_end, inject, tmp_path):
    fault = inject(
        3, module="launch.bench.synthetic", cls="SyntheticActor", method="turn", how="raises", after=3
    )
    arguments = ["--transport", "mpi", "--seconds", "30", "--folder", str(tmp_path)]
    ended = run_to_end(command("mpi", 4, "launch.bench.synthetic_rank", arguments), fault)
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert "actor 0 (rank 3) failed" in ended.stderr and "RuntimeError: injected" in ended.stderr
