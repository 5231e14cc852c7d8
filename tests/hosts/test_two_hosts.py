"""The two hosts themselves: they are apart, and nothing of them stays."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import HELPERS, ROOT

SEEN = "[os.uname().nodename, os.readlink('/proc/self/ns/pid'), os.listdir('/dev/shm')]"
WHO = f"import json, os; print(json.dumps({SEEN}))"
LEND = """
import json
from mpi4py import MPI
from apex.transport.shared_memory import identity, make_page, neighbours
comm = MPI.COMM_WORLD
near = neighbours(list(range(comm.size)), comm.rank, make_page(comm.size, 1), comm.allgather)
told = comm.gather([MPI.Get_processor_name(), identity(), sorted(near)])
if told:
    print(json.dumps(told))
"""
# Killed while there are hosts with something running on each.
HOLD = """
import subprocess, sys, time
from pathlib import Path
from two_hosts import TwoHosts
hosts = TwoHosts(Path(sys.argv[1]), Path("/"), "NONE")
for host in (0, 1):
    subprocess.Popen(hosts.on(host, ["sleep", sys.argv[2]]))
print("up", flush=True)
time.sleep(1000)
"""


def test_each_host_has_its_own_name_processes_and_shared_memory(hosts, run_to_end):
    here, there = (
        json.loads(run_to_end(hosts.on(host, [sys.executable, "-c", WHO])).stdout) for host in (0, 1)
    )
    assert (here[0], there[0]) == ("apex-a", "apex-b")
    assert len({here[1], there[1], os.readlink("/proc/self/ns/pid")}) == 3
    assert here[2] == there[2] == []


def test_ssh_leads_to_the_other_host_with_a_clean_environment(hosts, run_to_end):
    command = hosts.over_ssh(1, ["sh", "-c", "uname -n; pwd; echo $PYTHONPATH; exit 3"])
    ended = run_to_end(hosts.on(0, command))
    assert ended.returncode == 3
    assert ended.stdout.splitlines() == ["apex-b", str(ROOT), ""]


def test_ranks_lend_memory_to_those_of_their_own_host_and_to_no_others(mpirun_command, ssh, run_to_end):
    ended = run_to_end([*mpirun_command((3, 2), "--map-by", "node"), sys.executable, "-c", LEND], ssh)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert [name for name, _, _ in told] == ["apex-a", "apex-b", "apex-a", "apex-b", "apex-a"]
    assert [here for _, _, here in told] == [[2, 4], [3], [0, 4], [1], [0, 2]]
    assert len({identity for _, identity, _ in told} - {""}) == 2


@pytest.mark.usefixtures("hosts")  # there can be some
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_on_a_host_survives_the_process_that_made_it(tmp_path, number):
    seconds = f"{time.time_ns()}"  # an argument that no other process has
    maker = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path, seconds],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(HELPERS)},
    )
    assert maker.stdout.readline() == b"up\n"
    _until(lambda: len(_sleeping(seconds)) == 2)
    maker.send_signal(number)
    maker.communicate()
    _until(lambda: not _sleeping(seconds))


def _sleeping(seconds: str) -> list[str]:
    """Return the processes that sleep for so long."""
    return [
        path for path in Path("/proc").glob("[0-9]*/cmdline") if _read(path) == f"sleep\0{seconds}\0".encode()
    ]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""


def _until(holds, limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
