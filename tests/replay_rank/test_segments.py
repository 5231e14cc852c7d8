"""The ring on disk: after any history, what is read back is a plain copy, to the last bit."""

import errno
import json
import shutil
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_replay import update
from segment_keeper import BATCH, Keeper, config_of, everything

from apex.files import NewFile
from replay_rank import persistence
from replay_rank.persistence import Located, live_places, read_rows


class Gate:
    """Lets slices through one by one."""

    def __init__(self, patch):
        self.slices, self.open = threading.Semaphore(0), False
        write = NewFile.write

        def wait_and_write(file, data):
            if not self.open and isinstance(data, memoryview):
                self.slices.acquire()
            return write(file, data)

        patch.setattr(NewFile, "write", wait_and_write)

    def release_all(self):
        self.open = True
        self.slices.release(10_000)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_after_any_history_a_checkpoint_is_a_plain_copy_of_the_replay(data):
    draw = data.draw
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(persistence, "SEGMENT_BYTES", draw(st.sampled_from([1, 700, 10_000])))
        patch.setattr(persistence, "_SLICE_BYTES", draw(st.sampled_from([1, 500, 10_000])))
        patch.setattr(persistence, "MAX_SEGMENTS", draw(st.sampled_from([3, 512])))
        keeper = Keeper(
            folder,
            BATCH * draw(st.integers(1, 7)),
            draw(st.sampled_from(["wide", "wide32", "numpy", "rank"])),
        )
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        for _ in range(draw(st.integers(1, 6))):
            _live(keeper, rng, draw(st.integers(0, 20)))
            gate = Gate(patch)
            keeper.begin()
            for _ in range(draw(st.integers(0, 8))):
                _live(keeper, rng, 2)
                for _ in range(draw(st.integers(0, 2))):
                    gate.slices.release()
            gate.release_all()
            keeper.conclude(whole=draw(st.booleans()))
        for steps, copy in keeper.copies.items():
            assert everything(keeper.reload(steps)[0]) == copy


def _live(keeper, rng, operations):
    """What a replay rank does all day."""
    replay = keeper.replay
    for _ in range(operations):
        if rng.random() < 0.6 or not replay.size:
            keeper.insert_if_it_may(rng.random(rng.integers(1, BATCH + 1)))
        else:
            out, _ = replay.draw(4)
            update(replay, out["key"][:2], rng.random(2))


def test_only_what_is_new_is_written_again_and_old_segments_are_linked(tmp_path):
    keeper = Keeper(tmp_path, 30)
    for _ in range(5):
        keeper.replay.put([1.0, 2.0, 3.0])
    first = keeper.save()
    keeper.replay.put([1.0])
    second = keeper.save()
    nbytes = keeper.replay.store.buffer.shape[1]
    sizes = sorted(path.stat().st_size for path in second.glob("*.bin"))
    assert sizes == [nbytes, 5 * nbytes]
    assert [path.stat().st_nlink for path in first.glob("*.bin")] == [2]
    shutil.rmtree(first)
    assert everything(keeper.reload(2)[0]) == keeper.copies[2]


def test_when_somebody_has_removed_the_last_checkpoint_all_is_written_anew(tmp_path):
    keeper = Keeper(tmp_path, 30)
    for _ in range(5):
        keeper.replay.put([1.0, 2.0, 3.0])
    shutil.rmtree(keeper.save())
    keeper.save()
    assert everything(keeper.reload(2)[0]) == keeper.copies[2]


def three_segments(folder):
    """Return a keeper whose newest checkpoint, the third, holds three segments of two places each, and their
    paths.
    """
    keeper = Keeper(folder, 30)
    for _ in range(3):
        keeper.replay.put([1.0, 2.0, 3.0]), keeper.replay.put([4.0])
        newest = keeper.save()
    return keeper, sorted(newest.glob("*.bin"))


@pytest.mark.parametrize("gone", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_places_of_a_segment_that_vanishes_during_a_run_are_written_anew(tmp_path, gone):
    keeper, paths = three_segments(tmp_path)
    for which in gone:
        paths[which].unlink()
    keeper.replay.put([5.0])
    folder = keeper.save()
    linked = {path.name for path in folder.glob("*.bin") if path.stat().st_nlink > 1}
    assert linked == {path.name for path in paths} - {paths[which].name for which in gone}
    written = json.loads((folder / "replay-0.json").read_text())["values"]["new_places"]
    assert written == 2 * len(gone) + 1
    assert everything(keeper.reload(4)[0]) == keeper.copies[4]


def test_a_segment_that_cannot_be_linked_or_copied_costs_one_checkpoint_only(tmp_path):
    keeper, paths = three_segments(tmp_path)
    paths[1].unlink()
    paths[1].mkdir()  # the name is there, and can be neither linked nor read, by root neither
    keeper.begin()
    keeper.segments.wait()
    assert keeper.segments.poll() == errno.EISDIR
    shutil.rmtree(keeper.request.partial(tmp_path))
    keeper.save()
    assert everything(keeper.reload(5)[0]) == keeper.copies[5]


def test_a_segment_goes_when_the_last_of_its_places_has_been_evicted(tmp_path):
    keeper = Keeper(tmp_path, 4 * BATCH)
    folders = []
    for _ in range(10):
        keeper.replay.put([1.0])
        folders.append(keeper.save())
    assert [len(list(folder.glob("*.bin"))) for folder in folders] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]


def test_a_place_that_is_not_written_yet_is_held_and_others_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(persistence, "_SLICE_BYTES", 1)
    keeper, gate = Keeper(tmp_path, 3 * BATCH), Gate(monkeypatch)
    for _ in range(6):
        keeper.replay.put([1.0, 1.0, 1.0])
    landing = keeper.replay.landing_place
    keeper.begin()
    assert not keeper.segments.holds(landing)  # it was evicted before
    keeper.replay.put([5.0])
    assert keeper.segments.holds(keeper.replay.landing_place)
    gate.slices.release(1)
    for _ in range(1000):
        if not keeper.segments.holds(keeper.replay.landing_place):
            break
        threading.Event().wait(0.01)
    keeper.replay.put([6.0])  # the oldest was written first
    assert keeper.segments.holds(keeper.replay.landing_place)
    gate.release_all()
    keeper.conclude()
    assert everything(keeper.reload(1)[0]) == keeper.copies[1]


def test_a_run_that_resumes_goes_on_linking_what_its_checkpoint_holds(tmp_path):
    keeper = Keeper(tmp_path, 30)
    for _ in range(5):
        keeper.replay.put([1.0, 2.0, 3.0])
    keeper.save()
    fresh, segments = keeper.reload(1)
    again = Keeper(tmp_path, 30)
    again.replay, again.segments, again.steps, again.base = fresh, segments, 7, 0
    folder = again.save()
    assert [path.stat().st_nlink for path in folder.glob("*.bin")] == [2]
    assert everything(again.reload(8)[0])[1] == keeper.copies[1][1]


def test_an_abandoned_checkpoint_holds_nothing_and_writes_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(persistence, "_SLICE_BYTES", 1)
    keeper, gate = Keeper(tmp_path, 5 * BATCH), Gate(monkeypatch)
    for _ in range(5):
        keeper.replay.put([1.0])
    keeper.begin()
    threading.Timer(0.2, gate.slices.release).start()
    keeper.segments.abandon()
    assert not any(keeper.segments.holds(place) for place in range(6))
    assert keeper.segments.poll() != 0
    assert not (keeper.request.partial(tmp_path) / "replay-0.json").exists()


@pytest.mark.parametrize("ranks, capacity", [(1, 60), (1, 36), (2, 36), (3, 36), (4, 48)])
def test_whole_places_are_dealt_out_over_other_ranks_oldest_first_with_keys_never_given_out(
    tmp_path, ranks, capacity
):
    keeper = Keeper(tmp_path, 30)
    rng = np.random.default_rng(1)
    for _ in range(23):
        keeper.replay.put(rng.random(BATCH))
    keys = keeper.replay.keys()
    update(keeper.replay, list(keys.values()), rng.random(len(keys)))
    keeper.save()
    config = config_of(capacity, ranks)
    dealt = [keeper.reload(1, config, index)[0] for index in range(ranks)]
    old = _by_number(keeper.replay)
    new = [_by_number(replay) for replay in dealt]
    assert {number: mass for held in new for number, mass in held.items()} == old
    assert max(len(held) for held in new) - min(len(held) for held in new) <= BATCH
    for replay in dealt:
        order = [
            int(replay.store.views["action"][place, 0])
            for place in live_places(replay.count, replay.landing_place)
        ]
        assert order == sorted(order)
        assert replay.generation.min() * replay.slots > keeper.replay.generation.max() * keeper.replay.slots
    assert sum(replay.inserted for replay in dealt) == keeper.replay.inserted


def _by_number(replay):
    """Return transition's number -> its mass."""
    masses = replay.index.save().reshape(-1, replay.batch)
    places = np.flatnonzero(replay.count)
    return {
        int(replay.store.views["action"][p, i]): masses[p, i] for p in places for i in range(replay.count[p])
    }


def test_rows_are_read_to_the_places_they_are_asked_for(tmp_path):
    rng = np.random.default_rng(0)
    held = rng.integers(0, 256, (20, 64), np.uint8)
    (tmp_path / "a.bin").write_bytes(held[:12].tobytes())
    (tmp_path / "b.bin").write_bytes(held[12:].tobytes())
    places, ring = rng.permutation(30)[:20], np.zeros((30, 64), np.uint8)
    segment = np.repeat([4, 9], [12, 8])
    row = np.concatenate([np.arange(12), np.arange(8)])
    read_rows(tmp_path, {"4": ["a.bin"], "9": ["b.bin"]}, segment, row, ring, places)
    assert (ring[places] == held).all()
    assert not ring[np.setdiff1d(np.arange(30), places)].any()


def test_a_located_copy_changes_apart(tmp_path):
    located = Located(3)
    copy = located.copy()
    copy.generation[0], copy.files[1] = 5, ("x", 1, "y")
    assert located.generation[0] == 0 and not located.files
