"""Who imports whom, read from the source: the rooms stay apart."""

import ast
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

# Room -> the other rooms it may import.
ALLOWED = {
    "apex": set(),
    "actors": {"apex"},
    "learner": {"apex"},
    "replay_rank": {"apex", "native"},
    "native": set(),
    "launch": {"apex", "actors", "learner", "replay_rank"},
    "configs": set(),
}
ROOMS = set(ALLOWED)


def sources(*folders):
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path):
    return str(path.relative_to(ROOT))


def imported(path, in_strings=True):
    """Return the dotted names that a file imports.

    Statements anywhere in it and, unless told not to, module names in strings.
    """
    package = path.relative_to(ROOT).parent.parts
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{module}.{alias.name}" for alias in node.names}
        elif (
            in_strings
            and isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _is_module(node.value)
        ):
            names.add(node.value)
    return names


def _is_module(text):
    """Whether a string names a module of ours, as ``importlib`` or ``-m`` would take it."""
    if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text) or text.split(".")[0] not in ROOMS:
        return False
    path = ROOT / Path(*text.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def rooms_imported(path):
    return {name.split(".")[0] for name in imported(path)} & ROOMS


def packages_imported(path):
    return {name.split(".")[0] for name in imported(path)}


ALL = sources(*ROOMS)


def test_the_rooms_are_all_here_and_no_other_folder_holds_code():
    others = {"tests", "build"}
    found = {path.parent.name for path in ROOT.glob("*/*.py") if not path.parent.name.startswith(".")}
    assert {room for room in ROOMS if (ROOT / room).is_dir()} == ROOMS
    assert found - others <= ROOMS
    assert len(ALL) > 40


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_a_room_imports_only_the_rooms_it_may(path):
    room = path.relative_to(ROOT).parts[0]
    assert rooms_imported(path) <= ALLOWED[room] | {room}


@pytest.mark.parametrize("path", [p for p in ALL if "transport" not in p.parts], ids=name_of)
def test_only_transports_import_mpi4py_or_zmq(path):
    assert not packages_imported(path) & {"mpi4py", "zmq"}


def test_the_transports_are_where_mpi4py_is_imported():
    users = [path for path in ALL if packages_imported(path) & {"mpi4py", "zmq"}]
    assert users and all(name_of(path).startswith("apex/transport/") for path in users)


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def our_module(name, modules):
    """Return the module of ours that a dotted name leads to, or None.

    The rest of the name is in that module.
    """
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def in_a_circle(graph):
    """Return the nodes of a graph (node -> the nodes it leads to) that lead back to themselves."""
    reached = {node: set(others) for node, others in graph.items()}
    for middle in graph:
        for node in graph:
            if middle in reached[node]:
                reached[node] |= reached[middle]
    return {node for node, others in reached.items() if node in others}


def test_no_modules_import_each_other_in_a_circle():
    modules = {module_of(path) for path in ALL}
    graph = {}
    for path in ALL:
        found = {our_module(name, modules) for name in imported(path, in_strings=False)}
        graph[module_of(path)] = found - {None, module_of(path)}
    assert in_a_circle(graph) == set()


# The command stands on benchmarks, and these on what starts and follows processes.
LAUNCH_ROOMS = {"run": set(), "bench": {"run"}, "cli": {"run", "bench"}}


@pytest.mark.parametrize("room", LAUNCH_ROOMS)
def test_the_rooms_of_launch_stand_on_each_other_one_way(room):
    for path in sources(f"launch/{room}"):
        names = imported(
            path, in_strings=False
        )  # ranks are started by the command itself, which is no import
        others = {
            name.split(".")[1] for name in names if name.startswith("launch.") and "." in name
        } & LAUNCH_ROOMS.keys()
        assert others <= LAUNCH_ROOMS[room] | {room}, name_of(path)


def symbols_of(object_file):
    """Return what an object file of the C part defines, and what it takes from others."""
    lines = subprocess.run(
        ["nm", object_file], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    kinds = [line.split()[-2:] for line in lines]
    return {name for kind, name in kinds if kind in "TDRB"}, {name for kind, name in kinds if kind == "U"}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is missing")
def test_no_files_of_c_call_each_other_in_a_circle():
    objects = sorted((ROOT / "native" / "build").glob("*.o"))
    assert objects, "run: make native"
    symbols = {
        path.stem.removeprefix("avx2_").removeprefix("portable_"): symbols_of(path) for path in objects
    }
    graph = {
        name: {other for other in symbols if symbols[other][0] & needed} - {name}
        for name, (_, needed) in symbols.items()
    }
    assert len(graph) > 8 and not in_a_circle(graph)


def test_a_circle_is_found_however_long_it_is():
    assert in_a_circle({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == {"a", "b", "c"}
    assert not in_a_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


ON_TENSORS = {"replay_rank/index/_tensor.py", "replay_rank/index/torch.py", "replay_rank/index/rank_torch.py"}


@pytest.mark.parametrize(
    "path", [p for p in sources("replay_rank", "native") if name_of(p) not in ON_TENSORS], ids=name_of
)
def test_no_file_of_the_replay_rank_but_the_indexes_of_torch_imports_torch(path):
    assert "torch" not in packages_imported(path)


REPLAY_RANK_AT_WORK = """
import sys
import numpy as np
from apex.config import load
from apex.run_folder import RunFolder
from apex.schema import EnvSpec, limits
from apex.topology import make
from apex import loop
from launch.run import rank, roles
from launch.run.local import make_ports
config, spec = load("cartpole"), EnvSpec((4,), "float32", 1, 2)
topology = make(config)
port = make_ports(topology, limits(config, spec))[1]
role = roles.build(config, spec, topology, 1, port, RunFolder("."), "cartpole")
role.step()
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "program", ["import sys, replay_rank.service; print('torch' in sys.modules)", REPLAY_RANK_AT_WORK]
)
def test_a_replay_rank_at_work_has_not_loaded_torch(program):
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_importing_the_command_loads_no_heavy_library():
    heavy = {"torch", "mpi4py", "gymnasium", "matplotlib", "tensorboard", "rich"}
    program = f"import sys, launch.cli.main; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


# --- the reader of imports ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, found",
    [
        ("import launch.cli.main as m", "launch.cli.main"),
        ("def f():\n    from launch import rank", "launch.rank"),
        ("from . import n_step", "actors.n_step"),
        ("from .n_step import NStep", "actors.n_step.NStep"),
        ("from ..launch import x", "launch.x"),
        ("import importlib\nimportlib.import_module('launch.view')", "launch.view"),
        ("if True:\n    try:\n        import torch.nn\n    except ImportError: pass", "torch.nn"),
    ],
)
def test_imports_are_found_wherever_they_stand(tmp_path, monkeypatch, source, found):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for folder in ("actors", "launch"):
        (tmp_path / folder).mkdir()
    (tmp_path / "launch" / "view.py").touch()
    path = tmp_path / "actors" / "mine.py"
    path.write_text(source)
    assert found in imported(path)


def test_a_field_name_is_not_taken_for_a_module():
    assert (
        not _is_module("learner.batch_size") and _is_module("learner.importance") and _is_module("apex.envs")
    )


# --- floors ---------------------------------------------------------------------------------------------


def floors(graph):
    """Return the longest chain of a graph without circles: the number of its nodes."""

    @functools.lru_cache(None)
    def below(node):
        return 1 + max(map(below, graph[node]), default=0)

    return max(map(below, graph))


@pytest.mark.parametrize("folder, most", [("launch", 4), ("apex/transport", 3)])
def test_no_chain_of_imports_inside_a_folder_has_more_floors(folder, most):
    paths = {module_of(path): path for path in sources(folder)}
    graph = {}
    for module, path in paths.items():
        graph[module] = {our_module(name, paths) for name in imported(path, in_strings=False)} - {
            None,
            module,
        }
    assert floors(graph) <= most


def test_floors_are_counted_along_the_longest_way():
    assert floors({"a": {"b", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}) == 4
