"""What a running job opens to others.

Its sockets, shared memory and temporary files, and what kill -9 leaves of them.
"""

import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from apex import leftovers
from launch.run import launchers

TRAIN = [sys.executable, "-m", "launch.cli.main", "train", "cartpole", "--ranks", "4"]
LISTENS = "0A"
TORCH_CACHE = "torchinductor_"  # for all of a user's programs; nothing of ours is in it


def sockets_of(pids) -> set[str]:
    """Return the inodes of the sockets of processes."""
    inodes = set()
    for pid in pids:
        links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
        inodes |= {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    return inodes


def on_network(pids) -> list[str]:
    """Return the addresses at which processes take connections over TCP."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    inodes = sockets_of(pids)
    return [row[1] for row in rows if row[3] == LISTENS and row[9] in inodes]


def on_host(pids) -> list[str]:
    """Return the names of the sockets of UNIX that processes have bound."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    inodes = sockets_of(pids)
    return sorted({row[7] for row in rows if len(row) > 7 and row[6] in inodes})


def is_private(path: Path) -> bool:
    """Whether nobody but its owner can open it, or enter a folder on the way to it."""
    return any(not stat.S_IMODE(each.lstat().st_mode) & 0o077 for each in (path, *path.parents))


@pytest.fixture(scope="module", params=["mpi", "zmq"])
def job(request, tmp_path_factory, start_for_module):
    """A run that trains, its transport, and its ranks."""
    folder = tmp_path_factory.mktemp("doors")
    command = [
        *TRAIN,
        "--transport",
        request.param,
        "--set",
        f"run.directory={folder / 'runs'}",
        "--set",
        "run.stop_at_target=false",
    ]
    running = start_for_module([*command, "--set", "run.log_period_s=0.2"])
    log = folder / "runs" / "latest" / "metrics.jsonl"
    running.wait_until(lambda: log.exists() and log.stat().st_size > 0, 60, "a row of the log")
    return running, request.param, [running.rank(rank) for rank in range(4)]


def test_ranks_take_no_connections_from_the_network(job):
    assert on_network(job[2]) == []


def test_sockets_of_the_host_are_in_a_folder_of_the_user_alone(job):
    names = on_host(job[2])
    assert all(name.startswith("/") for name in names), "an abstract socket has no owner"
    assert bool(names) == (job[1] == "zmq")
    folders = {Path(name).parent for name in names}
    assert all(
        stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.geteuid()
        for folder in folders
    )


def test_shared_memory_and_temporary_files_are_the_users_alone(job):
    running, transport, ranks = job
    maps = "\n".join(Path(f"/proc/{pid}/maps").read_text() for pid in ranks)
    mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line}
    names = [Path(name) for name in mapped if not name.endswith("(deleted)")]
    assert bool(names) == (transport == "mpi")
    made = [*running.temporary.rglob("*")]
    assert all(is_private(path) for path in [*names, *made])


def test_what_is_left_when_all_processes_of_a_job_are_killed_goes_with_the_next_start(
    job,
):  # last: it ends the job
    running, transport, ranks = job
    told = dict(
        item.split("=", 1)
        for item in Path(f"/proc/{ranks[0]}/environ").read_text().split("\0")
        if "=" in item
    )
    folder = Path(
        told["APEX_ENDPOINT"].removeprefix("ipc://") if transport == "zmq" else told[launchers._BACKING]
    )
    assert folder.is_dir()
    for pid in running.processes():
        os.kill(pid, signal.SIGKILL)
    running.wait(10)
    assert any(folder.iterdir()), "else this test shows nothing"
    if transport == "zmq":
        leftovers.remove_abandoned(leftovers.SOCKETS, folder.parent)
    else:
        with launchers.segments():
            pass
    assert not folder.exists()
    assert [path.name for path in running.temporary.iterdir() if not path.name.startswith(TORCH_CACHE)] == []
