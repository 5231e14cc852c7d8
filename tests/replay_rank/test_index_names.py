"""The names of the priority indexes: a private module of the folder is none."""

import pytest

from replay_rank.index import index_names, make_index


def test_every_name_makes_an_index_that_knows_its_name():
    assert [make_index(name, 3).name for name in index_names()] == index_names()


@pytest.mark.parametrize("name", ["_native", "_tensor", "__init__"])
def test_a_private_module_is_no_index(name):
    with pytest.raises(ValueError, match="no priority index is called"):
        make_index(name, 3)
