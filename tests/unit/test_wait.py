"""How a role waits: quickly on a core of its own, without giving a shared one away."""

from types import SimpleNamespace

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
    wait = drive.Wait(ranks=3, cores=2)
    for _ in range(3):
        wait.idle()
    assert made == [50e-6, 100e-6, 200e-6]


def test_a_wait_starts_with_half_the_sleep_that_the_last_one_ended_with(made):
    """So that a rank whose work comes every millisecond is not woken four times for it."""
    wait = drive.Wait(ranks=3, cores=2)
    for _ in range(4):
        wait.idle()
    for _ in range(3):  # much work at once, and none
        wait.reset()
    wait.idle(), wait.reset(), wait.idle(), wait.reset(), wait.idle(), wait.reset(), wait.idle()
    assert made[3:] == [400e-6, 200e-6, 100e-6, 50e-6, 50e-6]


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
    wait = drive.Wait(woken_by=made.append)
    for _ in range(3):
        wait.idle()
    assert made == [5e-3, 5e-3, 50e-6, 5e-3, 100e-6]
    wait.reset()
    wait.idle()
    assert made[5:] == [5e-3]


@pytest.mark.parametrize(
    "ranks, woken, told",
    [
        (4, False, "4 ranks on 4 cores here: a rank without work yields its core, then sleeps"),
        (5, False, "5 ranks on 4 cores here: a rank without work sleeps at once"),
        (5, True, "5 ranks on 4 cores here: a rank without work is woken by messages"),
    ],
)
def test_it_is_chosen_from_the_ranks_of_the_host_and_the_cores_that_they_may_use_and_told(monkeypatch, ranks, woken, told):
    monkeypatch.setattr(drive.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    port = SimpleNamespace(ranks_here=ranks, **({"wait": print} if woken else {}))
    wait = drive.wait_of(port)
    assert wait.crowded == (ranks > 4)
    assert str(wait) == told
