"""Every algorithm passes the conformance suite, in each of its variants."""

from typing import ClassVar

import pytest
from algorithm_conformance import AlgorithmConformance

from apex import algorithms
from apex.config import ConfigError


class TestDoubleDuelingDqn(AlgorithmConformance):
    name = "double_dqn"


class TestPlainDqn(AlgorithmConformance):
    name = "double_dqn"
    settings: ClassVar[dict] = {"double": False, "dueling": False}


def test_an_unknown_algorithm_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'double_dqn'"):
        algorithms.load("double_dqm")
