"""What all roles share: the last report, the watchdog, and the end of a local run that fails."""

import faulthandler
import signal
import time

import pytest

from apex.loop import StopSignals, Wait, drive
from apex.metrics import Counters
from apex.role import Role
from apex.run_folder import RunFolder
from apex.topology import ACTOR
from apex.watchdog import Watchdog
from launch.cli.main import main


class BusyPort:
    """A port whose earlier report is still on its way for the first ``refusals`` tries."""

    stopping = True

    def __init__(self, refusals: int):
        self.refusals, self.reports, self.done = refusals, [], False

    def progress(self):
        pass

    def poll_request(self):
        return None

    def poll_refusals(self):
        return {}

    def send_report(self, vector):
        self.refusals -= 1
        if self.refusals >= 0:
            return False
        self.reports.append(vector.copy())
        return True

    def finish(self):
        assert self.reports, "finished before its last counts were sent"
        self.done = True


@pytest.mark.parametrize("refusals", [0, 1, 5])
def test_the_last_report_is_sent_once_even_if_an_earlier_one_is_still_on_its_way(refusals):
    port = BusyPort(refusals)
    role = Role("actor", port, 1.0)
    role.counters.add("agent_steps", 7)
    for step in range(10):
        role.step()
        assert port.done == (step >= refusals)
    assert len(port.reports) == 1 and port.reports[0][0] == 7


class Waiting:
    """A role that waits for ``awaited``."""

    def __init__(self, awaited):
        self.awaited = awaited

    def waiting_for(self):
        return self.awaited


def test_the_watchdog_names_a_long_wait_once_and_is_silent_about_one_by_design(capsys):
    for awaited, told in (("sample batches", 1), (None, 0)):
        watchdog = Watchdog("learner (rank 0)", limit_s=0.0)
        watchdog._since -= 1
        for _ in range(3):
            watchdog.check(Waiting(awaited))
        complaints = capsys.readouterr().err.splitlines()
        assert complaints == ["apex: learner (rank 0) has waited 0 s for sample batches"] * told


def test_the_watchdog_leaves_no_file_where_nothing_has_hung_and_the_stack_where_it_has(tmp_path):
    quiet, hung = (
        Watchdog("actor 0", limit_s=0.2, stacks=tmp_path / name / "actor-0.txt") for name in ("quiet", "hung")
    )
    time.sleep(0.5)  # faulthandler keeps time for the last that asked: a process is one rank
    quiet.close(), hung.close()
    assert [path.name for path in tmp_path.iterdir()] == ["hung"]
    assert "test_the_watchdog_leaves_no_file" in (tmp_path / "hung" / "actor-0.txt").read_text()


def test_the_watchdog_is_silent_as_long_as_steps_end(tmp_path):
    watchdog = Watchdog("actor 0", limit_s=0.4, stacks=tmp_path / "stacks" / "actor-0.txt")
    for _ in range(40):
        time.sleep(0.02)
        watchdog.beat()
    watchdog.close()
    assert list(tmp_path.iterdir()) == []


def test_a_local_run_that_fails_leaves_its_traceback_and_a_result_that_says_so(monkeypatch, tmp_path):
    def fail(self):
        raise RuntimeError("injected")

    monkeypatch.setattr("actors.actor.Actor._step", fail)
    with pytest.raises(RuntimeError, match="injected"):
        main(["train", "cartpole", "--transport", "local", "--set", f"run.directory={tmp_path}"])
    folder = RunFolder(tmp_path / "latest")
    assert folder.error().splitlines()[-1] == "RuntimeError: injected"
    assert (folder.result()["reason"], folder.result()["status"]) == ("error", 1)


class Stopped:
    """A role at the end of a run.

    It is stopped in its first step until ``is_over()``, goes on, and finishes in its second.
    """

    stopping, finished = True, False

    def __init__(self, is_over):
        self.port, self.counters, self._is_over = self, Counters(ACTOR), is_over

    def step(self) -> bool:
        self.finished = self._is_over is None
        while not self.finished and not self._is_over():
            time.sleep(0.01)
        self._is_over = None
        signal.raise_signal(signal.SIGCONT)
        return False

    def waits_for(self) -> str:
        return "its end"

    waiting_for = waits_for


@pytest.fixture
def signals():
    """The signals as a rank takes them, for the time of a test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCONT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield StopSignals()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_who_is_stopped_for_longer_than_any_limit_and_goes_on_has_not_hung_and_ends_in_order(
    tmp_path, signals, capsys
):
    stacks = tmp_path / "stacks" / "actor-0.txt"
    watchdog = Watchdog("actor 0", limit_s=0.5, stacks=stacks)

    def is_over() -> bool:
        if not stacks.stat().st_size:
            return False
        faulthandler.cancel_dump_traceback_later()
        watchdog.limit_s = 100  # this test may be slow
        return True

    drive(Stopped(is_over), watchdog, 0.1, signals, Wait())
    watchdog.close()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == ""


@pytest.mark.parametrize("grace_s, told", [(0, 1), (1000, 0)])
def test_no_wait_counts_while_others_may_still_be_starting(capsys, grace_s, told):
    watchdog = Watchdog("learner (rank 0)", limit_s=0.0, grace_s=grace_s)
    watchdog.reset()
    watchdog._since -= 1
    watchdog.check(Waiting("sample batches"))
    assert capsys.readouterr().err.count("apex: learner (rank 0) has waited 0 s for sample batches") == told
