"""`apex bench rates`: its word and its status follow from what it has measured, and nothing is lost."""

import json
import sys

import pytest

RATES = [sys.executable, "-m", "launch.cli.main", "bench", "rates", "--seconds", "3"]


def test_low_rates_are_measured_and_told(run_to_end, tmp_path):
    asked = [
        "--transitions-per-s",
        "1000",
        "--batches-per-s",
        "1",
        "--actors",
        "1",
        "--json",
        tmp_path / "rates.json",
    ]
    ended = run_to_end([*RATES, *asked], timeout=100)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    (row,) = json.loads((tmp_path / "rates.json").read_text())["rows"]
    assert row["lost"] == 0 and row["transitions_per_s"] > 0 and row["batches_per_s"] > 0
    # Whether they are held is for the machine to say, and for the command to tell as it is.
    assert (
        row["held"]
        == (ended.returncode == 0)
        == (row["transitions_per_s"] >= 990 and row["batches_per_s"] >= 0.99)
    )
    assert row["memory_mb_end"] > 50 and row["memory_mb_per_min"] is not None
    assert f"{'held' if row['held'] else 'not held'} for 3 s" in ended.stdout


def test_rates_that_no_machine_reaches_are_not_held_and_the_status_says_so(run_to_end):
    ended = run_to_end([*RATES, "--transitions-per-s", "900000000"], timeout=100)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "not held for 3 s" in ended.stdout


@pytest.mark.parametrize(
    "asked, complaint",
    [
        (["--transport", "pickle"], "--transport pickle: apex bench rates measures mpi or zmq"),
        (["--batches-per-s", "0"], "--batches-per-s: '0' must be a number above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(run_to_end, asked, complaint):
    ended = run_to_end([*RATES, *asked])
    assert ended.returncode == 2 and complaint in ended.stderr and len(ended.stderr.splitlines()) == 1
