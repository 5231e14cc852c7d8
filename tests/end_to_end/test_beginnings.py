"""Ctrl-C in the first instants of a command.

One line and status 130, whatever is being imported, and nothing left behind.
"""

import sys

import pytest
from places import ROOT

# Loaded by Python itself: presses Ctrl-C at the moment at which a module begins to be imported.
SITECUSTOMIZE = """
import importlib.abc, os, signal, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError("what an import may make of it")

sys.meta_path.insert(0, Finder())
"""
RUN = ["train", "cartpole", "--transport", "local"]
COMMANDS = {
    "apex": [str(ROOT / "apex_mpi.py"), *RUN],
    "launch.cli.main": ["-m", "launch.cli.main", *RUN],
    "launch.run.spawn": ["-m", "launch.run.spawn", "-n", "2", "--", "true"],
}


@pytest.mark.parametrize(
    "command, module",
    [
        ("apex", "launch.cli.main"), ("launch.cli.main", "apex.config"),
        ("launch.cli.main", "gymnasium"), ("launch.run.spawn", "apex.config"),
    ],
)  # fmt: skip
def test_ctrl_c_while_modules_are_imported_ends_with_one_line(run_to_end, tmp_path, command, module):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "INTERRUPTED_AT": module}
    directory = tmp_path / "runs"
    settings = ["--set", f"run.directory={directory}"] if "train" in COMMANDS[command] else []
    ended = run_to_end([sys.executable, *COMMANDS[command], *settings], env)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "apex: interrupted\n")
    assert not directory.exists()
