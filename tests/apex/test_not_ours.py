"""Parts of a checkpoint that are whole by their checksums and not of this program.

One line, never a traceback.
"""

import copy
import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from resumed_runs import Runs

from apex import checkpoint
from apex.state import require
from launch.cli.main import main
from learner import learner
from replay_rank import persistence

pytestmark = pytest.mark.usefixtures("as_before")

WRONG = {
    "missing": None,
    "null": None,
    "text": "x",
    "list": [[]],
    "table": {"x": {}},
    "negative": -1,
    "huge": 10**30,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run of one process with one checkpoint, and a copy of it that is never changed."""
    with pytest.MonkeyPatch.context() as patch:
        runs = Runs(tmp_path_factory.mktemp("run"), "cartpole", patch)
        runs.train(30)
    folder = checkpoint.complete(runs.folder.checkpoints)[0]
    shutil.copytree(runs.folder.path, runs.folder.path.parent / "kept", symlinks=True)
    return runs, folder


def seal_again(folder):
    """Give the manifest the digests of the files as they are now."""
    held = json.loads((folder / "manifest.json").read_bytes())["manifest"]
    for name in held["files"]:
        data = (folder / name).read_bytes()
        held["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    (folder / "manifest.json").write_text(json.dumps({"sha256": checkpoint._digest(held), "manifest": held}))


def restore(run):
    """Bring the run's folder back to what it was."""
    shutil.rmtree(run[0].folder.path)
    shutil.copytree(run[1].parents[1].parent / "kept", run[1].parents[1], symlinks=True)


def refusal(run, capsys):
    """Resume from what is there now; return the line in which it is refused, "" where it is taken."""
    seal_again(run[1])
    folder = str(run[1].parents[1])
    capsys.readouterr()
    status = main(["train", "--resume", folder, "--set", "run.max_learner_steps=31"])
    told = capsys.readouterr().err
    restore(run)
    assert "Traceback" not in told
    lines = [line for line in told.splitlines() if "no whole checkpoint" not in line]
    assert status == (2 if lines else 0)
    assert len(lines) < 2, told
    return "".join(lines)


def changed(values, name, how):
    """Return a copy of a state with another value, or none, under a name or path (``intake/free``)."""
    values = copy.deepcopy(values)
    *folders, name = name.split("/")
    place = values
    for folder in folders:
        place = place[folder]
    if how == "missing":
        del place[name]
    else:
        place[name] = WRONG[how]
    return values


def names_of(part):
    learner = (
        "counters",
        "param_version",
        "turn",
        "requested",
        "importance/smallest",
        "transport",
        "run_log",
        "answers",
    )
    replay = (
        "replay/inserted", "replay/sampled", "replay/stale_updates", "replay/landing", "replay/strata/state",
        "replay/slots",
        "replay/newest_generation", "limiter/inserted", "limiter/sampled", "counters", "segments", "places",
        "open_requests",
    )  # fmt: skip
    actor = (
        "env_seed", "intake/free", "intake/ready", "intake/sequence", "steps", "q_version",
        "policy/param_version", "policy/learner_steps",
        "policy/asked", "rng/state", "counters/agent_steps",
    )  # fmt: skip
    run_log = ("wall_s", "eval_return", "eval_episodes", "evaluations")
    return {"learner": learner, "replay-0": replay, "actor-0": actor, "run_log": run_log}[part]


@pytest.mark.parametrize("part", ["learner", "replay-0", "actor-0", "run_log"])
def test_values_that_are_missing_or_of_another_kind_are_refused_in_one_line(run, capsys, part):
    path = run[1] / f"{'learner' if part == 'run_log' else part}.json"
    original = json.loads(path.read_text())
    for name in names_of(part):
        for how in ("missing", "negative"):
            new = copy.deepcopy(original)
            if part == "run_log":
                new["values"]["run_log"] = changed(new["values"]["run_log"], name, how)
            else:
                new["values"] = changed(new["values"], name, how)
            path.write_text(json.dumps(new))
            told = refusal(run, capsys)
            is_number_of_a_run = part == "run_log" and how == "negative" and name == "eval_return"
            may_be_negative = ("q_version", "policy/param_version", "policy/learner_steps", "policy/asked")
            is_version = part == "actor-0" and how == "negative" and name in may_be_negative
            assert bool(told) != (is_number_of_a_run or is_version), (part, name, how)
            assert not told or path.name in told or part in told, told


@pytest.mark.parametrize("part", ["learner", "replay-0"])
def test_each_value_of_a_part_is_taken_as_it_was_written_and_as_no_other_kind(run, part):
    values = json.loads((run[1] / f"{part}.json").read_text())["values"]
    check = {
        "learner": lambda held: require(held, learner.STATE),
        "replay-0": lambda held: persistence.check_values(held, True),
    }[part]
    check(values)
    for name in set(names_of(part)) - {"transport"}:
        for how in set(WRONG) - {"negative", *(["null"] if name == "asked" else [])}:
            with pytest.raises(ValueError, match=f"no usable '{name}"):
                check(changed(values, name, how))


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"values": []}', '{"values": {}}', '{"values": null}', "3", "nothing", "[" * 5000]
)
@pytest.mark.parametrize("part", ["learner", "replay-0"])
def test_a_part_that_is_other_json_is_refused_in_one_line(run, capsys, part, text):
    (run[1] / f"{part}.json").write_text(text)
    assert f"{part}.json" in refusal(run, capsys)


@pytest.mark.parametrize("name", ["mass", "generation", "count", "segment", "row"])
def test_arrays_of_replay_that_do_not_fit_are_refused_in_one_line(run, capsys, name):
    path = run[1] / "replay-0.npz"
    with np.load(path) as file:
        arrays = dict(file)
    name = next(key for key in arrays if key.endswith(name))
    rest = {key: array for key, array in arrays.items() if key != name}
    for other in (
        {},
        {name: arrays[name][:-1]},
        {name: arrays[name].astype("S1")},
        {name: arrays[name][None]},
        {name: -1 - arrays[name]},
    ):
        np.savez(path, **rest, **other)
        told = refusal(run, capsys)
        assert "replay" in told, (name, other)


def networks():
    """Return what is done to learner.pt: name -> a change of its dictionary, in place or a new one."""
    changes = {
        f"without {name}": lambda state, name=name: state.pop(name) and None
        for name in ("online", "target", "optimizer", "random")
    }
    for name in ("online", "target", "optimizer", "random", "learner_steps"):
        for value in ("x", [], torch.ones(3)):
            changes[f"{name} {type(value).__name__}"] = lambda state, name=name, value=value: state.update(
                {name: value}
            )
    first = lambda state: next(iter(state["online"]))  # noqa: E731
    return changes | {
        "a list": lambda state: [1],
        "another step": lambda state: state.update(learner_steps=29),
        "a tensor of another shape": lambda state: state["online"].update({first(state): torch.ones(1)}),
        "a number for a tensor": lambda state: state["target"].update({first(state): 3}),
        "no averages": lambda state: state["optimizer"].pop("state") and None,
        "no groups": lambda state: state["optimizer"].pop("param_groups") and None,
        "averages of another shape": lambda state: state["optimizer"]["state"][0].update(
            exp_avg=torch.ones(1, 2, 3)
        ),
        "averages that are none": lambda state: state["optimizer"]["state"][0].update(exp_avg="x"),
        "random state of another length": lambda state: state["random"].update(
            cpu=torch.zeros(5, dtype=torch.uint8)
        ),
    }


@pytest.mark.parametrize("change", networks().values(), ids=networks())
def test_networks_that_do_not_fit_are_refused_in_one_line(run, capsys, change):
    path = run[1] / "learner.pt"
    state = torch.load(path, weights_only=True)
    path.unlink()  # latest.pt is a link to it
    torch.save(change(state) or state, path)
    assert "learner.pt" in refusal(run, capsys)


@pytest.mark.parametrize("which", ["best", "latest"])
def test_weights_to_play_with_that_do_not_fit_are_refused_in_one_line(run, capsys, which):
    folder = run[1].parents[1]
    path = folder / "checkpoints" / f"{which}.pt"
    state = torch.load(run[1] / "learner.pt", weights_only=True)
    first = next(iter(state["online"]))
    wrong = [
        [], {}, {"online": {}}, {"online": 3, "learner_steps": 1}, state | {"learner_steps": "x"},
        {"online": state["online"]},
        state | {"online": state["online"] | {first: torch.ones(2)}},
        state | {"online": state["online"] | {3: torch.ones(2)}},
        state | {"online": state["online"] | {first: 3}}, state | {"online": state["online"] | {first: "x"}},
    ]  # fmt: skip
    for other in wrong:
        path.unlink(missing_ok=True)
        torch.save(other, path)
        capsys.readouterr()
        assert main(["eval", str(folder), "--checkpoint", which, "--episodes", "1"]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1 and path.name in told, told
    restore(run)
