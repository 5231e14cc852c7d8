"""Faults that tests inject into the ranks of a real run."""

import json
import shutil
import subprocess

import pytest
from places import ROOT

# Loaded by Python itself at the start of every rank: makes a method of one rank fail or hang, or ranks start
# late.
SITECUSTOMIZE = """
import importlib.abc, importlib.util, json, os, sys, threading, time

fault = json.loads(os.environ.get("FAULT", "{}"))

def fail():
    with open(fault["file"], "w") as file:
        file.write(str(time.time()))
    if fault["how"] == "hangs":
        for _ in range(1000):
            time.sleep(1)
    raise RuntimeError("injected")

def patch(module):
    cls, calls = getattr(module, fault["cls"]), [0]
    whole = getattr(cls, fault["method"])
    def method(self, *args):
        calls[0] += 1
        if calls[0] == fault["after"]:
            threading.Thread(target=fail).start() if fault["how"] == "raises in a thread" else fail()
        return whole(self, *args)
    setattr(cls, fault["method"], method)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == fault["module"]:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), patch(module))
            return spec

rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("APEX_RANK"))
time.sleep(fault.get("late_too", {}).get(rank, 0))
if rank == fault.get("rank"):
    time.sleep(fault.get("late_s", 0))
    if "module" in fault:
        sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 48 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=48m", "tmpfs", disk], capture_output=True
        ).returncode
    ):
        pytest.skip("a small disk takes the right to mount one")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture
def injected(tmp_path):
    """The file that holds when the injected fault happened, once it has."""
    return tmp_path / "injected"


@pytest.fixture
def inject(tmp_path, injected):
    """Return ``inject(rank, ...) -> env`` of a job in which a rank fails; see ``SITECUSTOMIZE``."""

    def env_of(rank: int, **fault) -> dict[str, str]:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
        return {
            "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}",
            "FAULT": json.dumps({"rank": str(rank), "file": str(injected), **fault}),
        }

    return env_of
