"""What is left of an mpirun's stderr once its own messages about lost ranks are left out."""

import pytest

from launch.run.stderr_filter import spoken

BORDER = "-" * 74 + "\n"
LOST = [
    BORDER,
    "prterun noticed that process rank 0 with PID 1 on node a exited on\n",
    "signal 9 (Killed).\n",
    BORDER,
]
EXITED = [
    BORDER,
    "prterun has exited due to process rank 0 with PID 2 on node a exiting\n",
    "improperly.\n",
    "\n",
    BORDER,
]
OTHER = [BORDER, "There are not enough slots available in the system\n", "\n", BORDER]


@pytest.mark.parametrize("message", [LOST, EXITED])
def test_what_the_launcher_says_of_lost_ranks_is_left_out_and_nothing_else(message):
    assert list(spoken(["before\n", *message, "between\n", *message, "after\n"])) == [
        "before\n",
        "between\n",
        "after\n",
    ]


def test_its_other_messages_stay_as_they_are():
    assert list(spoken(["before\n", *OTHER, *LOST, *OTHER])) == ["before\n", *OTHER, *OTHER]


def test_a_message_without_its_end_is_passed_on_at_the_end():
    assert list(spoken(LOST[:2])) == LOST[:2]


@pytest.mark.parametrize(
    "before", [[], [BORDER], OTHER], ids=["nothing", "a line of dashes", "another message"]
)
def test_lines_pass_as_they_come(before):
    def lines():
        yield from [*before, "one\n"]
        raise AssertionError("looked for more before it had passed on what it has")

    passed = spoken(lines())
    assert [next(passed) for _ in [*before, "one\n"]] == [*before, "one\n"]
