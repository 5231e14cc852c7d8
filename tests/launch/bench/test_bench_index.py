"""The benchmark of the indexes: its rows, its files, what it refuses, and its tree in plain Python."""

import json
import subprocess
import sys

import numpy as np
import pytest
from places import ROOT

from apex.config import ConfigError
from launch.bench import baselines
from launch.bench import index as bench_index
from launch.bench import report as bench_report
from launch.bench.baselines import Candidate, PythonTree
from launch.bench.report import REFERENCE
from launch.cli.main import main
from replay_rank.strata import Strata

FIELDS = {"index", "leaf", "op", "k", "cache", "caller", "median_us", "q1_us", "q3_us", "ratio_to_binary"}
LEAVES = 4096


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A short run of the reference, the default binary tree and plain Python, with both files written."""
    folder = tmp_path_factory.mktemp("bench")
    names = [REFERENCE, "binary", "python"]
    bench_index.run(
        folder / "new" / "rows.json", folder / "rows.png", leaves=LEAVES, indexes=names, budget_s=1.0
    )
    return folder / "new" / "rows.json", folder / "rows.png"


@pytest.fixture
def written(files):
    return json.loads(files[0].read_text())


def cells(rows, name):
    return [
        (row["op"], row["k"], row["cache"])
        for row in rows
        if row["index"] == name and row["caller"] == "python"
    ]


def refusal(capsys, *arguments) -> str:
    """Return what the command said, in one line, when it refused."""
    assert main(["bench", "index", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    return told.err


# --- rows ---------------------------------------------------------------------------------------------


def test_every_row_has_every_field_and_one_of_the_values_it_may(written):
    assert set(written) == {"machine", "rows"}
    for row in written["rows"]:
        assert set(row) == FIELDS
        assert (
            row["leaf"] in ("float64", "float32")
            and row["cache"] in ("hot", "cold")
            and row["caller"] in ("c", "python")
        )
        assert (row["op"], row["k"]) in bench_index.OPS


@pytest.mark.parametrize("name", [REFERENCE, "binary", "python"])
def test_an_index_has_each_operation_hot_and_cold_once(written, name):
    expected = {(op, k, cache) for op, k in bench_index.OPS for cache in ("hot", "cold")}
    found = cells(written["rows"], name)
    assert set(found) == expected and len(found) == len(expected)


def test_a_median_is_above_zero_and_between_its_quartiles(written):
    assert all(0.0 < row["q1_us"] <= row["median_us"] <= row["q3_us"] for row in written["rows"])


def test_the_reference_is_as_fast_as_itself_and_faster_than_plain_python(written):
    ratios = {
        (row["index"], row["op"], row["k"], row["cache"]): row["ratio_to_binary"] for row in written["rows"]
    }
    assert {ratio for (name, *_), ratio in ratios.items() if name == REFERENCE} == {1.0}
    assert ratios["python", "update", 2048, "hot"] < 0.5


def test_the_machine_says_what_the_numbers_depend_on(written):
    machine = written["machine"]
    assert machine["cpu"] and machine["kernel"] and machine["versions"]["numpy"] == np.__version__
    assert set(machine["bytes_per_leaf"]) == {REFERENCE, "binary"}
    assert all(32.0 <= size < 33.0 for size in machine["bytes_per_leaf"].values())
    assert machine["backends"]["binary"] and machine["leaves"] == LEAVES and machine["left_out"] == []


def test_the_picture_is_a_png(files):
    assert files[1].read_bytes().startswith(b"\x89PNG") and files[1].stat().st_size > 10_000


def test_the_tables_show_updates_by_k_and_ratios(capsys, written):
    bench_report.show(written["machine"], written["rows"])
    shown = capsys.readouterr().out
    assert f"bytes a leaf: {REFERENCE} 32.0, binary 32.0" in shown
    assert (
        "pure Python" in shown
        and "32768" in shown
        and "x1.00" in shown
        and max(map(len, shown.splitlines())) <= 80
    )


def test_without_the_reference_there_is_no_ratio(tmp_path):
    bench_index.run(tmp_path / "rows.json", leaves=LEAVES, indexes=["binary"], budget_s=0.5)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows and all(row["ratio_to_binary"] is None for row in rows)


def test_an_index_that_times_its_own_calls_has_rows_called_from_c():
    class Timed(Candidate):
        name = "timed"

        def time_calls(self, op, k, calls, cold_bytes, slots, mass, seed):
            assert (
                slots.dtype == np.int64 and mass.dtype == np.float64 and slots.size == mass.size == calls * k
            )
            assert cold_bytes in (0, bench_index.COLD_BYTES)
            return np.full(calls, 2.0 if cold_bytes else 1.0)

        def sample(self, k):
            pass

        def update(self, slots, mass):
            pass

    rows = bench_index.Bench([Timed()], LEAVES, 3).measure(0.0, bench_report.progress())
    medians = {(row["op"], row["k"], row["cache"]): row["median_us"] for row in rows if row["caller"] == "c"}
    assert medians == {
        (op, k, cache): us for op, k in bench_index.OPS for cache, us in (("hot", 1.0), ("cold", 2.0))
    }
    assert len(rows) == 2 * len(medians)


def test_the_forms_of_the_binary_tree_are_set_and_rebuilding_is_measured_for_updates_only():
    names = [REFERENCE, "binary-rebuild", "binary"]
    assert baselines.choose(None)[0][:3] == names
    candidates = [baselines.make(name, np.ones(LEAVES)) for name in names]
    assert [candidate.index.form for candidate in candidates] == ["element", "rebuild", "auto"]
    assert [candidate.ops == ("update",) for candidate in candidates] == [False, True, False]


# --- how it measures ----------------------------------------------------------------------------------


def test_each_call_has_other_slots_and_coming_back_brings_other_masses():
    inputs = bench_index.Inputs(LEAVES)
    slots, mass = inputs.update(8, 0)
    assert not np.array_equal(inputs.update(8, 1)[0], slots)
    again, other = inputs.update(8, len(inputs.pools(8)[0]))
    assert np.array_equal(again, slots) and not np.any(other == mass)


def test_inserts_follow_each_other_and_stay_inside_the_ring():
    firsts = [bench_index.Inputs(120).insert(n)[0] for n in range(4)]
    assert firsts == [0, 50, 0, 50]


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize(
    "share_s, cost_s", [(1.0, 1e-6), (1.0, 1e-3), (0.0, 1e-3), (-1.0, 1e-3), (0.01, 5.0)]
)
def test_a_plan_has_a_few_repetitions_and_keeps_to_its_share_beyond_them(share_s, cost_s, hot):
    repetitions, calls, warm = bench_index.plan(share_s, cost_s, 7, hot)
    assert 3 <= repetitions <= 7 and calls >= 1
    assert warm > 100 or not hot or share_s / cost_s < 1e5
    assert (repetitions, calls) == (3, 1) or repetitions * (calls + warm) * cost_s <= share_s


def test_ratios_are_paired_within_each_repetition():
    cell = bench_index.Cell("sample", 512, "hot", "python")
    ours, theirs = (
        [np.array([1.0]), np.array([10.0]), np.array([2.0])],
        [np.array([3.0]), np.array([30.0]), np.array([8.0])],
    )
    candidate = Candidate()
    candidate.name = "x"
    assert bench_index._row(candidate, cell, ours, theirs)["ratio_to_binary"] == 3.0


def test_the_crossover_lies_between_the_points_where_the_lines_cross():
    element = {k: {"median_us": float(k)} for k in (10, 100, 1000)}
    rebuild = {k: {"median_us": 300.0} for k in (10, 100, 1000)}
    assert bench_report.crossover(element, rebuild) == pytest.approx(300.0)
    assert bench_report.crossover(element, {}) is None
    assert bench_report.crossover(rebuild, element) is None


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["0", "-5", "49", "x", "999999999"])
def test_a_number_of_leaves_that_cannot_be_is_refused(capsys, leaves):
    assert "--leaves" in refusal(capsys, "--leaves", leaves)


def test_an_unknown_index_is_refused_with_the_nearest(capsys):
    assert "did you mean 'numpy'?" in refusal(capsys, "--indexes", "binary,nunpy")


def test_a_rival_that_is_not_installed_is_refused_when_asked_for_and_told_when_not(capsys, monkeypatch):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    assert "cpprb is not installed; pip install 'apex-mpi[bench]'" in refusal(capsys, "--indexes", "cpprb")
    names, left_out = baselines.choose(None)
    assert "cpprb" not in names and "cpprb: cpprb is not installed" in left_out and "python" in names


def test_a_rival_that_cannot_be_loaded_is_refused_when_asked_for_and_told_when_not(capsys, monkeypatch):
    def broken(name, mass):
        raise ImportError("undefined symbol: x\nmore")

    monkeypatch.setattr(baselines, "make", broken)
    assert "--indexes: binary: undefined symbol: x\n" in refusal(capsys, "--indexes", "binary")
    assert bench_index._fill(["binary"], LEAVES, must=False) == ([], ["binary: undefined symbol: x"])


def test_a_core_that_is_not_there_is_refused(capsys):
    assert "--core 99999" in refusal(capsys, "--core", "99999")


@pytest.mark.parametrize("option", ["--json", "--png"])
@pytest.mark.parametrize("place", ["/dev/null/file", "/proc/version/x"])
def test_a_file_that_cannot_be_written_is_refused(capsys, option, place):
    path = f"{place}.{option[2:]}"
    assert f"{option} {path} cannot be written" in refusal(capsys, option, path)


def test_asking_whether_a_file_can_be_written_leaves_nothing_behind(tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    for path in (kept, tmp_path / "rows.json"):
        with pytest.raises(ConfigError):
            bench_index.run(path, leaves=LEAVES, core=99999)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"] and kept.read_text() == "before"


def test_the_command_ends_with_status_0_and_prints_the_tables():
    code = "import sys, launch.bench.index as b; b.QUICK_S = 1.0; "
    code += "from launch.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["bench", "index", "--leaves", str(LEAVES), "--indexes", "binary", "--quick"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "called from Python, cold" in done.stdout and "Traceback" not in done.stderr


# --- the tree in plain Python -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1000])
def test_the_plain_tree_agrees_with_numpy_after_any_updates(size):
    rng = np.random.default_rng(size)
    mass = bench_index.masses(rng, size)
    tree = PythonTree(mass)
    for _ in range(20):
        slots, new = rng.integers(0, size, 30), bench_index.masses(rng, 30) * rng.integers(0, 2, 30)
        tree.update(*tree.prepare(slots, new))
        mass[slots] = new
        above_zero = mass[mass > 0.0]
        assert tree.sums[1] == pytest.approx(mass.sum(), rel=1e-12)
        assert tree.minima[1] == (above_zero.min() if above_zero.size else np.inf)
        assert np.array_equal(tree.sums[tree.width : tree.width + size], mass)


def test_the_plain_tree_finds_the_slot_that_the_cumulative_sum_finds():
    mass = bench_index.masses(np.random.default_rng(3), 777)
    tree = PythonTree(mass)
    targets = Strata(5).targets(2000, mass.sum())
    expected = np.searchsorted(np.cumsum(mass), targets, side="right")
    assert [tree.find_prefix(target) for target in targets.tolist()] == expected.tolist()


def test_the_plain_tree_draws_one_slot_from_each_stratum_with_its_probability():
    mass = bench_index.masses(np.random.default_rng(4), 100)
    slots, probability = PythonTree(mass).sample(512)
    ends, stratum = (
        np.cumsum(mass),
        mass.sum() / 512,
    )  # whichever point of its stratum is drawn: a slot ends after it begins
    assert (ends[slots] > stratum * np.arange(512) * (1 - 1e-12)).all()
    assert ((ends - mass)[slots] < stratum * np.arange(1, 513) * (1 + 1e-12)).all()
    assert np.allclose(probability, mass[slots] / mass.sum(), rtol=1e-12)


# --- the others, where they are installed -------------------------------------------------------------


def drawn_slots(candidate):
    drawn = candidate.sample(512)
    return np.asarray(drawn["indexes"] if isinstance(drawn, dict) else drawn[0]).astype(np.int64)


@pytest.mark.parametrize("name", ["torchrl-tree", "torchrl-sampler", "cpprb", "tianshou"])
def test_another_library_draws_what_was_updated_and_inserted(name):
    if baselines.choose(None)[0].count(name) == 0:
        pytest.skip(f"{name} is not installed")
    candidate = baselines.make(name, np.full(LEAVES, 1e-6))
    candidate.update(*candidate.prepare(np.array([7, 4000]), np.array([5.0, 2.0])))
    assert np.isin(drawn_slots(candidate), [7, 4000]).mean() > 0.9
    candidate.insert(*candidate.prepare_insert(100, np.full(50, 1e5)))
    slots = drawn_slots(candidate)
    assert np.ptp(slots) < 50 and slots.min() < (
        50 if name == "cpprb" else 150
    )  # cpprb puts it where its own ring goes on
