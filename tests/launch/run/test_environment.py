"""The environment of what this program starts."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from places import ROOT

from apex import processes


def test_what_the_user_has_set_wins_over_what_is_needed():
    made = processes.environment_for({"A": "needed", "B": "needed"}, {"B": "user", "C": "user"})
    assert {name: made[name] for name in "ABC"} == {"A": "needed", "B": "user", "C": "user"}


def test_our_modules_are_found_from_any_folder_before_those_of_the_user(monkeypatch, tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "main.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = "import launch.cli.main, sys; print(launch.cli.main.__file__, sys.path)"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(
        command, env=processes.environment_for({}), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(ROOT / "launch" / "cli" / "main.py")) and str(tmp_path) in done.stdout


def test_without_a_path_of_the_users_there_is_only_ours(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert processes.environment_for({})["PYTHONPATH"] == str(ROOT)
    assert "PYTHONPATH" not in os.environ


def version_of_mpirun(python) -> str:
    """Return what the mpirun beside a Python says, started as a run starts it, where PATH does not lead to
    it.
    """
    program = """if True:
        import subprocess
        from apex import processes
        from launch.run import launchers
        command = [launchers.find_mpirun(), "--version"]
        said = subprocess.run(command, env=processes.environment_for({}), capture_output=True, text=True)
        print(said.stdout + said.stderr)
    """
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(Path(numpy.__file__).parents[1]))),
    }
    return subprocess.run(
        [python, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_an_mpirun_finds_the_programs_beside_it_where_the_environment_is_not_activated(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    beside = tmp_path / "venv" / "bin"
    for name, line in (("mpirun", 'starter-of-ranks "$@"'), ("starter-of-ranks", 'echo "started with $@"')):
        (beside / name).write_text(f"#!/bin/sh\n{line}\n")
        (beside / name).chmod(0o755)
    assert version_of_mpirun(beside / "python") == "started with --version\n\n"


def test_the_mpirun_of_intel_s_wheel_starts_where_the_environment_is_not_activated():
    if not (Path(sys.executable).parent / "mpiexec.hydra").is_file():
        pytest.skip("the wheel impi-rt is not installed beside this Python")
    assert "Intel(R) MPI Library" in version_of_mpirun(sys.executable)


def test_a_path_that_leads_to_the_environment_already_stays_as_it_is():
    path = os.pathsep.join(("/first", str(Path(sys.executable).parent)))
    assert processes.environment_for({}, {"PATH": path})["PATH"] == path
