"""A real SLURM of three nodes on this machine, in a folder of its own.

Its daemons are children, and nothing outlives it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = (
    "cpu1",
    "cpu2",
    "accel1",
)  # the one with the GPU comes first in the alphabet: see heterogeneous.sbatch
CORES = 4  # SLURM is told of as many in each node, whatever there is
UP_S, DOWN_S = 120, 60
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"  # where daemons live

_CONF = """
ClusterName=apextest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=100000
ReturnToService=2
KillWait=5
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=cpu1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores} RealMemory=2000
NodeName=cpu2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores} RealMemory=2000
NodeName=accel1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs={cores} RealMemory=2000 Gres=gpu:1
PartitionName=cpu Nodes=cpu[1-2] Default=YES State=UP PriorityTier=1 GraceTime=600
PartitionName=gpu Nodes=accel1 State=UP PriorityTier=1
PartitionName=high Nodes=cpu[1-2] State=UP PriorityTier=10 PreemptMode=off
"""
# cred_expire: SLURM starts a requeued job again only when the credential of its last start has run out (120 s
# by default).


def missing() -> str | None:
    """Return why no SLURM can be started here, or None."""
    if os.geteuid() != 0:
        return "only root can start a SLURM with nodes of its own"
    absent = [
        name
        for name in (*DAEMONS, "sbatch", "srun", "scontrol", "unshare")
        if shutil.which(name, path=_PATH) is None
    ]
    if absent:
        packages = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
        return f"not installed: {', '.join(absent)} (Debian: {packages})"
    alone = subprocess.run(["unshare", "--uts", "hostname", "apex-test"], capture_output=True, text=True)
    return f"no host names of their own for the nodes: {alone.stderr.strip()}" if alone.returncode else None


class Cluster:
    """The daemons, from start to end; ``environment`` is for the commands of SLURM."""

    def __init__(self):
        self.folder = Path(
            tempfile.mkdtemp(prefix="apex-slurm-")
        )  # short: the path of a socket has 107 bytes
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _PATH}
        self._daemons: list[subprocess.Popen] = []

    def start(self) -> None:
        """Start it; returns when all nodes are idle."""
        self._configure()
        self._start_munge()
        self._start("slurmctld", ["slurmctld", "-D"])
        for node in NODES:
            # A host name of its own, so that its ranks are on another host for MPI too.
            self._start(
                node, ["unshare", "--uts", "sh", "-c", f"hostname {node} && exec slurmd -D -N {node}"]
            )
        self.wait_until(lambda: self._states() == ["idle"] * len(NODES), UP_S, "idle nodes")

    def stop(self) -> None:
        """End every process of the cluster, its jobs' too, and remove the folder."""
        with contextlib.suppress(subprocess.SubprocessError):
            self.command("scancel", "--user=root", timeout=10)
            self.wait_until(lambda: not self.command("squeue", "--noheader"), DOWN_S, "no jobs")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        deadline = time.monotonic() + DOWN_S
        while (left := self._processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for daemon in self._daemons:
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, *words: str, timeout: float = 30) -> str:
        """Return what a command of SLURM prints."""
        done = subprocess.run(
            words, env=os.environ | self.environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def job(self, number: int) -> dict[str, str]:
        """Return what SLURM knows of a job."""
        words = self.command("scontrol", "show", "job", str(number), "--oneliner").splitlines()[0].split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def wait_until(self, holds, timeout: float, what: str) -> None:
        """Wait until ``holds()``; raises TimeoutError with the daemons' logs."""
        deadline = time.monotonic() + timeout
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout:g} s\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        text = _CONF.format(host=host, folder=self.folder, ports=_free_ports(1 + len(NODES)), cores=CORES)
        for name in ("state", "munge", *(f"tmp-{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o700)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("NodeName=accel1 Name=gpu File=/dev/null\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_munge(self) -> None:
        files = {"key-file": "munge/key", "seed-file": "munge/seed", "pid-file": "munge/pid"}
        files |= {"socket": "munge.sock", "log-file": "munge.log"}
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start(
            "munged",
            [
                "munged",
                "--foreground",
                "--force",
                *(f"--{name}={self.folder}/{path}" for name, path in files.items()),
            ],
        )
        self.wait_until((self.folder / "munge.sock").exists, UP_S, "munged")

    def _start(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.out.log", "wb") as out:
            clean = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
            environment = clean | self.environment
            daemon = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            self._daemons.append(daemon)

    def _states(self) -> list[str]:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%t", "--partition=cpu,gpu"],
            env=os.environ | self.environment, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.split()

    def _processes(self) -> list[int]:
        """Return the processes of the cluster.

        All have the path of its configuration in their environment.
        """
        mark, found = f"SLURM_CONF={self.folder}/".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if (
                    mark in (entry / "environ").read_bytes()
                    and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                ):
                    found.append(int(entry.name))
        return [pid for pid in found if pid != os.getpid()]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
