"""`apex submit`: the script that it writes, and what it refuses before anything is submitted."""

import subprocess
import sys
import tomllib

import pytest
from places import ROOT

from apex.config import ConfigError
from launch.cli import submit
from launch.cli.main import main
from launch.cli.submit import SCRIPTS, Request, fill

ALL = sorted(SCRIPTS.glob("*.sbatch"))


def shown(capsys, **request) -> str:
    """Return what a dry run prints."""
    assert submit.run(Request(**{"preset": "cartpole", "dry_run": True} | request)) == 0
    return capsys.readouterr().out


def options(text: str) -> list[str]:
    """Return the options of sbatch that a script sets, without those commented out."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_there_is_a_script_of_each_kind():
    assert {path.stem for path in ALL} == set(submit.KINDS)


def test_the_command_offers_every_kind(capsys):
    for kind in submit.KINDS:
        nodes = ["--nodes", "2"] if kind in ("many", "requeue") else []
        assert main(["submit", "cartpole", "--kind", kind, *nodes, "--dry-run"]) == 0
        assert "# sbatch THIS_FILE" in capsys.readouterr().out


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_script_is_short_has_its_settings_on_top_and_is_valid_shell(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 65 and max(map(len, lines)) <= 140
    commands = [at for at, line in enumerate(lines) if line and not line.startswith("#")]
    assert all(at < commands[0] for at, line in enumerate(lines) if line.startswith("#SBATCH")), (
        "sbatch reads no further"
    )
    subprocess.run(["bash", "-n", path], check=True)


def test_what_is_beside_the_code_is_packaged():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "launch"
    ]
    found = {path for pattern in packaged for path in (ROOT / "launch").glob(pattern)}
    beside = {
        path for path in (ROOT / "launch").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert found == beside and set(ALL) <= found


def test_one_node_gets_a_core_for_each_rank(capsys):
    text = shown(capsys, ranks_per_node=6, cpus_per_rank=2)
    assert {"--nodes=1", "--cpus-per-task=12"} <= set(options(text))
    assert "\nRANKS=6\n" in text
    assert text.endswith("# sbatch THIS_FILE cartpole\n")


def test_ranks_by_default_are_those_that_the_preset_asks_for(capsys):
    assert "--ntasks-per-node=4" in options(shown(capsys, preset="pong", nodes=3))  # 11 ranks


def test_many_nodes_are_started_as_the_site_says(capsys):
    text = shown(
        capsys,
        nodes=3,
        ranks_per_node=8,
        setup="module load 'my mpi'",
        launch="mpirun",
        time="01:00:00",
        partition="cpu",
    )
    assert {"--nodes=3", "--ntasks-per-node=8", "--time=01:00:00", "--partition=cpu"} <= set(options(text))
    said = subprocess.run(
        ["bash", "-c", text[: text.index('\neval "')] + '\nprintf "%s|%s" "$SETUP" "$LAUNCH"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "module load 'my mpi'|mpirun"


def test_the_command_that_the_environment_names_is_the_one_that_runs(capsys, monkeypatch):
    monkeypatch.setenv("APEX", "/some where/apex-box")
    assert "\nAPEX='/some where/apex-box'\n" in shown(capsys, nodes=2)


def test_the_parts_of_a_heterogeneous_job_have_options_of_their_own(capsys):
    more = ("replay.ranks=2", "replay.capacity=100_000", "learner.threads=3")
    text = shown(
        capsys,
        kind="heterogeneous",
        overrides=more,
        nodes=2,
        ranks_per_node=5,
        partition="cpu",
        learner_partition="gpu",
        gpus=2,
        mem="8G",
    )
    learner, actors = (set(options(part)) for part in text.split("#SBATCH hetjob\n"))
    assert {"--ntasks=4", "--cpus-per-task=3", "--gres=gpu:2", "--partition=gpu", "--mem=8G"} <= learner
    assert {"--nodes=2", "--ntasks-per-node=5", "--cpus-per-task=1", "--partition=cpu", "--mem=8G"} <= actors
    assert not [option for option in actors if "gres" in option]


def test_an_option_is_put_where_it_is_or_added_and_none_takes_it_out():
    script = (
        "#!/bin/bash\n#SBATCH --time=1\n##SBATCH --gres=gpu:1\n#SBATCH --mem=2\n\nA=${A:-1}  # why\necho\n"
    )
    filled = fill(script, [{"time": None, "gres": "gpu:3", "qos": "low", "requeue": ""}], {"A": "it's"})
    assert options(filled) == ["--gres=gpu:3", "--mem=2", "--qos=low", "--requeue"]
    assert (
        subprocess.run(["bash", "-c", filled + "echo $A"], capture_output=True, text=True).stdout.split("\n")[
            1
        ]
        == "it's"
    )


@pytest.mark.parametrize(
    "request_, said",
    [
        ({"preset": "cartpol"}, "did you mean 'cartpole'"),
        ({"ranks_per_node": 3}, "3 ranks are too few"),
        ({"kind": "single", "nodes": 2}, "is for one node"),
        ({"nodes": 2, "overrides": ("run.transport=zmq",)}, "cannot run on many nodes"),
        ({"overrides": ("run.transport=local",)}, "cannot run on many nodes"),
        ({"kind": "compare", "overrides": ("run.seed=1",)}, "leave out --set"),
        ({"kind": "requeue", "doctor": True}, "leave out --kind requeue"),
        ({"learner_partition": "gpu"}, "--kind heterogeneous"),
        ({"sbatch": ("--qos=low",)}, "without its dashes"),
        ({"sbatch": ("qos=",)}, "write an option of sbatch"),
        ({"partition": "a\nrm -rf x"}, "no line of a job script can hold"),
        ({"setup": "a\x00b"}, "no line of a job script can hold"),
    ],
)
def test_a_job_that_could_not_run_is_refused_in_one_line(request_, said, capsys):
    with pytest.raises(ConfigError) as error:
        submit.run(Request(**{"preset": "cartpole", "dry_run": True} | request_))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert capsys.readouterr().out == ""


def test_a_machine_without_sbatch_is_told_of_in_one_line_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not installed here"):
        submit.run(Request("cartpole", (f"run.directory={tmp_path}",)))
    assert not [*tmp_path.iterdir()]


def test_the_command_passes_what_it_is_given():
    command = [
        sys.executable,
        "-m",
        "launch.cli.main",
        "submit",
        "cartpole",
        "--seed",
        "3",
        "--nodes",
        "2",
        "--dry-run",
    ]
    said = subprocess.run(
        [*command, "--transport", "mpi", "--sbatch", "qos=low"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.endswith("# sbatch THIS_FILE cartpole --set run.transport=mpi --set run.seed=3\n")
    assert "#SBATCH --qos=low\n" in said.stdout
