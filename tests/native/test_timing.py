"""Calls timed from C: compiled when asked for, with the functions of the loaded extension."""

import re
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest

import native
from native import timing
from replay_rank.index import make_index

FOLDER = native.LIBRARY.parent
SLOTS, MASS = np.arange(0, 180, 3), np.arange(1.0, 61.0)

needs_compiler = pytest.mark.skipif(
    not (shutil.which("make") and shutil.which("cc")), reason="there is no C compiler"
)


def test_the_shipped_extension_holds_no_code_of_the_benchmark():
    assert b"time_calls" not in native.LIBRARY.read_bytes()


@needs_compiler
@pytest.mark.parametrize("name", ["wide", "wide32", "binary", "rank"])
@pytest.mark.parametrize("op", ["insert", "update", "sample", "step"])
def test_every_call_is_timed_and_the_tree_stays_right(name, op):
    index = make_index(name, 700)
    index.set(np.arange(700), np.ones(700))
    before = index.save()
    us = index.timed_from_c()(op, 20, 7, 1000, SLOTS, MASS, 3)
    assert us.shape == (7,) and us.dtype == np.float64 and (us > 0).all()
    index.check()
    assert (index.save() == before).all() == (op == "sample")


@needs_compiler
@pytest.mark.parametrize("op, k, rows", [("nothing", 1, 60), ("update", 61, 60), ("insert", 20, 59)])
def test_impossible_calls_raise_and_change_nothing(op, k, rows):
    index = make_index("wide", 200)
    with pytest.raises(ValueError, match=f"cannot time {op} of {k} rows"):
        index.timed_from_c()(op, k, 1, 0, SLOTS, MASS[:rows], 0)
    assert index.total == 0.0


def test_without_a_compiler_a_warning_says_so_once(monkeypatch):
    monkeypatch.setenv("PATH", "")
    timing.load.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no calls are timed from C"):
            assert timing.load() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert timing.load() is None
    finally:
        timing.load.cache_clear()


def test_no_two_files_of_c_have_a_static_function_of_the_same_name():
    definition = re.compile(r"^static [^=;()]*?\b(\w+)\(", re.M)
    names = Counter(name for path in FOLDER.glob("*.c") for name in set(definition.findall(path.read_text())))
    assert {name for name, count in names.items() if count > 1} == set()
