"""With ``--transport zmq`` nothing is unpickled.

Watched in every rank of a real run, and read from the source.
"""

import ast
import sys
from pathlib import Path

import pytest
from places import ROOT

from apex.run_folder import RunFolder

SMALL = [
    "run.log_period_s=0.2",
    "evaluator.episodes=2",
    "replay.min_size=200",
    "learner.batch_size=16",
    "run.max_learner_steps=40",
]

# Loaded by Python itself at the start of every process: whoever unpickles leaves a file that says who called.
# The pure Python unpickler is not watched: nobody reaches it but by asking for ``pickle._Unpickler`` by name.
WATCH = """
import os, sys, _pickle, pickle, traceback

def note(what):
    frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[:-2]]
    with open(os.path.join(FOLDER, f"unpickled-{os.getpid()}"), "a") as file:
        file.write(what + " " + " ".join(frames) + chr(10))

class Unpickler(_pickle.Unpickler):
    def load(self):
        note("load")
        return super().load()

def loads(data, **options):
    note("loads")
    return original_loads(data, **options)

def load(file, **options):
    note("load")
    return original_load(file, **options)

original_loads, original_load = _pickle.loads, _pickle.load
for module in (_pickle, pickle):
    module.loads, module.load, module.Unpickler = loads, load, Unpickler
sys.addaudithook(lambda event, args: note("find_class") if event == "pickle.find_class" else None)
open(os.path.join(FOLDER, f"watched-{os.getpid()}"), "w").close()
"""


@pytest.fixture
def watched(tmp_path, start):
    """Return ``watched(command)``, which returns the job's end, the processes that were watched, and the
    lines that they have left.
    """
    (tmp_path / "site").mkdir(), (tmp_path / "seen").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WATCH.replace("FOLDER", repr(str(tmp_path / "seen"))))

    def run(command: list) -> tuple[int, list[str]]:
        ended = start([sys.executable, *command], {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}).wait(120)
        assert ended.returncode == 0, ended.stderr[-3000:]
        lines = [
            line for path in (tmp_path / "seen").glob("unpickled-*") for line in path.read_text().splitlines()
        ]
        return len(list((tmp_path / "seen").glob("watched-*"))), lines

    return run


def test_no_rank_of_a_run_over_zmq_unpickles_anything_at_all(watched, tmp_path):
    values = [*SMALL, f"run.directory={tmp_path / 'runs'}"]
    command = ["-m", "launch.cli.main", "train", "cartpole", "--transport", "zmq", "--ranks", 4]
    processes, lines = watched([*command, *(text for value in values for text in ("--set", value))])
    result = RunFolder(tmp_path / "runs" / "latest").result()
    assert (result["transport"], result["ranks"], result["learner_steps"]) == ("zmq", 4, 40)
    assert processes >= 4, "not every rank was watched"
    assert lines == []


UNPICKLES = """
import zmq
from collections import Counter
context = zmq.Context()
here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
here.bind("inproc://x"), there.connect("inproc://x")
there.send_pyobj(Counter("abc"))
assert here.recv_pyobj() == Counter("abc")
"""


def test_the_watch_sees_what_is_unpickled(watched):
    processes, lines = watched(["-c", UNPICKLES])
    assert processes == 1 and {line.split()[0] for line in lines} == {"loads", "find_class"}


# --- the source -------------------------------------------------------------------------------------

UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "multiprocessing",
    "torch",
    "joblib",
}
CALLS = {"recv_pyobj", "recv_serialized", "loads", "load", "Unpickler", "eval", "exec"}
START = ["apex/transport/zmq.py", "apex/transport/zmq_world.py", "apex/transport/endpoints.py"]


def reachable() -> list[Path]:
    """Return the modules of transports that ``zmq`` mode loads."""
    found, todo = set(), [ROOT / name for name in START]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.startswith("apex.transport."):
                todo.append(ROOT / Path(*module.split(".")).with_suffix(".py"))
    return sorted(found)


@pytest.mark.parametrize("path", reachable(), ids=lambda path: path.name)
def test_no_module_of_zmq_mode_can_unpickle(path):
    tree = ast.parse(path.read_text())
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {
        (node.module or "").split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    }
    assert not names & UNPICKLERS
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for func in called:
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        of_json = (
            isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "json"
        )
        assert name not in CALLS or of_json, f"{path.name} calls {name}"


def test_the_modules_that_pickle_are_not_among_them():
    names = {path.name for path in reachable()}
    assert {"zmq.py", "zmq_link.py", "wire.py", "zmq_world.py"} <= names
    assert not any("pickle" in name for name in names)
