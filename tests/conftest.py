"""What all tests share: MPI jobs and `apex` commands as jobs of their own, watched and cleaned up."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest

import native  # noqa: F401  before torch, whose libgomp may lack OpenACC
from launch.run.launchers import ENVIRONMENT, find_mpirun

sys.path.insert(
    0, str(Path(__file__).resolve().parent / "helpers")
)  # also suites that tests of many folders subclass
from places import HELPERS, ROOT

pytest_plugins = ["resumed_runs"]
pytest.register_assert_rewrite("port_conformance", "disturbance")
hypothesis.settings.register_profile("apex", deadline=None)  # no test may depend on how fast the machine is
hypothesis.settings.load_profile("apex")
_LAUNCHERS = (
    "OMPI",
    "PMIX",
    "PMI_",
    "PRTE",
    "SLURM",
    "MPI4PY",
    "APEX_",
)  # an outer job's variables would mislead an inner one
_MARK = "JOB_OF_TEST"  # in the environment of every process of a job, whichever session it is in
_RANK_STARTS_S = 60.0
_LINGER_S = 5.0  # mpirun, and the kernel, take a moment to end what is killed
PATIENCE = 6
"""Times the limits of tests, which are of free cores: what comes late on a busy machine is not wrong."""

for _number in (signal.SIGINT, signal.SIGHUP):
    if (
        signal.getsignal(_number) is signal.SIG_IGN
    ):  # in a shell's background, under nohup: ignored here, but not by jobs
        signal.signal(_number, lambda number, frame: None)


def pytest_configure(config):
    """Refuse a pytest with which groups do not hold (see pyproject.toml).

    Each worker would build what the tests of a file share.
    """
    if config.getoption("dist", "no") == "loadgroup" and pytest.version_tuple >= (9, 2):
        raise pytest.UsageError(
            "pytest 9.2 and pytest-xdist do not keep the tests of a file together; "
            "install what constraints.txt says"
        )


@pytest.hookimpl(tryfirst=True)  # xdist's own looks at the groups
def pytest_collection_modifyitems(items):
    """Say what workers may share out (``make test``).

    A file at a time, or single tests where it is marked ``spread``.

    What takes long comes first, so that no worker is left with it alone.
    """
    for item in items:
        if not item.get_closest_marker("spread"):
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(ROOT))))
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_terminal_summary(terminalreporter):
    """Print how many inputs the tests of ``fuzz`` have tried, whichever worker ran them."""
    ends = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
    ]
    tried = [
        value
        for report in ends
        if report.when == "teardown"
        for name, value in report.user_properties
        if name == "tried"
    ]
    if tried:
        terminalreporter.write_line(f"fuzz: {sum(tried)} inputs in {len(tried)} tests")


@pytest.fixture(scope="module")
def one_torch_thread():
    """For small tensors: a second thread would only be waited for."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Ended(NamedTuple):
    """How a job ended."""

    returncode: int
    stdout: str
    stderr: str


class Job:
    """A command in a session of its own, with every process that it starts."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str] | None = None):
        folder.mkdir()
        self.mark, self.folder = uuid.uuid4().hex, folder
        self.temporary = Path(
            tempfile.mkdtemp(prefix="apex-job-")
        )  # pytest's own are too long for a socket's path
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            self.process = subprocess.Popen(
                command,
                env=_clean_environment() | {"TMPDIR": str(self.temporary)} | (env or {}) | {_MARK: self.mark},
                cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip

    def processes(self) -> dict[int, str]:
        """Return pid -> command line of the processes that are still alive."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if self._owns(entry):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
        return found

    def rank(self, rank: int) -> int:
        """Return the pid of a rank, once it is there."""
        found = []
        self.wait_until(lambda: found.extend(self._pids_of(rank)) or found, _RANK_STARTS_S, f"rank {rank}")
        return found[0]

    def _pids_of(self, rank: int):
        wanted = [f"{name}={rank}\0".encode() for name in ("OMPI_COMM_WORLD_RANK", "APEX_RANK")]
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has just ended
                environment = (Path("/proc") / str(pid) / "environ").read_bytes()
                if any(name in environment for name in wanted):
                    yield pid

    def wait_until(self, holds, timeout: float, what: str) -> None:
        """Wait until ``holds()``; the test fails, and the job ends, if that takes too long or the job ends
        before.
        """
        deadline = time.monotonic() + PATIENCE * timeout
        while not holds():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(
                    f"{what}: not within {PATIENCE * timeout:g} s, or before the job's end\n"
                    f"{self._after_kill()}"
                )
            time.sleep(0.02)

    def wait(self, timeout: float) -> Ended:
        """Return how the job ended; the test fails if that takes longer, or if it leaves a process behind."""
        try:
            self.process.wait(PATIENCE * timeout)
        except subprocess.TimeoutExpired:
            alive = self.processes()
            pytest.fail(f"still running after {PATIENCE * timeout:g} s: {alive}\n{self._after_kill()}")
        left = self._left_behind()
        if left:
            pytest.fail(f"left behind: {left}\n{self._after_kill()}")
        return self._ended()

    def kill(self) -> None:
        """End every process of the job: asked first, since mpirun then removes its shared memory."""
        self._signal_all_for(2.0, signal.SIGTERM)
        self._signal_all_for(60.0, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _signal_all_for(self, seconds: float, number: int) -> None:
        deadline = time.monotonic() + seconds
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.1)

    def _owns(self, entry: Path) -> bool:
        state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        if state in "ZX":  # dead, only not yet collected
            return False
        return (
            int(session) == self.process.pid
            or f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
        )

    def _left_behind(self) -> dict[int, str]:
        deadline = time.monotonic() + PATIENCE * _LINGER_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def _after_kill(self) -> str:
        self.kill()
        ended = self._ended()
        return f"--- stdout\n{ended.stdout[-3000:]}\n--- stderr\n{ended.stderr[-3000:]}"

    def _ended(self) -> Ended:
        out, err = ((self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Ended(self.process.poll(), out, err)


def _clean_environment() -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return ENVIRONMENT | outer | {"PYTHONPATH": f"{ROOT}:{HELPERS}", "COLUMNS": "200"}


@pytest.fixture(scope="session")
def environment():
    """The environment of a command outside any job.

    What others start for it carries no job's mark, and is not ended with one.
    """
    return _clean_environment()


@pytest.fixture
def figure():
    """Return ``figure(what, value)``.

    Notes something measured as a line of the file that FIGURES names, if it does.

    ``make figures`` runs the tests that measure something, and prints a table of it.
    """

    def note(what: str, value: float) -> None:
        if "FIGURES" in os.environ:
            with open(os.environ["FIGURES"], "a") as file:
                file.write(json.dumps([what, value]) + "\n")

    return note


@contextlib.contextmanager
def _starting(folder: Path):
    """Yield ``start(command, env=None) -> Job``, in folders within ``folder``.

    What is left of the jobs is killed at the end.
    """
    jobs = []

    def start_job(command: list, env: dict[str, str] | None = None) -> Job:
        jobs.append(Job([*map(str, command)], folder / f"job-{len(jobs)}", env))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()
    assert "mpi4py.MPI" not in sys.modules, "the test process itself must stay outside MPI"


@pytest.fixture
def start(tmp_path):
    """Return ``start(command, env=None) -> Job``; what is left of the job is killed after the test."""
    with _starting(tmp_path) as start_job:
        yield start_job


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory):
    """As ``start``, for a job that several tests of a module look at."""
    with _starting(tmp_path_factory.mktemp("jobs")) as start_job:
        yield start_job


@pytest.fixture(scope="session")
def run_to_end(tmp_path_factory):
    """Return ``run_to_end(command, env=None, timeout=60) -> Ended``."""

    def run(command: list, env: dict[str, str] | None = None, timeout: float = 60) -> Ended:
        job = Job([*map(str, command)], tmp_path_factory.mktemp("run") / "job", env)
        try:
            return job.wait(timeout)
        finally:
            job.kill()

    return run


@pytest.fixture(scope="session")
def mpirun(run_to_end):
    """Return ``mpirun(n, arguments, env=None, timeout=60) -> Ended``.

    Python with ``arguments``, as ``n`` ranks.
    """

    def run(n: int, arguments: list, env: dict[str, str] | None = None, timeout: float = 60) -> Ended:
        return run_to_end([find_mpirun(), "-n", n, sys.executable, *arguments], env, timeout)

    return run
