"""How a process that takes a lost actor's place is started."""

import os
import signal
import subprocess
from pathlib import Path

from launch.run import world


def test_a_stop_signal_that_comes_while_it_starts_does_not_end_it(tmp_path):
    (tmp_path / "mpi4py.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); raise SystemExit('it goes on')"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    program, root = world.replacement_command(), repr(str(Path(world.__file__).resolve().parents[2]))
    program[-1] = program[-1].replace(
        f"[{root}]", f"[{str(tmp_path)!r}, {root}]"
    )  # whose mpi4py is found first
    ended = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode != -signal.SIGUSR1 and "it goes on" in ended.stderr
