"""Two hosts on one machine: namespaces of the kernel's, joined by one link, and an ssh that leads from the
first to the second.

Each host has its own network, name, processes, shared memory and view of them. All that runs on either is a
descendant, by pid namespace, of the first host's first process, which lives until its standard input closes:
the kernel then ends everything there, and takes the link away, even where this process was killed.

The second host's processes lie within the first's, since a process can only go down into a pid namespace; the
stand-in for ssh has to. So the first sees those of the second, under other numbers. No more is shared than
files.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
_LIMIT_S = 60
_HEADERS = 1.1  # those of Ethernet, IP and TCP are a twentieth, and some segments are sent twice
_BESIDE = 16 << 20  # bytes of everything else: the start, requests, acknowledgements
# Stays until its input ends, whatever ends around it.
_BECOME_A_HOST = "hostname $0 && mount -t tmpfs none /dev/shm && ip link set lo up && echo up && exec cat"
_SSH = """#!/bin/sh
# ssh [OPTIONS] ADDRESS COMMAND...: as ssh does, the command gets a shell, and next to nothing of the
# environment.
while case $1 in -*) true;; *) false;; esac; do shift; done
case $1 in
{places}
*) echo "ssh: no route to $1" >&2; exit 255;;
esac
shift
exec {enter} -t "$pid" -a env -i HOME="$HOME" PATH="$PATH" TMPDIR="$TMPDIR" {mark}="${mark}" sh -c "$*"
"""


class CannotMakeHosts(Exception):
    """There can be no two hosts here, in one line why."""


class Traffic(NamedTuple):
    """Bytes that the first host sends and receives over the link."""

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)

    def check(self, payload: Traffic) -> None:
        """Check that this, headers and all, is what it takes to send ``payload`` once."""
        for seen, sent in zip(self, payload):
            assert sent < seen < _HEADERS * sent + _BESIDE, (self, payload)


def crossing(outcomes: dict[str, dict], on_second: set[int]) -> Traffic:
    """Return the payloads of a storm (see ``port_conformance.judge``) that crossed the link."""
    ways = {(False, True): 0, (True, False): 0, (False, False): 0, (True, True): 0}
    for outcome in outcomes.values():
        for origin, to, nbytes in outcome["nbytes"]:
            ways[origin in on_second, to in on_second] += nbytes
    return Traffic(ways[False, True], ways[True, False])


class TwoHosts:
    """The hosts ``apex-a`` and ``apex-b``, at ``ADDRESSES``; ``mark`` is the one variable that ssh passes on.

    Raises :class:`CannotMakeHosts`. To be closed, though the end of this process does as well.
    """

    def __init__(self, folder: Path, root: Path, mark: str):
        _check_tools()
        self._root, self._holders = root, []
        try:
            self._pids = [self._make_host("apex-a", [])]
            self._pids.append(self._make_host("apex-b", self._enter(0)))
            self._link()
        except BaseException:
            self.close()
            raise
        self.ssh = folder / "ssh"
        self._write_ssh(mark)

    def on(self, host: int, command: list) -> list[str]:
        """Return the command that runs ``command`` on a host, in the project's folder."""
        return [*self._enter(host), "sh", "-c", 'cd "$0" && exec "$@"', str(self._root), *map(str, command)]

    def over_ssh(self, host: int, command: list) -> list[str]:
        """Return the command that does so from the first host."""
        return [
            str(self.ssh),
            ADDRESSES[host],
            f"cd {shlex.quote(str(self._root))} && {shlex.join(map(str, command))}",
        ]

    def traffic(self) -> Traffic:
        """Return what has gone over the link, seen from the first host."""
        lines = Path(f"/proc/{self._pids[0]}/net/dev").read_text().splitlines()
        counts = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
        return Traffic(sent=int(counts[8]), received=int(counts[0]))

    def limit_rate(self, bytes_per_s: int) -> None:
        """Have either host send no faster than that; 0: as fast as it can.

        Raises :class:`CannotMakeHosts`.
        """
        for host in (0, 1):
            change = "del" if bytes_per_s == 0 else "add"
            shape = (
                []
                if bytes_per_s == 0
                else ["tbf", "rate", f"{bytes_per_s}bps", "burst", "64kb", "latency", "100ms"]
            )
            _run([*self._enter(host), "tc", "qdisc", change, "dev", "eth0", "root", *shape])

    def close(self) -> None:
        """End every process of both hosts, and with them the link."""
        for holder in reversed(self._holders):
            holder.stdin.close()
        for holder in self._holders:
            holder.wait(_LIMIT_S)
            holder.stdout.close()

    def _make_host(self, name: str, inside: list[str]) -> int:
        """Start the first process of a host; return its pid, as this process sees it."""
        new = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
        holder = subprocess.Popen(
            [*inside, *new, "sh", "-c", _BECOME_A_HOST, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._holders.append(holder)
        said = holder.stdout.readline().strip()
        if said != "up":
            raise CannotMakeHosts(said or "the kernel ended the first process of a host")
        pid = holder.pid
        while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            pid = int(children[0])
        return pid

    def _enter(self, host: int) -> list[str]:
        return ["nsenter", "-t", str(self._pids[host]), "-a"]

    def _link(self) -> None:
        first, second = map(str, self._pids)
        _run(
            [
                "ip",
                "link",
                "add",
                "eth0",
                "netns",
                first,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                second,
            ]
        )
        for host, address in enumerate(ADDRESSES):
            _run([*self._enter(host), "ip", "addr", "add", f"{address}/24", "dev", "eth0"])
            _run([*self._enter(host), "ip", "link", "set", "eth0", "up"])

    def _write_ssh(self, mark: str) -> None:
        # As the first host numbers them: it is there that ssh runs.
        places = (f"{address}) pid={_pid_within(pid, 1)};;" for address, pid in zip(ADDRESSES, self._pids))
        self.ssh.write_text(_SSH.format(places="\n".join(places), enter=shutil.which("nsenter"), mark=mark))
        self.ssh.chmod(0o755)


def _check_tools() -> None:
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise CannotMakeHosts("only root may make network namespaces")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            raise CannotMakeHosts(f"`{tool}` is missing (Debian: apt install {package})")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise CannotMakeHosts((done.stderr.strip().splitlines() or [f"{command[0]} failed"])[0])


def _pid_within(pid: int, depth: int) -> int:
    """Return the number of a process in the namespace that many levels down."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1 + depth] for line in lines if line.startswith("NSpid:")))
