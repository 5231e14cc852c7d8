"""The Python module over `segment_tree.h`.

Which arrays it takes, what it raises, and what it leaves behind.
"""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import native

CAPACITY = 6
KINDS = [native.WIDE64, native.WIDE32, native.BINARY, native.RANKED]


def filled_tree(kind: int = native.WIDE64) -> native.Tree:
    tree = native.Tree(kind, CAPACITY, 0.6)
    assert tree.load(np.array([0.0, 1.0, 2.0, 0.0, 4.0, 8.0])) == (tree.total, tree.minimum)
    return tree


def saved(tree: native.Tree) -> list[float]:
    mass = np.empty(CAPACITY)
    tree.save(mass)
    return mass.tolist()


def calls() -> dict[str, tuple[list[np.ndarray], int]]:
    """Good arrays for each method, and the number of the first that is written to."""
    slots, mass, targets = np.array([1, 2, 5]), np.array([1.0, 3.0, 5.0]), np.array([0.0, 1.0, 1.5])
    found, found_mass, probability = np.full(3, 7), np.full(3, 7.0), np.full(3, 7.0)
    return {
        "set": ([slots, mass], 2),
        "set_range": ([mass], 1),
        "get": ([slots, found_mass], 1),
        "find_prefix": ([targets, found, found_mass], 1),
        "draw": ([np.array([5], np.uint64), found, found_mass, probability], 0),
        "save": ([np.full(CAPACITY, 7.0)], 0),
        "load": ([np.full(CAPACITY, 9.0)], 1),
    }


def call(tree: native.Tree, method: str, arrays: list):
    return getattr(tree, method)(*{"set_range": [1], "draw": [3]}.get(method, []), *arrays)


def unaligned(array: np.ndarray) -> np.ndarray:
    shifted = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
    shifted[:] = array
    assert not shifted.flags.aligned
    return shifted


def read_only(array: np.ndarray) -> np.ndarray:
    copied = array.copy()
    copied.flags.writeable = False
    return copied


SPOILED = {
    "of half the size": lambda array: array.astype(
        {"i": np.int32, "u": np.uint32, "f": np.float32}[array.dtype.kind]
    ),
    "of another type": lambda array: array.view(np.float64 if array.dtype.kind == "i" else np.int64),
    "of the other sign": lambda array: array.view(np.int64 if array.dtype.kind == "u" else np.uint64),
    "of times": lambda array: array.view("m8[s]"),
    "of objects": lambda array: array.astype(object),
    "of bytes": lambda array: array.view(np.uint8),
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "unaligned": unaligned,
    "strided": lambda array: np.repeat(array, 2)[::2] if array.size > 1 else np.stack([array, array], 1),
    "backwards": lambda array: array[::-1] if array.size > 1 else array.reshape(1, 1),
    "two-dimensional": lambda array: array.reshape(1, -1),
    "of no dimension": lambda array: array[0:1].reshape(()),
    "a list": lambda array: array.tolist(),
    "a number": lambda array: array[0].item(),
    "missing": lambda array: None,
    "longer": lambda array: np.append(array, array[:1]),
    "empty": lambda array: array[:0],
}
CASES = [
    (method, at, spoil)
    for method, (arrays, _) in calls().items()
    for at in range(len(arrays))
    for spoil in SPOILED
]
CASES += [
    (method, at, "read-only")
    for method, (arrays, first) in calls().items()
    for at in range(first, len(arrays))
]
CASES = [
    case for case in CASES if case[0] != "set_range" or case[2] not in ("longer", "empty")
]  # any length is right there


@pytest.mark.parametrize(("method", "at", "spoil"), CASES)
def test_an_unfit_array_is_told_and_nothing_is_changed(method, at, spoil):
    tree, (arrays, _) = filled_tree(), calls()[method]
    spoiled = read_only(arrays[at]) if spoil == "read-only" else SPOILED[spoil](arrays[at])
    arrays[at] = spoiled
    before = saved(tree), [np.array(array).tolist() for array in arrays]
    with pytest.raises(native.Unfit):
        call(tree, method, arrays)
    assert (saved(tree), [np.array(array).tolist() for array in arrays]) == before
    assert tree.check() == -1


@pytest.mark.parametrize("kind", KINDS)
def test_good_arrays_are_taken_read_only_ones_too(kind):
    for method, (arrays, first) in calls().items():
        arrays[:first] = [read_only(array) for array in arrays[:first]]
        tree = filled_tree(kind)
        result = call(tree, method, arrays)
        assert result == ((tree.total, tree.minimum) if method in ("set", "set_range", "load") else None)
    found = calls()["find_prefix"][0]
    filled_tree(kind).find_prefix(*found)
    assert (found[1] < CAPACITY).all() and (found[2] > 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "at", "bad", "row"),
    [
        ("set", 0, -1, 2), ("set", 0, CAPACITY, 1), ("set", 1, np.nan, 1), ("set", 1, np.inf, 0),
        ("set", 1, -5e-324, 2),
        ("set_range", 0, np.nan, 2), ("get", 0, CAPACITY, 2), ("get", 0, -1, 0), ("load", 0, -np.inf, 5),
        ("find_prefix", 0, np.nan, 1), ("find_prefix", 0, -1.0, 0),
    ],
)  # fmt: skip
def test_a_refused_row_is_named_and_nothing_is_changed(kind, method, at, bad, row):
    tree, (arrays, first) = filled_tree(kind), calls()[method]
    arrays[at][row] = bad
    before = saved(tree), [array.tolist() for array in arrays[first:]], tree.total, tree.minimum
    with pytest.raises(native.Refused) as refused:
        call(tree, method, arrays)
    assert refused.value.args == (row,)
    assert (saved(tree), [array.tolist() for array in arrays[first:]], tree.total, tree.minimum) == before


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_tree_refuses_to_draw_and_the_stream_stays(kind):
    arrays, _ = calls()["draw"]
    with pytest.raises(native.Refused):
        native.Tree(kind, CAPACITY).draw(3, *arrays)
    assert [array.tolist() for array in arrays] == [[5], [7] * 3, [7.0] * 3, [7.0] * 3]


def test_a_range_that_does_not_fit_is_refused():
    for first, size, row in ((-1, 2, 0), (CAPACITY, 2, 0), (2, CAPACITY + 1, CAPACITY)):
        with pytest.raises(native.Refused) as refused:
            filled_tree().set_range(first, np.ones(size))
        assert refused.value.args == (row,)


@pytest.mark.parametrize("k", [0, 2, 4, -1, 2**40])
def test_arrays_of_another_length_than_the_number_of_draws_are_unfit(k):
    arrays, _ = calls()["draw"]
    with pytest.raises(native.Unfit, match="number of draws"):
        filled_tree().draw(k, *arrays)
    assert [array.tolist() for array in arrays] == [[5], [7] * 3, [7.0] * 3, [7.0] * 3]


def test_an_empty_array_may_lie_anywhere():
    tree = filled_tree()
    slots, mass = (np.empty(1, np.uint8)[1:].view(dtype) for dtype in (np.int64, np.float64))
    assert tree.set(slots, mass) == tree.set_range(0, mass) == (tree.total, tree.minimum)
    tree.get(slots, mass)
    tree.find_prefix(mass, slots, mass.copy())


def test_wrong_arguments_are_told():
    tree, mass = filled_tree(), np.ones(2)
    for method in calls():
        with pytest.raises(TypeError):
            getattr(tree, method)()
        with pytest.raises(TypeError):
            getattr(tree, method)(*[mass] * 5)
    with pytest.raises(TypeError):
        tree.set_range("1", mass)
    with pytest.raises(OverflowError):
        tree.set_range(2**63, mass)
    with pytest.raises(ValueError, match="form"):
        tree.binary_form(1, 1)
    with pytest.raises(AttributeError):
        tree.total = 1.0


def test_errors_are_what_callers_may_catch():
    assert issubclass(native.Refused, ValueError) and issubclass(native.Unfit, TypeError)


@pytest.mark.parametrize(
    "arguments",
    [(9, 8), (-1, 8), (0, 0), (0, -1), (0, 2**62), (3, 8, -1.0), (3, 8, float("nan")), (2, 2**57)],
)
def test_an_impossible_tree_is_not_made(arguments):
    with pytest.raises(MemoryError):
        native.Tree(*arguments)


def test_a_tree_is_made_by_position_and_by_name():
    named = native.Tree(kind=native.RANKED, capacity=2, alpha=1.0, portable=True)
    assert named.load(np.array([1.0, 2.0])) == (1.5, 0.5)
    assert native.Tree(native.WIDE64, 2, portable=True).backend == "portable"
    for arguments, names in (((), {}), ((0,), {}), (("0", 8), {}), ((0, 8.5), {}), ((0, 8), {"beta": 1.0})):
        with pytest.raises(TypeError):
            native.Tree(*arguments, **names)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_tree_refuses_to_be_duplicated(duplicate):
    with pytest.raises(TypeError):
        duplicate(filled_tree())


LEAKS = """
import sys
import numpy as np
import native
from test_module import calls, call, filled_tree, SPOILED

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def attempts():
    for kind in range(4):
        tree = filled_tree(kind)
        for method, (arrays, first) in calls().items():
            yield tree, method, arrays
            for at in range(len(arrays)):
                for bad in (arrays[at][::2], arrays[at].astype(object), None, arrays[at].reshape(1, -1)):
                    yield tree, method, arrays[:at] + [bad] + arrays[at + 1:]
            refused = [array.copy() for array in arrays]
            refused[0][-1] = -1 if method != "draw" else 0
            yield tree, method, refused
            yield tree, method, arrays + arrays

def repeat(times, tree, method, arrays):
    for _ in range(times):
        try:
            call(tree, method, arrays)
        except (TypeError, ValueError):
            pass

everything = list(attempts())
for one in everything:
    repeat(100, *one)
counted = [array for _, _, arrays in everything for array in arrays if array is not None]
types = [native.Tree, native.Refused, native.Unfit]
before = resident(), sys.getallocatedblocks(), [sys.getrefcount(a) for a in counted + types]
for one in everything:
    repeat(TIMES, *one)
    one[0].check(), one[0].total, one[0].minimum, one[0].nbytes, one[0].backend
for _ in range(TIMES):
    native.Tree(0, 9)
    try:
        native.Tree(0, 0)
    except MemoryError:
        pass
    try:
        native.gather_rows(counted[0], counted[0], 8, counted[0])
    except TypeError:
        pass
after = resident(), sys.getallocatedblocks(), [sys.getrefcount(a) for a in counted + types]
assert after[2] == before[2], "references are lost or kept"
assert after[1] - before[1] < 200, f"{after[1] - before[1]} blocks of memory are kept"
assert after[0] - before[0] < 4 << 20, f"{after[0] - before[0]} bytes are kept"
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_calls_good_and_bad_leave_no_reference_and_no_memory_behind(run_to_end):
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nTIMES = 3000\n{LEAKS}"
    ended = run_to_end([sys.executable, "-c", code])
    assert ended.returncode == 0, ended.stderr


DROPS = """
import native
for kind in range(4):
    for _ in range(30):
        tree = native.Tree(kind, 2_000_000)
        assert tree.nbytes > 8 << 20
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
assert peak < 250 << 10, f"{peak} kB at the most"
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")
def test_a_dropped_tree_gives_its_memory_back(run_to_end):
    nothing_kept = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TOP_PAD_": "0"}  # by the C library itself
    ended = run_to_end([sys.executable, "-c", DROPS], nothing_kept)
    assert ended.returncode == 0, ended.stderr


NO_NUMPY = """
import array, sys, native
tree = native.Tree(native.WIDE64, 2)
assert tree.load(array.array("d", [1.0, 2.0])) == (3.0, 1.0)
assert "numpy" not in sys.modules
"""


def test_the_module_needs_no_numpy():
    subprocess.run([sys.executable, "-c", NO_NUMPY], check=True, cwd=Path(native.__file__).parents[1])


def test_an_output_that_shares_memory_with_another_array_is_unfit():
    tree, memory = filled_tree(), np.zeros(3 * 8, np.int64)
    targets, slots, mass = memory[:8].view(np.float64), memory[8:16], memory[16:].view(np.float64)
    tree.find_prefix(targets, slots, mass)
    as_mass = slots.view(np.float64)
    for arrays in (
        (targets, slots, as_mass),
        (targets, slots, memory[15:23].view(np.float64)),
        (as_mass, slots, mass),
    ):
        with pytest.raises(native.Unfit, match="share memory"):
            tree.find_prefix(*arrays)
