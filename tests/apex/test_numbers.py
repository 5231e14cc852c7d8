"""How numbers are shown: in reports and in the live view alike."""

import pytest

from apex import numbers


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "-"),
        (0, "0"),
        (0.0012, "0.0012"),
        (0.0123, "0.012"),
        (0.5, "0.50"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (12345.6, "12346"),
        (-0.5, "-0.50"),
    ],
)
def test_figures_have_all_digits_before_the_point_and_few_after_it(value, text):
    assert numbers.figure(value) == text


@pytest.mark.parametrize(
    "show", [numbers.figure, numbers.decimal, numbers.small, numbers.percent, numbers.count, numbers.rate]
)
def test_a_value_that_is_not_known_is_a_dash(show):
    assert show(None) == "-"


@pytest.mark.parametrize(
    "value, text", [(0.0212, "0.021"), (1.34, "1.3"), (2e-5, "2e-05"), (10, "10"), (12e6, "12M")]
)
def test_small_values_have_two_digits(value, text):
    assert numbers.small(value) == text
