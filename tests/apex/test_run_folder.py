"""The folder of a run: made without races, written without tearing, found by name."""

import errno
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from apex import checkpoint, run_folder
from apex.config import ConfigError
from apex.run_folder import RunFolder, Tail, create, make_result, resolve
from apex.tensorboard_log import Scalars
from apex.watchdog import Watchdog


@pytest.fixture
def folder(tmp_path):
    return RunFolder(create(tmp_path / "runs", "cartpole", 3))


def at_once(count, call):
    """Return what ``call(i)`` returns in ``count`` threads that start together."""
    barrier = threading.Barrier(count)

    def wait_then_call(i):
        barrier.wait()
        return call(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(wait_then_call, range(count)))


def leftovers(path):
    return [p.name for p in path.iterdir() if p.name.startswith(".") and p.is_file()]


def result_of(**changes):
    known = dict(
        eval_return=487.5, eval_episodes=20, wall_s=12.5, ranks=4, transport="mpi", preset="cartpole", seed=3
    )
    row = {"learner_steps": 900, "agent_steps": 5000, "env_frames": 20000, "loss": 0.1}
    return make_result("target_return", 0, row, **known | changes)


def test_a_folder_is_named_after_preset_time_and_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.time, "strftime", lambda form: "20260102-030405")
    names = [create(tmp_path, preset, 7).name for preset in ("pong", "pong", "pong", "configs/mine.toml")]
    first = "pong-20260102-030405-s7"
    assert names == [first, f"{first}-2", f"{first}-3", "mine-20260102-030405-s7"]


def test_twenty_threads_that_create_at_once_get_twenty_folders(tmp_path):
    folders = at_once(20, lambda _: create(tmp_path, "cartpole", 0))
    assert len(set(folders)) == 20 and all(folder.is_dir() for folder in folders)
    assert resolve("latest", tmp_path) in folders
    assert leftovers(tmp_path) == []


def test_processes_that_create_at_once_get_different_folders(tmp_path):
    code = "import sys; from apex.run_folder import create; print(create(sys.argv[1], 'cartpole', 0))"
    jobs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        for _ in range(6)
    ]
    assert len({job.communicate()[0] for job in jobs}) == 6
    assert [job.returncode for job in jobs] == [0] * 6


def test_latest_is_a_relative_link_to_the_newest_run(tmp_path):
    create(tmp_path / "runs", "a", 0)
    newest = create(tmp_path / "runs", "b", 0)
    assert not os.path.isabs(os.readlink(tmp_path / "runs" / "latest"))
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert resolve("latest", tmp_path / "moved") == tmp_path / "moved" / newest.name


def test_what_a_run_leaves_is_found_by_way_of_latest(tmp_path):
    real, latest = RunFolder(create(tmp_path, "a", 0)), tmp_path / "latest"
    real.write_config("[run]\nseed = 3\n")
    real.append_row({"wall_s": 1.0})
    (real.checkpoints / "best.pt").write_text("weights")
    assert RunFolder(latest).write_result(result_of(seed=7)) and real.result() == result_of(seed=7)
    shell = f"cd {latest}; cat config.toml metrics.jsonl checkpoints/best.pt result.json error.txt"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True)
    assert (
        all(part in done.stdout for part in ("seed = 3", '"wall_s": 1.0', "weights", '"seed": 7'))
        and "No such file" in done.stderr
    )


def test_tensorboard_finds_every_run_once(tmp_path):
    from tensorboard.backend.event_processing.io_wrapper import GetLogdirSubdirectories

    runs = [RunFolder(create(tmp_path / where, "a", 0)) for where in ("runs", "runs", "runs/job-7")]
    for run in runs:
        run.tensorboard.mkdir()
        (run.tensorboard / "events.out.tfevents.1.host").touch()
    assert sorted(GetLogdirSubdirectories(str(tmp_path / "runs"))) == sorted(
        str(run.tensorboard) for run in runs
    )
    found = [
        folder
        for folder, _, files in os.walk(tmp_path, followlinks=True)
        if any("tfevents" in name for name in files)
    ]
    assert sorted(found) == sorted(str(run.tensorboard) for run in runs)  # so does its server in Rust look


def test_a_link_of_an_earlier_version_still_leads_to_its_run(tmp_path):
    folder = create(tmp_path, "a", 0)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(folder.name)
    assert resolve("latest", tmp_path) == folder == RunFolder(tmp_path / "latest").path


def test_latest_exists_at_every_moment_while_it_is_repointed(tmp_path):
    create(tmp_path, "first", 0)
    done, missing = threading.Event(), []

    def watch():
        while not done.is_set():
            try:
                os.readlink(tmp_path / "latest")
            except FileNotFoundError as error:
                missing.append(error)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for seed in range(200):
        create(tmp_path, "next", seed)
    done.set()
    watcher.join()
    assert missing == []


def test_a_real_folder_called_latest_is_left_alone_with_one_line_of_warning(tmp_path, capsys):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine.txt").write_text("keep")
    folder = create(tmp_path, "cartpole", 0)
    assert folder.is_dir() and (tmp_path / "latest" / "mine.txt").read_text() == "keep"
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "latest" in warning


def test_a_link_to_a_removed_run_is_replaced(tmp_path):
    (tmp_path / "latest").symlink_to("gone")
    folder = create(tmp_path, "cartpole", 0)
    assert resolve("latest", tmp_path) == folder


def test_a_file_system_without_links_costs_only_the_link(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(os, "link", refuse)
    folder = RunFolder(create(tmp_path, "cartpole", 0))
    assert "could not be updated" in capsys.readouterr().err
    assert folder.write_result(result_of()) and not folder.write_result(result_of(seed=2))
    assert folder.result() == result_of() and leftovers(folder.path) == []


def test_rows_come_back_in_order_and_are_on_disk_at_once(folder):
    rows = [{"learner_steps": n, "loss": None} for n in range(3)]
    for n, row in enumerate(rows):
        folder.append_row(row)
        assert RunFolder(folder.path).rows() == rows[: n + 1]
    assert len(folder.metrics_path.read_text().splitlines()) == 3


def test_there_are_no_rows_before_the_first(folder):
    assert folder.rows() == []


def test_a_torn_last_line_is_left_out_and_does_not_swallow_the_next_row(folder):
    folder.append_row({"n": 1})
    with open(folder.metrics_path, "a") as file:
        file.write('{"n": 2, "los')
    assert folder.rows() == [{"n": 1}]
    folder.append_row({"n": 3})
    assert folder.rows() == [{"n": 1}, {"n": 3}]


def test_a_row_that_is_not_json_is_refused_before_it_is_written(folder):
    folder.append_row({"n": 1})
    with pytest.raises(ValueError):
        folder.append_row({"n": float("nan")})
    assert folder.rows() == [{"n": 1}]


def test_a_tail_returns_each_row_once_and_a_half_written_one_when_it_is_whole(folder):
    tail = Tail(folder.metrics_path)
    assert tail.new_rows() == []
    folder.append_row({"n": 1})
    with open(folder.metrics_path, "a") as file:
        file.write('{"n":')
    assert tail.new_rows() == [{"n": 1}]
    assert tail.new_rows() == []
    with open(folder.metrics_path, "a") as file:
        file.write(" 2}\n")
    assert tail.new_rows() == [{"n": 2}]


def test_a_result_is_written_once(folder):
    assert folder.result() is None
    assert folder.write_result(result_of()) is True
    assert folder.write_result(result_of(seed=99)) is False
    assert folder.result() == result_of() and leftovers(folder.path) == []


def test_of_many_writers_exactly_one_writes_the_result(folder):
    won = at_once(16, lambda i: folder.write_result(result_of(seed=i)))
    assert won.count(True) == 1
    assert folder.result() == result_of(seed=won.index(True)) and leftovers(folder.path) == []


def test_the_first_error_wins(folder):
    assert folder.error() is None
    won = at_once(16, lambda i: folder.write_error(f"traceback {i}\n" * 1000))
    assert won.count(True) == 1
    assert folder.error() == f"traceback {won.index(True)}\n" * 1000


def test_a_result_interrupted_before_it_has_its_name_leaves_none(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        folder.write_result(result_of())
    assert folder.result() is None


def test_the_configuration_is_written_whole(folder):
    folder.write_config("[run]\nseed = 1\n")
    folder.write_config("[run]\nseed = 2\n")
    assert folder.config_path.read_text() == "[run]\nseed = 2\n" and leftovers(folder.path) == []


def test_the_parts_of_a_folder_are_where_they_are_documented(folder):
    assert folder.checkpoints == folder.path / "checkpoints" and folder.checkpoints.is_dir()
    assert folder.tensorboard == folder.path / "tensorboard"
    assert folder.config_path.name == "config.toml" and folder.metrics_path.name == "metrics.jsonl"


def test_a_run_is_found_by_name_by_path_and_as_latest(tmp_path):
    runs = tmp_path / "runs"
    first, second = create(runs, "a", 0), create(runs, "b", 0)
    assert resolve(first.name, runs) == first
    assert resolve(str(first), runs) == first
    assert resolve("latest", runs) == second


def test_an_unknown_run_is_refused_in_one_line_with_the_nearest(tmp_path):
    run = create(tmp_path, "cartpole", 0)
    for seed in range(30):
        create(tmp_path, "pong", seed)
    with pytest.raises(ConfigError, match=f"did you mean '{run.name}'") as refusal:
        resolve(run.name.replace("cart", "cat"), tmp_path)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    (tmp_path / "docs").mkdir()
    with pytest.raises(ConfigError, match="there are no runs in"):
        resolve(str(tmp_path / "docs"), tmp_path)
    with pytest.raises(ConfigError, match="no run 'latest'"):
        resolve("latest", tmp_path / "nowhere")


def test_a_result_has_exactly_the_documented_keys_in_order():
    result = result_of()
    assert list(result) == [
        "reason", "status", "eval_return", "eval_episodes", "learner_steps", "agent_steps", "env_frames",
        "wall_s",
        "ranks", "transport", "preset", "seed",
    ]  # fmt: skip
    assert (result["reason"], result["status"], result["eval_return"], result["wall_s"]) == (
        "target_return",
        0,
        487.5,
        12.5,
    )
    assert (result["learner_steps"], result["agent_steps"], result["env_frames"]) == (900, 5000, 20000)


def test_a_result_without_a_row_or_an_evaluation_is_still_strict_json():
    known = dict(eval_episodes=0, wall_s=0, ranks=4, transport="mpi", preset="p", seed=0)
    for eval_return in (None, float("nan")):
        result = make_result("error", 1, None, eval_return=eval_return, **known)
        json.dumps(result, allow_nan=False)
        assert (result["eval_return"], result["learner_steps"], result["env_frames"]) == (None, 0, 0)


def test_an_unknown_reason_is_refused_with_the_nearest():
    known = dict(eval_return=None, eval_episodes=0, wall_s=0, ranks=4, transport="mpi", preset="p", seed=0)
    with pytest.raises(ValueError, match="did you mean 'signal'"):
        make_result("signals", 0, None, **known)


def test_a_run_folder_that_was_removed_is_not_made_again(tmp_path):
    gone = RunFolder(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        checkpoint.save(gone.checkpoints / "best.pt", {"eval_return": 1.0})
    with pytest.raises(FileNotFoundError):
        Scalars(gone.tensorboard).write({"learner_steps": 1})
    Watchdog("actor 0", limit_s=60.0, stacks=gone.stacks_of("actor", 0)).close()
    assert not gone.path.exists()
