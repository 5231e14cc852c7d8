"""`apex compare` without starting anything.

What it refuses, the order of runs, medians and ratios, and its files.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from apex.config import ConfigError
from launch.bench import copy_rate, synthetic, transports_report, transports_run
from launch.bench import transports as compare
from launch.bench.transports import Options, cases
from launch.bench.transports_report import ROW_FIELDS, Comparison
from launch.bench.transports_run import Case, Failed
from launch.cli.main import main

MACHINE = {
    "cpu": "a processor", "cores": 2, "kernel": "Linux 6", "python": "3.11", "load": [0.5, 0.5, 0.5],
    "load_after": 1.5,
    "versions": {"mpi4py": "4.1.2", "pyzmq": "27.3.0"}, "mpirun": "mpirun (Open MPI) 5.0.11", "left_out": 0,
    "memcpy_mb_per_s": {"plain": {"1": 1000.0, "2": 2000.0}, "messages": {"1": 4000.0, "2": 8000.0}},
    "command": "apex compare --quick",
}  # fmt: skip
TWO = Options(
    transports=("mpi", "zmq-pickle"), actors=(1, 2), repetitions=3, regimes=("free",), workloads=("intake",)
)


def row(transport, repetition, transitions_per_s, actors=1, workload="intake", **others):
    values = dict.fromkeys(ROW_FIELDS) | {
        "lost": 0,
        "mb_per_s": transitions_per_s and transitions_per_s / 100,
    }
    named = {
        "transport": transport,
        "actors": actors,
        "regime": "free",
        "workload": workload,
        "repetition": repetition,
    }
    return values | named | {"transitions_per_s": transitions_per_s} | others


def fake(case, seconds, preset, limit_s):
    """Measure nothing: mpi is three times as fast, and zmq fails."""
    if case.transport == "zmq":
        return row(
            "zmq",
            case.repetition,
            None,
            case.actors,
            case.workload,
            lost=None,
            error="exit status 1: it broke",
        )
    return row(
        case.transport,
        case.repetition,
        3000.0 if case.transport == "mpi" else 1000.0,
        case.actors,
        case.workload,
    )


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    monkeypatch.setattr(
        transports_report,
        "machine",
        lambda: {k: v for k, v in MACHINE.items() if k not in ("load_after", "left_out")},
    )
    monkeypatch.setattr(copy_rate, "rates", lambda: MACHINE["memcpy_mb_per_s"])


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--transports", "mpi,zmqq"], "zmqq"),
        (["--transports", ""], "--transports"),
        (["--transports", "mpi,mpi"], "each once"),
        (["--regimes", "idle"], "idle"),
        (["--workloads", "intakes"], "did you mean 'intake'"),
        (["--baseline", "tcp"], "tcp"),
        (["--actors", "0"], "'0'"),
        (["--actors", "1,x"], "'x'"),
        (["--actors", "257"], "256"),
        (["--repetitions", "0"], "'0'"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--seconds", "soon"], "soon"),
        (["--preset", "pongg"], "pong"),
        (["--json", "/proc/none/rows.json"], "/proc/none"),
        (["--what"], "--what"),
    ],
)
def test_what_cannot_be_met_is_refused_in_one_line_before_anything_starts(
    capsys, monkeypatch, arguments, named
):
    monkeypatch.setattr(transports_run, "measure", None)
    monkeypatch.setattr(copy_rate, "rates", None)
    assert main(["compare", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and named in told.err


def test_it_is_refused_inside_a_world(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="without mpirun"):
        compare.run(TWO, measure=fake)


def test_quick_changes_only_what_is_not_asked_for(monkeypatch):
    given = []
    monkeypatch.setattr(compare, "run", lambda options, *rest: given.append(options) or 0)
    assert main(["compare", "--quick", "--actors", "3", "--seconds", "0.5"]) == 0
    assert given == [
        Options(
            actors=(3,),
            seconds=0.5,
            repetitions=1,
            workloads=("intake", "mixed"),
            budget_s=compare.QUICK["budget_s"],
        )
    ]


# --- order ------------------------------------------------------------------------------------------


def test_within_each_repetition_every_transport_takes_its_turn_and_none_is_always_first():
    order = [(case.actors, case.repetition, case.transport) for case in cases(TWO)]
    assert order[:6] == [
        (1, 0, "mpi"), (1, 0, "zmq-pickle"), (1, 1, "zmq-pickle"), (1, 1, "mpi"), (1, 2, "mpi"),
        (1, 2, "zmq-pickle"),
    ]  # fmt: skip
    assert len(order) == 12


def test_only_transports_that_can_train_are_compared_by_a_preset():
    assert {case.transport for case in cases(Options(workloads=("preset",)))} == {"mpi", "zmq"}


def test_when_time_is_up_the_rest_is_left_out_and_counted(monkeypatch):
    clock = iter(range(0, 100, 4))  # seconds: each run takes four
    monkeypatch.setattr(compare.time, "monotonic", lambda: next(clock))
    rows, left_out = compare.measured(replace(TWO, budget_s=9.0), lambda *_: {})
    assert len(rows) == 2 and left_out == 10


# --- medians and ratios -----------------------------------------------------------------------------


def comparison(*rows, baseline="zmq-pickle"):
    return Comparison(MACHINE, list(rows), baseline)


def test_a_ratio_is_the_median_of_the_ratios_within_each_repetition():
    noisy = [(100.0, 10.0), (50.0, 5.0), (80.0, 2.0)]  # the machine was slower the second time, for both
    rows = [row(t, r, both[i]) for r, both in enumerate(noisy) for i, t in enumerate(("mpi", "zmq-pickle"))]
    ((_, _, (mpi, pickled)),) = comparison(*rows).groups()
    assert mpi.ratio("transitions_per_s") == 10.0 and pickled.ratio("transitions_per_s") == 1.0
    assert mpi.median("transitions_per_s") == 80.0
    assert mpi.texts()["transitions"] == "80.0 [50.0..100]"


def test_a_repetition_in_which_either_failed_has_no_ratio():
    rows = [
        row("mpi", 0, 30.0),
        row("mpi", 1, None, error="x"),
        row("zmq-pickle", 0, None, error="x"),
        row("zmq-pickle", 1, 10.0),
    ]
    ((_, _, (mpi, _)),) = comparison(*rows).groups()
    assert mpi.ratio("transitions_per_s") is None and mpi.texts()["ratio"] == "-"
    assert mpi.median("transitions_per_s") == 30.0


def test_where_the_baseline_cannot_run_a_workload_zmq_takes_its_place():
    rows = [row("mpi", 0, 30.0, workload="preset"), row("zmq", 0, 10.0, workload="preset")]
    ((_, _, (mpi, _)),) = comparison(*rows).groups()
    assert mpi.ratio("transitions_per_s") == 3.0


def test_shares_of_memcpy_are_of_as_many_processes():
    (share,) = comparison(row("mpi", 0, 60_000.0, actors=2), row("zmq", 0, 1.0, actors=2)).shares()
    assert "2 senders" in share and "30 %" in share and "8 %" in share


# --- files ------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path, capsys):
    options = replace(TWO, transports=("mpi", "zmq", "zmq-pickle"), workloads=("intake", "mixed"))
    paths = [tmp_path / "new" / name for name in ("rows.json", "panels.png", "report.md")]
    assert compare.run(options, *paths, command="apex compare --repetitions 3", measure=fake) == 0
    return *paths, capsys.readouterr().out


def test_the_json_has_one_row_for_each_run_with_every_field(written):
    found = json.loads(written[0].read_text())
    assert set(found) == {"machine", "rows"} and found["machine"]["cpu"] == "a processor"
    assert len(found["rows"]) == 2 * 2 * 3 * 3
    assert all(
        tuple(row)[: len(ROW_FIELDS)] and set(row) - {"error"} == set(ROW_FIELDS) for row in found["rows"]
    )
    assert {row["transport"] for row in found["rows"] if "error" in row} == {"zmq"}


def test_the_report_tells_machine_versions_command_tables_and_failures(written):
    report = written[2].read_text()
    for text in (
        "apex compare --repetitions 3",
        "a processor",
        "pyzmq 27.3.0",
        "Open MPI",
        "| 1 | mpi | 3000",
        "3.00x",
        "memcpy",
    ):
        assert text in report
    assert (
        "## Failed" in report
        and "zmq, 2 actors, mixed, free: repetition 2: exit status 1: it broke" in report
    )


def test_the_terminal_shows_what_failed_and_the_rest(written):
    assert "failed" in written[3] and "zmq-pickle" in written[3] and "it broke" in written[3]


def test_the_picture_is_one(written):
    assert written[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_status_is_1_if_no_run_gave_a_result():
    assert compare.run(replace(TWO, transports=("zmq",)), measure=fake) == 1


# --- runs -------------------------------------------------------------------------------------------


def test_what_ranks_counted_becomes_one_row():
    ranks = [
        {
            "role": "learner",
            "index": 0,
            "cpu_s": 1.0,
            "peak_mb": 10,
            "damaged": 0,
            "sample_ms_p50": 2.0,
            "sample_ms_p99": 3.0,
            "wait_pct": 4.0,
        },
        {
            "role": "replay",
            "index": 0,
            "cpu_s": 2.0,
            "peak_mb": 20,
            "damaged": 0,
            "received": [[3, 3, 5]],
            "inserted": 1000,
            "window_s": 1.0,
            "transitions_per_s": 500.0,
            "bytes_per_s": 4e6,
            "samples_per_s": 1024.0,
        },
        {"role": "actor", "index": 0, "cpu_s": 3.0, "peak_mb": 30, "sent": 4},
    ]
    found = transports_run.summarise(ranks, sampling=True)
    assert found == {
        "transitions_per_s": 500.0, "mb_per_s": 4.0, "batches_per_s": 2.0, "sample_ms_p50": 2.0,
        "sample_ms_p99": 3.0,
        "learner_wait_pct": 4.0, "cpu_s_per_million": 6000.0, "peak_mb": 60, "lost": 50,
    }  # fmt: skip
    assert transports_run.summarise(ranks, sampling=False)["batches_per_s"] is None
    with pytest.raises(Failed, match="window"):
        transports_run.summarise([ranks[0], ranks[1] | {"window_s": None}, ranks[2]], sampling=True)


def test_a_run_that_cannot_start_is_a_row_with_an_error(monkeypatch):
    monkeypatch.setattr(
        transports_run, "command", lambda *_: [sys.executable, "-c", "raise SystemExit('no such fabric')"]
    )
    found = transports_run.measure(Case("intake", "busy", 1, 0, "mpi"), 0.2, "pong-small")
    assert found["error"] == "exit status 1: no such fabric" and set(found) - {"error"} == set(ROW_FIELDS)
    assert all(found[name] is None for name in synthetic.METRICS)


def test_a_run_that_takes_too_long_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    started = tmp_path / "pid"
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    parent = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    )
    monkeypatch.setattr(transports_run, "command", lambda *_: [sys.executable, "-c", parent])
    monkeypatch.setattr(transports_run, "_STARTING_S", 1.0)
    found = transports_run.measure(Case("intake", "free", 1, 0, "mpi"), 0.2, "pong-small")
    assert "not done within" in found["error"]
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", started.read_text()], capture_output=True, text=True
    ).stdout
    assert state.strip()[:1] in ("", "Z")


# --- batches ----------------------------------------------------------------------------------------


def test_a_batch_adds_up_to_the_same_sum_whatever_its_number_and_damage_is_seen(monkeypatch):
    monkeypatch.setattr(synthetic, "_CHECKED", 1)
    batches = synthetic.Batches(synthetic.config(1), actor=0, count=2)
    layout = synthetic.intake_layout(synthetic.SPEC, 50, 3)
    landing = synthetic.aligned_bytes(layout.nbytes)
    account = synthetic.Account(1, layout)
    for n in (0, 1, 2, 7, 3):
        landing[: batches.nbytes] = batches.stamped(n % 2, n)
        account.take(landing, batches.nbytes)
    assert account.damaged == 0 and account.received == [[5, 13, 63]]
    landing[batches.nbytes - 1] ^= 1
    account.take(landing, batches.nbytes)
    assert account.damaged == 1


@pytest.mark.parametrize(
    "sent, numbers, lost",
    [
        (4, [0, 1, 2, 3], 0),
        (4, [3, 1, 0, 2], 0),
        (4, [0, 1, 2], 1),
        (4, [0, 1, 2, 2], 1),
        (4, [0, 1, 2, 3, 3], 1),
        (0, [], 0),
    ],
)
def test_batches_that_are_lost_or_come_twice_are_counted(sent, numbers, lost):
    halves = numbers[::2], numbers[1::2]  # on two replay ranks
    received = [[[len(h), sum(h), sum(n * n for n in h)]] for h in halves]
    assert synthetic.lost_batches([sent], received) == lost
