"""Jobs over two hosts on one machine (see ``two_hosts``).

Where there can be none the tests are skipped and say why.
"""

import itertools
import shlex
import sys
from pathlib import Path

import pytest
from places import HELPERS, ROOT
from two_hosts import ADDRESSES, CannotMakeHosts, TwoHosts

from launch.run.launchers import find_mpirun

pytest.register_assert_rewrite("stress_over_hosts")
BOTH = """{first} & first=$!
{second} & second=$!
wait $first; status=$?
wait $second || exit
exit $status"""
MARK = "JOB_OF_TEST"  # by which a job of ``tests/conftest.py`` knows its processes


def pytest_collection_modifyitems(items):
    """All tests of this folder, and no others, can be chosen by ``-m hosts``."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("hosts")


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Two hosts, for all tests."""
    try:
        hosts = TwoHosts(tmp_path_factory.mktemp("hosts"), ROOT, MARK)
    except CannotMakeHosts as why:
        pytest.skip(f"no two hosts on this machine: {why}")
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def outcomes(storm):
    """What ``PortConformance`` looks at, of a module's ``storm`` between the hosts."""
    return storm[0]


@pytest.fixture(scope="session")
def mpirun_command(hosts):
    """Return ``mpirun_command(slots, *options) -> list``.

    What to put before a command to run it on ``slots[i]`` ranks of host i.
    """

    def command(slots: tuple[int, int], *options: str) -> list[str]:
        places = ",".join(f"{address}:{n}" for address, n in zip(ADDRESSES, slots))
        # What ssh does not pass on has to be asked for.
        return hosts.on(0, [find_mpirun(), "--host", places, "-n", sum(slots), "-x", "PYTHONPATH", *options])

    return command


@pytest.fixture(scope="session")
def ssh(hosts):
    """The environment in which mpirun reaches the other host."""
    # It cannot know that the hosts share their cores: without, each collective call takes a core until all
    # have made it.
    return {"PRTE_MCA_plm_ssh_agent": str(hosts.ssh), "OMPI_MCA_mpi_yield_when_idle": "1"}


@pytest.fixture(scope="session")
def zmq_groups(hosts):
    """Return ``zmq_groups(first, second, command) -> list``.

    Runs it as so many ranks over ZeroMQ on each host, on the second by ssh.
    """
    ports = itertools.count(5555)
    environment = ["env", f"PYTHONPATH={ROOT}:{HELPERS}", "APEX_TOKEN=" + "5a" * 16]

    def command(first: int, second: int, of_rank: list) -> list[str]:
        job = ["--size", first + second, "--endpoint", f"tcp://{ADDRESSES[0]}:{next(ports)}", "--", *of_rank]
        spawn = [*environment, sys.executable, "-m", "launch.run.spawn"]
        here = [*spawn, "--first", 0, "-n", first, *job]
        there = hosts.over_ssh(1, [*spawn, "--first", first, "-n", second, *job])
        return hosts.on(
            0, ["sh", "-c", BOTH.format(first=shlex.join(map(str, here)), second=shlex.join(there))]
        )

    return command
