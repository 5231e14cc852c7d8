"""`apex doctor` in worlds that are well and in worlds with one real fault each."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run.launchers import find_mpirun

DOCTOR = ["-m", "launch.cli.main", "doctor"]
LOOKS_S = 180
CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.spread


def lines(ended, name: str) -> list[str]:
    """Return the lines of a report that are about ``name``."""
    return [line for line in ended.stdout.splitlines() if line[9:].startswith(name)]


def check_wrong(ended, name: str, *parts: str) -> None:
    """Check that one thing is wrong, told once by one rank, with what to do about it."""
    assert ended.returncode == 1, ended.stdout + ended.stderr
    wrong = [line for line in ended.stdout.splitlines() if line.startswith("wrong")]
    assert len(wrong) == 1, ended.stdout
    assert wrong == [line for line in lines(ended, name) if line.startswith("wrong")]
    assert all(part in wrong[0] for part in parts), wrong
    after = ended.stdout.splitlines()[ended.stdout.splitlines().index(wrong[0]) + 1]
    assert after.strip().startswith("fix: ")


class TestHealthyWorlds:
    def test_the_doctor_starts_a_world_of_its_own_and_finds_nothing_wrong(self, run_to_end, tmp_path):
        ended = run_to_end(
            [sys.executable, *DOCTOR, "cartpole", "--json", tmp_path / "report.json"], timeout=LOOKS_S
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "4 ranks on 1 host" in lines(ended, "world")[0]
        assert "share memory" in lines(ended, "hosts")[0]
        report = json.loads((tmp_path / "report.json").read_text())
        assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]
        assert {finding["level"] for finding in report["findings"]} <= {"ok", "warning"}

    def test_ranks_of_a_world_are_looked_at_together_and_one_tells(self, mpirun):
        ended = mpirun(4, [*DOCTOR, "cartpole"], timeout=LOOKS_S)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert ended.stdout.count("apex: 0 wrong") == 1
        assert "4 ranks on 1 host" in lines(ended, "world")[0]

    def test_a_world_over_zeromq_needs_no_MPI(self, run_to_end):
        ended = run_to_end([sys.executable, *DOCTOR, "cartpole", "--transport", "zmq"], timeout=LOOKS_S)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "not used" in lines(ended, "MPI")[0]
        assert "4 ranks on 1 host" in lines(ended, "world")[0]


class TestWorldsThatAreNone:
    def test_ranks_that_the_library_takes_for_single_ones_are_found_and_told_of_once(self, run_to_end):
        # mpirun's own word on the world stays, and what leads the library to mpirun is taken away.
        unset = [part for name in ("PMIX_NAMESPACE", "PMIX_RANK", *PMIX_SERVERS) for part in ("-u", name)]
        ended = run_to_end(
            [find_mpirun(), "-n", "4", "env", *unset, sys.executable, *DOCTOR, "cartpole"], timeout=LOOKS_S
        )
        check_wrong(ended, "world", "has started 4 ranks", "sees 4 worlds of one")

    def test_variables_of_an_earlier_job_are_found(self, run_to_end):
        left = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
        ended = run_to_end([sys.executable, *DOCTOR], left, timeout=LOOKS_S)
        check_wrong(ended, "world", "4 worlds of one")
        assert "unset the variables" in ended.stdout

    def test_too_few_ranks_for_the_preset_are_found(self, mpirun):
        check_wrong(mpirun(2, [*DOCTOR, "cartpole"], timeout=LOOKS_S), "world", "2 ranks are too few")

    def test_an_mpirun_that_cannot_start_ranks_is_found(self, run_to_end):
        ended = run_to_end(
            [sys.executable, *DOCTOR], {"PRTE_MCA_rmaps_default_mapping_policy": "nonsense"}, timeout=LOOKS_S
        )
        check_wrong(ended, "world", "ended with status")


class TestEndings:
    def test_ranks_that_are_killed_leave_no_shared_memory_behind(self, start, inject):
        job = start([sys.executable, *DOCTOR, "cartpole"], inject(3, late_s=1000))  # the others wait for it
        job.wait_until(
            lambda: left_in(f"apex-segments-{job.process.pid}-*/*"), LOOKS_S, "shared memory of the ranks"
        )
        for pid in [job.rank(rank) for rank in range(4)]:
            with contextlib.suppress(ProcessLookupError):  # mpirun was first
                os.kill(pid, signal.SIGKILL)
        check_wrong(job.wait(LOOKS_S), "world", "ended with status")
        assert left_in(f"apex-segments-{job.process.pid}-*") == []


def left_in(pattern: str) -> list[Path]:
    """Return what there is in shared memory."""
    return list(Path("/dev/shm").glob(pattern))


PMIX_SERVERS = [f"PMIX_SERVER_URI{version}" for version in ("2", "21", "3", "4", "41")]


class TestResources:
    def test_a_small_shared_memory_is_found(self, run_to_end):
        small = 'mount -t tmpfs -o size=20m none /dev/shm && exec "$@"'
        if subprocess.run(
            ["unshare", "--mount", "sh", "-c", small, "sh", "true"], capture_output=True
        ).returncode:
            pytest.skip("no mounts of their own for processes here")
        command = ["unshare", "--mount", "sh", "-c", small, "sh", sys.executable, *DOCTOR]
        check_wrong(run_to_end(command, timeout=LOOKS_S), "/dev/shm", "20 MiB free", "2 ranks need about 32")

    @pytest.mark.parametrize("world", [False, True], ids=["its own world", "a world"])
    def test_memory_beyond_the_machine_is_found(self, run_to_end, mpirun, world):
        arguments = [*DOCTOR, "cartpole", "--set", "replay.capacity=50_000_000_000"]
        ended = (
            mpirun(4, arguments, timeout=LOOKS_S)
            if world
            else run_to_end([sys.executable, *arguments], timeout=LOOKS_S)
        )
        check_wrong(ended, "memory", "replay.capacity = 50000000000 is too large", "the largest that fits is")

    def test_a_preset_is_judged_by_all_its_ranks_where_only_some_are_started(self, run_to_end):
        ended = run_to_end([sys.executable, *DOCTOR, "cartpole", "--ranks", "3000"], timeout=LOOKS_S)
        assert ended.returncode == 1
        assert (
            lines(ended, "memory")[0].startswith("wrong")
            and "3000 ranks are too many for this machine" in lines(ended, "memory")[0]
        )
        assert "a sample of 3000" in lines(ended, "world")[0]

    @pytest.mark.skipif(
        len(CORES) < 2 or len(CORES) != os.cpu_count(), reason="takes two cores that nothing else has tied"
    )
    def test_ranks_tied_to_one_core_are_found(self, run_to_end):
        command = ["taskset", "-c", CORES[0], find_mpirun(), "-n", "2", sys.executable, *DOCTOR]
        ended = run_to_end(
            command, {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}, timeout=LOOKS_S
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert lines(ended, "binding")[0].startswith(
            f"warning  binding      2 ranks of {os.uname().nodename} are bound to core {CORES[0]}"
        )

    def test_threads_that_do_not_fit_on_the_cores_of_a_rank_are_found(self, mpirun):
        ended = mpirun(4, [*DOCTOR, "cartpole", "--set", "learner.threads=1000"], timeout=LOOKS_S)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "learner (rank 0) has 1000 threads" in lines(ended, "binding")[0]
        assert "1003 threads of 4 ranks" in lines(ended, "threads")[0]

    def test_fewer_slots_than_ranks_are_found(self, mpirun):
        ranks = (os.cpu_count() or 1) + 2
        ended = mpirun(ranks, DOCTOR, timeout=LOOKS_S)
        assert any(
            f"slots for {ranks} ranks" in line and line.startswith("warning")
            for line in lines(ended, "slots")
        ), ended.stdout

    def test_a_folder_that_cannot_be_written_to_is_found(self, run_to_end, tmp_path):
        (tmp_path / "file").write_text("not a folder")
        ended = run_to_end(
            [sys.executable, *DOCTOR, "cartpole", "--set", f"run.directory={tmp_path / 'file' / 'runs'}"],
            timeout=LOOKS_S,
        )
        check_wrong(ended, "runs", "file cannot be written to")

    def test_a_game_that_is_not_there_is_found(self, run_to_end):
        ended = run_to_end(
            [sys.executable, *DOCTOR, "pong", "--ranks", "4", "--set", "env.id=pongo"], timeout=LOOKS_S
        )
        check_wrong(ended, "ROMs", "pongo")

    def test_a_GPU_that_is_not_there_is_found(self, run_to_end):
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        ended = run_to_end(
            [sys.executable, *DOCTOR, "cartpole", "--set", "learner.device=cuda"], hidden, timeout=LOOKS_S
        )
        check_wrong(ended, "GPU", "learner.device = 'cuda'")
