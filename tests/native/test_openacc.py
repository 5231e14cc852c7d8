"""The OpenACC forms of the binary tree: built from the same source, and equal to the plain one.

With an NVIDIA card: `make native ACC=nvptx` (or `CC=nvc ACC=1`), then
`python -m pytest tests/native/test_openacc.py tests/conformance -k binary`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import native

ROOT = Path(native.__file__).resolve().parents[1]
OFFLOAD = ["-fopenacc", "-foffload=nvptx-none", "-foffload-options=nvptx-none=-misa=sm_80"]
COMPARE = """
import numpy as np
import native
from replay_rank.index import make_index
tree, oracle = make_index("binary", 5000), make_index("numpy", 5000)
make_index("binary", 5000)
rng = np.random.default_rng(0)
for k in (1, 10, 700, 5000, 9000):
    slots, mass = rng.integers(0, 5000, k), rng.random(k)
    assert tree.set(slots, mass) == oracle.set(slots, mass)
    assert tree.set_range(4990, mass[:20]) == oracle.set_range(4990, mass[:20])
    targets = rng.random(600) * tree.total
    assert all((a == b).all() for a, b in zip(tree.find_prefix(targets), oracle.find_prefix(targets)))
tree.check()
print(native.FOR_DEVICE, tree.backend)
"""

# A plugin of pytest; it looks at what the tests have loaded and loads nothing before them.
TOLD_AT_THE_END = """
import pathlib
import sys

def pytest_terminal_summary(terminalreporter):
    tree = sys.modules["native"].Tree(sys.modules["native"].BINARY, 1)
    folder = pathlib.Path(sys.modules["native"].__file__).parent
    terminalreporter.write_line(f"tested {folder}: {tree.backend}")
"""


def links(folder, *flags):
    """Whether the compiler makes a shared library with these flags."""
    (folder / "empty.c").write_text("int nothing;\n")
    command = ["gcc", *flags, "-fPIC", "-shared", "empty.c", "-o", "empty.so"]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode == 0


def build(folder, acc):
    """Build the C part with ACC=acc in a copy of native/ inside `folder`."""
    shutil.copytree(
        ROOT / "native", folder / "native", ignore=shutil.ignore_patterns("build", "*.so", "__pycache__")
    )
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    command = ["make", "-C", str(folder / "native"), f"ACC={acc}", "CC=gcc", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(folder, *arguments, **environment):
    """Run Python with the native/ of `folder` before that of this clone."""
    paths = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    if not links(folder, "-fopenacc", "-foffload=disable"):
        pytest.skip("gcc here has no OpenACC")
    return build(folder, "host")


@pytest.fixture(scope="module")
def nvptx(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvptx")
    if not links(folder, *OFFLOAD):
        pytest.skip("gcc here cannot compile for NVIDIA cards (Debian: apt install gcc-12-offload-nvptx)")
    return build(folder, "nvptx")


def test_the_host_form_equals_the_oracle_to_the_last_bit(host):
    done = run(host, "-c", COMPARE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 openacc host\n", "")


def test_the_host_form_runs_on_the_host_whatever_the_environment_asks_for(host):
    done = run(host, "-c", COMPARE, ACC_DEVICE_TYPE="nvidia")
    assert (done.returncode, done.stdout) == (0, "0 openacc host\n"), done.stderr


@pytest.mark.slow
def test_the_host_form_passes_the_conformance_suite(host):
    (host / "told_at_the_end.py").write_text(TOLD_AT_THE_END)
    suite = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={host}",
        str(ROOT / "tests/conformance/test_index.py"),
    ]
    done = run(host, *suite, "-k", "TestBinary", "--rootdir", str(ROOT), "-p", "told_at_the_end")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
    assert f"tested {host / 'native'}: openacc host" in done.stdout, done.stdout


def test_the_nvptx_form_holds_code_for_the_card(nvptx):
    assert re.search(
        rb"\.target\s+sm_\d\d", (nvptx / "native" / "_native.abi3.so").read_bytes()
    )  # as every PTX text has it


@pytest.mark.parametrize(
    "asked", ["", "nvidia"], ids=["by default", "where the environment insists on a card"]
)
def test_without_a_working_card_the_nvptx_form_falls_back_with_one_warning(nvptx, asked):
    done = run(nvptx, "-c", COMPARE, ACC_DEVICE_TYPE=asked, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (0, "1 openacc host\n"), done.stderr
    assert done.stderr.count("no accelerator for the binary tree") == 1


def test_on_a_card_the_nvptx_form_equals_the_oracle_to_the_last_bit(nvptx):
    tried = run(nvptx, "-m", "native.accelerator")
    if tried.returncode != 0 and "there is no device" in tried.stderr:
        pytest.skip("there is no NVIDIA card; with one, run this file again")
    assert tried.returncode == 0, tried.stderr
    done = run(nvptx, "-c", COMPARE)
    assert (done.returncode, done.stdout) == (0, "1 openacc device\n"), done.stderr


def test_an_unknown_form_is_refused_in_one_line():
    done = subprocess.run(["make", "-C", str(ROOT / "native"), "ACC=cuda"], capture_output=True, text=True)
    assert done.returncode != 0 and "ACC=cuda is unknown; ACC is host or nvptx" in done.stderr
