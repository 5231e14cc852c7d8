"""The environment of what this program starts."""

import os
import subprocess
import sys
from pathlib import Path

from launch import job

ROOT = Path(__file__).resolve().parents[2]


def test_what_the_user_has_set_wins_over_what_is_needed():
    made = job.environment_for({"A": "needed", "B": "needed"}, {"B": "user", "C": "user"})
    assert {name: made[name] for name in "ABC"} == {"A": "needed", "B": "user", "C": "user"}


def test_our_modules_are_found_from_any_folder_before_those_of_the_user(monkeypatch, tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "main.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = "import launch.main, sys; print(launch.main.__file__, sys.path)"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=job.environment_for({}), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(ROOT / "launch" / "main.py")) and str(tmp_path) in done.stdout


def test_without_a_path_of_the_users_there_is_only_ours(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert job.environment_for({})["PYTHONPATH"] == str(ROOT)
    assert "PYTHONPATH" not in os.environ
