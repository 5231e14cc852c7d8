"""docs/architecture.md says what the code says: its tables of messages, its paths, and its sizes."""

import re
import sys

from places import ROOT

from apex.transport.wire import CONTROLS, KINDS

PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("|") and (cells := line.strip("| ").split(" | "))
}

sys.path.insert(0, str(ROOT / "tests"))
from sizes import sizes  # noqa: E402


def test_every_data_message_has_its_line():
    for kind, spec in KINDS.items():
        senders, receivers, _, flow, on_loss = ROWS[str(kind)]
        assert [senders, receivers, flow, on_loss] == [
            ", ".join(spec.senders),
            ", ".join(spec.receivers),
            spec.flow,
            spec.on_loss,
        ]


def test_every_control_message_has_its_line():
    for kind, control in CONTROLS.items():
        fields = ", ".join(control.fields) or "-"
        assert ROWS[kind] == [", ".join(control.senders), ", ".join(control.receivers), fields, control.flow]


def test_every_file_that_it_names_is_there():
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|h|md))`", PAGE))
    assert len(named) > 20 and [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_the_lines_of_every_option_are_those_of_the_tree_within_a_tenth():
    for name, count in sizes().items():
        assert abs(int(ROWS[name][0].replace(",", "")) - count) <= 0.1 * count, name


def test_it_stays_on_one_page():
    assert PAGE.count("\n") <= 200
