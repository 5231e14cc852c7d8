"""Processes of this host: found by session and environment, measured, tied to their parent, and ended by id
and start time.
"""

import os
import signal
import subprocess
import sys
import time

from apex import processes, variables

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
PARENT = f"""
import subprocess, sys, time
from apex import processes
child = processes.start({SLEEP!r}, None, subprocess.PIPE)
print(child.stdout.readline().strip(), child.pid, flush=True)
time.sleep(600)
"""
PATIENCE_S = 120.0


def wait_until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid):
    try:
        return processes.facts(pid).state not in "ZX"
    except OSError:
        return False


def test_facts_of_this_process_are_those_of_the_standard_library():
    began = time.process_time()
    sum(range(3_000_000))
    about = processes.facts(os.getpid())
    assert began - 0.05 <= about.cpu_s <= time.process_time() + 0.05
    assert about.session == os.getsid(0) and about.state == "R" and about.resident_mb > 5
    assert processes.own_process() == (os.getpid(), about.began)
    assert processes.proportional_mb(os.getpid()) > 0 and processes.proportional_mb(2**30) == 0


def test_a_command_is_found_by_its_session_and_environment_and_ends_with_what_it_started():
    child = f"import subprocess, time; subprocess.Popen({SLEEP!r}); print('up', flush=True); time.sleep(600)"
    command = processes.start(
        [sys.executable, "-c", child], os.environ | {"MARK_OF_TEST": "é=1"}, subprocess.PIPE
    )
    assert command.stdout.readline() == "up\n"
    wait_until(lambda: len(processes.of_session(command.pid)) == 2)
    pids = list(processes.of_session(command.pid))
    assert command.pid in pids and all(processes.environment_of(pid)["MARK_OF_TEST"] == "é=1" for pid in pids)
    processes.end(command, 5.0)
    assert command.returncode == -signal.SIGTERM and processes.of_session(command.pid) == {}


def test_a_command_that_ignores_the_request_to_end_is_killed():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    deaf += "print('up', flush=True); time.sleep(600)"
    command = processes.start([sys.executable, "-c", deaf], None, subprocess.PIPE)
    assert command.stdout.readline() == "up\n"
    processes.end(command, 0.2)
    assert command.returncode == -signal.SIGKILL


def test_a_command_ends_when_the_process_that_started_it_is_killed():
    parent = processes.start([sys.executable, "-c", PARENT], None, subprocess.PIPE)
    said, pid = parent.stdout.readline().split()
    assert said == "up" and is_alive(int(pid))
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(int(pid)))


def test_a_process_is_ended_only_by_its_own_start_time():
    command = processes.start(SLEEP, None, subprocess.PIPE)
    assert command.stdout.readline() == "up\n"
    began = processes.facts(command.pid).began
    assert not processes.end_process(command.pid, began - 1) and is_alive(command.pid)
    assert processes.end_process(command.pid, began) and command.wait() == -signal.SIGKILL
    assert not processes.end_process(2**30, began)


def test_a_number_of_the_environment_may_be_missing_or_empty(monkeypatch):
    monkeypatch.delenv(variables.LIFE, raising=False)
    assert variables.number(variables.LIFE, 3) == 3
    monkeypatch.setenv(variables.LIFE, "")
    assert variables.number(variables.LIFE, 3) == 3
    monkeypatch.setenv(variables.LIFE, "2")
    assert variables.number(variables.LIFE) == 2


def test_an_empty_path_does_not_put_the_current_folder_on_the_path():
    programs = processes.environment_for({}, {"PATH": ""})["PATH"].split(os.pathsep)
    assert "" not in programs and len(programs) > 1


def test_a_command_whose_process_id_is_used_again_ends_nobody(monkeypatch):
    ended, other = processes.start([sys.executable, "-c", ""]), processes.start(SLEEP, None, subprocess.PIPE)
    assert ended.wait() == 0 and other.stdout.readline() == "up\n"
    monkeypatch.setattr(ended, "pid", other.pid)
    processes.end(ended, 0.2)
    assert is_alive(other.pid)
    processes.end(other, 5.0)
