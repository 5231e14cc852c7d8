"""How a role waits: quickly on a core of its own, without giving a shared one away."""

import pytest

from apex.transport import drive


@pytest.fixture
def made(monkeypatch):
    """What ``Wait`` asks of the system, in order."""
    made = []
    monkeypatch.setattr(drive.os, "sched_yield", lambda: made.append("yield"))
    monkeypatch.setattr(drive.time, "sleep", made.append)
    return made


def test_on_a_core_of_its_own_it_yields_ten_times_and_then_sleeps_longer_and_longer_up_to_a_millisecond(made):
    wait = drive.Wait()
    for _ in range(17):
        wait.idle()
    assert made[:10] == ["yield"] * 10
    assert made[10:] == [50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1e-3, 1e-3]
    wait.reset()
    wait.idle()
    assert made[-1] == "yield"


def test_with_more_ranks_than_cores_it_never_yields(made):
    wait = drive.Wait(crowded=True)
    for _ in range(3):
        wait.idle()
    wait.reset()
    wait.idle()
    assert made == [50e-6, 100e-6, 200e-6, 50e-6]


def test_a_yield_that_somebody_else_took_is_the_last_for_a_second(monkeypatch):
    now, made = [100.0], []

    def sched_yield():
        made.append("yield")
        now[0] += 0.004

    monkeypatch.setattr(drive.os, "sched_yield", sched_yield)
    monkeypatch.setattr(drive.time, "sleep", made.append)
    monkeypatch.setattr(drive.time, "perf_counter", lambda: now[0])
    wait = drive.Wait()
    assert wait.idle() == pytest.approx(0.004)
    wait.reset(), wait.idle()
    now[0] += 0.9
    wait.reset(), wait.idle()
    assert made == ["yield", 50e-6, 50e-6]
    now[0] += 0.2
    wait.reset(), wait.idle()
    assert made[-1] == "yield"


def test_a_port_that_messages_wake_waits_in_its_own_way_and_does_not_spin_on_one_that_nobody_takes(made):
    wait = drive.Wait()
    woken_at_once = made.append
    for _ in range(3):
        wait.idle(woken_at_once)
    assert made == [5e-3, 5e-3, 50e-6, 5e-3, 100e-6]
    wait.reset()
    wait.idle(woken_at_once)
    assert made[5:] == [5e-3]


@pytest.mark.parametrize("ranks, expected", [(1, False), (4, False), (5, True)])
def test_a_host_is_crowded_when_it_has_more_ranks_than_cores_that_they_may_use(monkeypatch, ranks, expected):
    monkeypatch.setattr(drive.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    assert drive.crowded(ranks) == expected
