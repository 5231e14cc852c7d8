"""Temporary folders: their user's alone, gone with their process or the next.

Other users' and running ones stay.
"""

import os
import stat
import time
from pathlib import Path

import pytest

from apex import leftovers
from apex.token import check_folder

LAUNCH = Path(leftovers.__file__).parent
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what belongs to another user")


def test_a_folder_is_for_its_user_alone_and_goes_with_all_that_is_in_it(tmp_path):
    with leftovers.folder("apex-x-", tmp_path) as made:
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        check_folder(str(made))
        (made / "left").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_in_use_stays_and_abandoned_ones_go(tmp_path):
    (tmp_path / "apex-x-1-left").mkdir(), (tmp_path / "apex-y-1-other").mkdir()
    with leftovers.folder("apex-x-", tmp_path) as first, leftovers.folder("apex-x-", tmp_path) as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second, tmp_path / "apex-y-1-other"])


def test_one_that_is_just_being_made_stays_and_one_that_never_was_goes(tmp_path):
    (tmp_path / ".apex-x-1-young").mkdir(), (tmp_path / ".apex-x-1-old").mkdir()
    then = time.time() - 2 * leftovers._ABANDONED_S
    os.utime(tmp_path / ".apex-x-1-old", (then, then))
    leftovers.remove_abandoned("apex-x-", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".apex-x-1-young"]


@as_root
def test_another_users_folder_stays(tmp_path):
    theirs = tmp_path / "apex-x-1-theirs"
    theirs.mkdir(), os.chown(theirs, NOBODY, NOBODY)
    leftovers.remove_abandoned("apex-x-", tmp_path)
    assert theirs.exists()


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").mkdir(), (tmp_path / "precious" / "file").write_text("")
    (tmp_path / "apex-x-1-link").symlink_to(tmp_path / "precious")
    leftovers.remove_abandoned("apex-x-", tmp_path)
    assert (tmp_path / "precious" / "file").exists()


def test_nobody_else_makes_temporary_folders():
    others = [path for path in LAUNCH.rglob("*.py") if path.name != "leftovers.py"]
    assert not [
        path.name
        for path in others
        if "TemporaryDirectory" in path.read_text() or "mkdtemp" in path.read_text()
    ]


# --- who may enter ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o722, 0o1777])
def test_a_folder_that_others_may_enter_is_no_place_for_sockets(tmp_path, mode):
    (tmp_path / "open").mkdir(), (tmp_path / "open").chmod(mode)
    with pytest.raises(ValueError, match="open to other users; `chmod 700"):
        check_folder(str(tmp_path / "open"))


@as_root
def test_nor_is_another_users(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o700), os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    with pytest.raises(ValueError, match="another user"):
        check_folder(str(tmp_path / "theirs"))


def test_nor_a_link_to_one_nor_none(tmp_path):
    (tmp_path / "good").mkdir(mode=0o700), (tmp_path / "link").symlink_to(tmp_path / "good")
    with pytest.raises(ValueError, match="is no folder"):
        check_folder(str(tmp_path / "link"))
    with pytest.raises(ValueError, match="No such file"):
        check_folder(str(tmp_path / "none"))
