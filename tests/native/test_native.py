"""The C code: its own tests under the sanitizers, and the ctypes declarations against the headers."""

import copy
import gc
import os
import pickle
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

import native
from replay_rank.index import make_index

FOLDER = Path(native.__file__).parent
COMPILER = os.environ.get("CC", "cc")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no C compiler {COMPILER!r}")
def test_the_c_tests_pass_under_the_sanitizers():
    # An outer make must not lend this one its job server or its flags.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    command = ["make", "-C", str(FOLDER), "test", f"CC={COMPILER}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all passed" in done.stdout


def test_every_function_of_the_headers_is_declared_to_ctypes():
    headers = "".join(path.read_text() for path in sorted(FOLDER.glob("*.h")))
    functions = re.findall(r"^\w[^\n/]*?\b(\w+)\(([^()]*?)\);", headers, re.M | re.S)
    declared = {name: len(arguments) for name, (_, arguments) in native._PROTOTYPES.items()}
    assert declared == {name: arguments.count(",") + 1 for name, arguments in functions}


def test_the_library_is_loaded_once():
    assert native.library() is native.library()


def test_a_missing_library_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_LIBRARY", tmp_path / "libapex_native.so")
    with pytest.raises(ImportError, match="run: make native"):
        native.library.__wrapped__()


@pytest.fixture
def watched(monkeypatch):
    """The library with `destroyed`, the trees freed so far, and functions that can be replaced."""
    real = native.library()
    lib = SimpleNamespace(**{name: getattr(real, name) for name in native._PROTOTYPES})
    lib.destroyed = []

    def destroy(tree):
        lib.destroyed.append(tree)
        real.segment_tree_destroy(tree)

    lib.segment_tree_destroy = destroy
    monkeypatch.setattr(native, "library", lambda: lib)
    return lib


def test_a_tree_is_freed_once_when_its_index_is_dropped(watched):
    index = make_index("binary", 10)
    tree = index._tree
    assert watched.destroyed == []
    del index
    gc.collect()
    assert watched.destroyed == [tree]


def test_without_memory_the_index_says_so(watched):
    watched.segment_tree_create = lambda capacity: None
    with pytest.raises(MemoryError, match="capacity 10"):
        make_index("binary", 10)


def test_a_bad_node_is_named(watched):
    watched.segment_tree_check = lambda tree: 3
    with pytest.raises(AssertionError, match="node 3 "):
        make_index("binary", 10).check()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_native_index_refuses_to_be_duplicated(duplicate):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(make_index("binary", 10))
