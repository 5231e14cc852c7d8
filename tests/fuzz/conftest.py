"""How many inputs the tests of this folder have tried: printed at the end, and no test tries fewer than it says."""

import pytest

_TRIED: dict[str, int] = {}


@pytest.fixture
def tried(request):
    """Return ``tried(n=1)``: so many more inputs. A test that is over has tried at least ``tried.least`` (default 1000)."""

    def count(number: int = 1) -> None:
        _TRIED[request.node.nodeid] = _TRIED.get(request.node.nodeid, 0) + number

    count.least = 1000
    yield count
    assert _TRIED.get(request.node.nodeid, 0) >= count.least, "fewer inputs than this test is to try"


def pytest_terminal_summary(terminalreporter):
    """Print the total."""
    if _TRIED:
        terminalreporter.write_line(f"fuzz: {sum(_TRIED.values())} inputs in {len(_TRIED)} tests")


@pytest.fixture
def ranks(tmp_path):
    """Four ranks over ZeroMQ (see ``zmq_oracle``)."""
    from zmq_oracle import FourRanks

    four = FourRanks(tmp_path)
    yield four
    four.close()
