"""How many inputs the tests of this folder have tried: no test tries fewer than it says.

``tests/conftest.py`` prints the sum.
"""

import pytest


@pytest.fixture
def tried(record_property):
    """Return ``tried(n=1)``: so many more inputs.

    A test that is over has tried at least ``tried.least`` (default 1000).
    """
    inputs = 0

    def count(number: int = 1) -> None:
        nonlocal inputs
        inputs += number

    count.least = 1000
    yield count
    record_property("tried", inputs)
    assert inputs >= count.least, "fewer inputs than this test is to try"


@pytest.fixture
def ranks(tmp_path):
    """Four ranks over ZeroMQ (see ``zmq_oracle``)."""
    from zmq_oracle import FourRanks

    four = FourRanks(tmp_path)
    yield four
    four.close()
