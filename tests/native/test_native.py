"""The C code: its own tests under the sanitizers, how it is found and built, and the indexes over it."""

import copy
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import native
from native import _native
from replay_rank.index import make_index

FOLDER = Path(native.__file__).parent
COMPILER = os.environ.get("CC", "cc")
INDEXES = ["wide", "wide32", "binary", "rank"]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no C compiler {COMPILER!r}")
def test_the_c_tests_pass_under_the_sanitizers():
    # An outer make must not lend this one its job server or its flags.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    command = ["make", "-C", str(FOLDER), "test", f"CC={COMPILER}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for program in ("test_segment_tree", "test_tree_damage", "test_gather", "fuzz_segment_tree"):
        assert f"{program}: all passed" in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("setting", ["CC=no-such-cc -O2", "HOSTCC=no-such-cc"])
@pytest.mark.parametrize("goal", ["all", "test"])
def test_a_compiler_that_is_missing_is_named_in_one_line_with_what_to_install(tmp_path, setting, goal):
    folder = shutil.copytree(
        FOLDER, tmp_path / "native", ignore=shutil.ignore_patterns("build", "corpus", "*.so")
    )
    make = ["make", "-C", str(folder), "CC=true", setting]  # `true` is there
    done = subprocess.run([*make, goal], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    said = [line for line in (done.stdout + done.stderr).splitlines() if "directory" not in line]
    assert (
        len(said) == 1
        and "the C compiler 'no-such-cc' is missing; install one (Debian: apt install gcc)" in said[0]
    )
    assert not (folder / "build").exists()
    assert subprocess.run([*make, "clean"], capture_output=True).returncode == 0, "that needs no compiler"


def test_every_function_of_the_contract_is_used_by_the_module():
    declared = set(
        re.findall(r"^\w[^\n/]*?\b(segment_tree_\w+)\(", (FOLDER / "segment_tree.h").read_text(), re.M)
    )
    used = set(re.findall(r"\b(segment_tree_\w+)\(", (FOLDER / "module.c").read_text()))
    assert "segment_tree_draw" in declared
    assert declared - used == set()


def test_the_module_keeps_to_the_limited_api():
    assert Path(_native.__file__).name == "_native.abi3.so"
    with_python = [path for path in FOLDER.glob("*.[ch]") if "<Python.h>" in path.read_text()]
    assert [path.name for path in with_python] == ["arrays.h"], "one place says which part of Python is used"
    assert "#define Py_LIMITED_API 0x030B0000" in with_python[0].read_text()


def test_the_kinds_are_numbered_as_in_the_header():
    header = (FOLDER / "segment_tree.h").read_text()
    kinds = re.search(r"enum \{ (SEGMENT_TREE_WIDE64[^}]*?) \}", header)[1].split(", ")
    forms = re.search(r"enum \{ (BINARY_AUTO[^}]*?) \}", header)[1].split(", ")
    assert [getattr(native, kind.removeprefix("SEGMENT_TREE_")) for kind in kinds] == list(range(len(kinds)))
    assert list(native.FORMS) == [form.removeprefix("BINARY_").lower() for form in forms]


@pytest.mark.parametrize("content", [None, b"not a library"])
def test_a_missing_or_bad_module_says_how_to_build_it(tmp_path, content):
    (tmp_path / "native").mkdir()
    shutil.copy(FOLDER / "__init__.py", tmp_path / "native")
    if content is not None:
        (tmp_path / "native" / "_native.abi3.so").write_bytes(content)
    # -S: where the package is installed for editing, its finder would give the module that is missing here.
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import native"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "ImportError: the C part is missing or out of date" in done.stderr
    assert "run: make native" in done.stderr


@pytest.mark.parametrize("name", INDEXES)
def test_without_memory_the_index_says_so(name, monkeypatch):
    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(native, "Tree", no_memory)
    with pytest.raises(MemoryError, match="capacity 10"):
        make_index(name, 10)


class Bad:
    """A tree of which part 3 is bad."""

    def check(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("name", "part"),
    [("wide", "word 3 "), ("wide32", "word 3 "), ("binary", "node 3 "), ("rank", "block 3 ")],
)
def test_a_bad_part_is_named_by_what_it_is(name, part):
    index = make_index(name, 10)
    index._tree = Bad()
    with pytest.raises(AssertionError, match=part):
        index.check()


@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_native_index_refuses_to_be_duplicated(name, duplicate):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(make_index(name, 10))
