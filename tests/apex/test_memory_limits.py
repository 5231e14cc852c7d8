"""Every control group above a process may limit its memory; pages of files are free memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from apex.memory_limits import available_bytes

GIB = 2**30
V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
OTHERS = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n30 1 8:1 / / rw - ext4 /dev/sda1 rw"


def machine(root, own, mounts, free=64 * GIB):
    """Write what a machine with ``free`` bytes says to a process in the groups ``own``; return its root."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {free // 1024} kB\n")
    (root / "proc/self/cgroup").write_text("\n".join(own) + "\n")
    (root / "proc/self/mountinfo").write_text("\n".join((OTHERS, *mounts)) + "\n")
    return root


def v2_group(root, path, limit, current, high="max", **stat):
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(
        "".join(f"{name} {value}\n" for name, value in {"anon": 5, **stat}.items())
    )


def v1_group(root, path, limit, usage, **stat):
    folder = root / "sys/fs/cgroup/memory" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        "".join(f"{name} {value}\n" for name, value in {"cache": 5, **stat}.items())
    )


def test_without_control_groups_the_machines_free_memory_counts(tmp_path):
    assert available_bytes(machine(tmp_path, [], [])) == 64 * GIB


def test_where_groups_set_no_limit_the_machines_free_memory_counts(tmp_path):
    root = machine(tmp_path, ["0::/a"], [V2.format(top="/")])
    v2_group(root, "a", "max", 3 * GIB)
    assert available_bytes(root) == 64 * GIB


def test_a_limit_of_version_2_less_what_is_used(tmp_path):
    root = machine(tmp_path, ["0::/a"], [V2.format(top="/")])
    v2_group(root, "a", 8 * GIB, 3 * GIB)
    assert available_bytes(root) == 5 * GIB


def test_a_limit_of_version_1(tmp_path):
    root = machine(tmp_path, ["9:cpu:/", "4:memory:/docker/x", "0::/"], [V1.format(top="/"), HYBRID])
    v1_group(root, "docker/x", 8 * GIB, 3 * GIB)
    assert available_bytes(root) == 5 * GIB


@pytest.mark.parametrize(
    "limited", ["slurm", "slurm/job_7", "slurm/job_7/step_0", "slurm/job_7/step_0/task_1"]
)
def test_a_limit_at_any_level_counts_with_what_that_level_uses(tmp_path, limited):
    levels = ["slurm", "slurm/job_7", "slurm/job_7/step_0", "slurm/job_7/step_0/task_1"]
    root = machine(tmp_path, [f"0::/{levels[-1]}"], [V2.format(top="/")])
    for level in levels:
        v2_group(root, level, 8 * GIB if level == limited else "max", 7 * GIB if level == limited else GIB)
    assert available_bytes(root) == GIB


def test_of_several_limits_the_one_that_leaves_least_counts(tmp_path):
    root = machine(tmp_path, ["3:cpuset,memory:/slurm/job"], [V1.format(top="/")])
    v1_group(root, "slurm", 10 * GIB, 9 * GIB)
    v1_group(root, "slurm/job", 4 * GIB, 2 * GIB)
    v1_group(root, "", 2**63 - 4096, 20 * GIB)
    assert available_bytes(root) == GIB


def test_pages_of_files_are_not_used_memory(tmp_path):
    root = machine(tmp_path, ["0::/a"], [V2.format(top="/")])
    v2_group(
        root, "a", 8 * GIB, 7 * GIB, inactive_file=3 * GIB, active_file=GIB, slab_reclaimable=GIB, shmem=GIB
    )
    assert available_bytes(root) == 6 * GIB


def test_pages_of_files_are_not_used_memory_in_version_1_nor_are_those_of_groups_below(tmp_path):
    root = machine(tmp_path, ["4:memory:/a"], [V1.format(top="/")])
    v1_group(root, "a", 8 * GIB, 7 * GIB, inactive_file=0, total_inactive_file=3 * GIB, total_active_file=GIB)
    assert available_bytes(root) == 5 * GIB


def test_a_limit_from_which_on_the_kernel_slows_a_group_down_is_a_limit(tmp_path):
    root = machine(tmp_path, ["0::/a"], [V2.format(top="/")])
    v2_group(root, "a", 8 * GIB, GIB, high=4 * GIB)
    assert available_bytes(root) == 3 * GIB


@pytest.mark.parametrize(
    "own, top", [("/docker/x", "/docker/x"), ("/", "/"), ("/../../elsewhere", "/"), ("/docker/x", "/")]
)
def test_a_container_that_shows_its_own_group_at_the_top_is_limited_by_it(tmp_path, own, top):
    root = machine(tmp_path, [f"0::{own}"], [V2.format(top=top)])
    v2_group(root, "", 2 * GIB, GIB)
    assert available_bytes(root) == GIB


def test_a_parents_limit_that_cannot_be_seen_is_told_by_version_1(tmp_path):
    root = machine(tmp_path, ["4:memory:/docker/x"], [V1.format(top="/docker/x")])
    v1_group(root, "", 2**63 - 4096, GIB, hierarchical_memory_limit=3 * GIB)
    assert available_bytes(root) == 2 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path):
    root = machine(tmp_path, ["0::/a"], [V2.format(top="/")])
    v2_group(root, "a", GIB, 2 * GIB)
    assert available_bytes(root) == 0


def test_a_mount_with_a_space_in_its_path_is_found(tmp_path):
    root = machine(tmp_path, ["0::/a"], ["31 23 0:28 / /my\\040groups rw - cgroup2 cgroup2 rw"])
    (root / "my groups/a").mkdir(parents=True)
    (root / "my groups/a/memory.max").write_text(str(GIB))
    assert available_bytes(root) == GIB


REAL = (  # mount of the memory controller, file of the limit
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    ("/sys/fs/cgroup", "memory.max"),
)


@pytest.fixture
def limited_group():
    """Yield the inner one of two nested real groups, of which the outer one is limited to 1 GiB."""
    for mount, limit in REAL:
        outer = Path(mount) / f"apex-test-{os.getpid()}"
        try:
            (outer / "inner").mkdir(parents=True)
        except OSError:
            continue
        try:
            (outer / limit).write_text(str(GIB))
            yield outer / "inner"
            return
        except OSError:
            continue
        finally:
            (outer / "inner").rmdir(), outer.rmdir()
    pytest.skip("only root, and not in every container, may make a control group with a memory limit")


def test_a_real_limit_of_a_parent_group_is_found(limited_group):
    code = f"""
import os, pathlib
pathlib.Path({str(limited_group)!r}, "cgroup.procs").write_text(str(os.getpid()))
from apex.memory_limits import available_bytes
print(available_bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert 0.5 * GIB < int(done.stdout) <= GIB
