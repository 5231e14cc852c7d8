"""The command where it is installed.

In a folder with a space in its name, and beside packages with the names of ours.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from places import ROOT

from apex.run_folder import RunFolder

COMMAND = Path(sys.executable).parent / "apex"
NAMES = ("actors", "apex", "configs", "launch", "learner", "native", "replay_rank", "tests")
SHORT = ["run.max_learner_steps=20", "replay.min_size=100", "learner.batch_size=16", "evaluator.episodes=1"]
TAKES_S = 600  # compiling and copying, on a busy machine


def tracked() -> list[str]:
    """Return the files that belong to the checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: no list of the files that belong to it")
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The tracked files in a folder with a space in its name, with nothing built."""
    folder = tmp_path_factory.mktemp("spaced") / "a folder" / "apex mpi"
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def installed(checkout):
    """The command of a virtual environment in that folder, for which pip has made and installed a wheel."""
    venv = checkout / "virtual env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=TAKES_S)
    python = venv / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # a second torch would take minutes
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        ".",
    ]
    done = subprocess.run(pip, cwd=checkout, capture_output=True, text=True, timeout=TAKES_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "apex_mpi.py").is_file()
    return venv / "bin" / "apex"


@pytest.fixture(scope="module")
def namesakes(tmp_path_factory):
    """A folder with a package of each of our names, none of which can be imported."""
    folder = tmp_path_factory.mktemp("other packages")
    for name in NAMES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} of somebody else')\n")
    return folder


def short(directory: Path, transport: str) -> list[str]:
    settings = [*SHORT, f"run.directory={directory}", f"run.transport={transport}"]
    return ["train", "cartpole", *(word for setting in settings for word in ("--set", setting))]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["mpi", "zmq"])
def test_a_wheel_in_a_folder_with_a_space_trains_beside_packages_of_our_names(
    installed, namesakes, run_to_end, tmp_path, transport
):
    directory = tmp_path / "the runs"
    path = os.pathsep.join((str(COMMAND.parent), os.environ["PATH"]))  # where mpirun is
    ended = run_to_end(
        [installed, *short(directory, transport)], {"PYTHONPATH": str(namesakes), "PATH": path}, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert RunFolder(directory / "latest").result()["learner_steps"] == 20


@pytest.mark.slow
def test_a_wheel_holds_the_types_of_the_c_module_and_times_it_from_c(installed, run_to_end, tmp_path):
    venv = installed.parents[1]
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    assert (site / "native" / "_native.pyi").is_file()
    rows = tmp_path / "rows.json"
    code = "import launch.bench.index as index; index.QUICK_S = 1.0; from launch.cli.main import main; "
    code += f"main('bench index --quick --leaves 20000 --indexes wide --json {rows}'.split())"
    ended = run_to_end([venv / "bin" / "python", "-P", "-c", code], timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert {"c", "python"} == {row["caller"] for row in json.loads(rows.read_text())["rows"]}


def test_the_checkout_s_command_finds_our_packages_before_others_of_their_names(
    namesakes, run_to_end, tmp_path
):
    if not COMMAND.is_file():
        pytest.skip(f"{COMMAND} is not installed")
    ended = run_to_end([COMMAND, *short(tmp_path, "local")], {"PYTHONPATH": str(namesakes)}, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_a_package_of_our_name_that_is_imported_already_is_named_in_one_line(tmp_path, run_to_end):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").touch()
    (tmp_path / "sitecustomize.py").write_text("import launch\n")
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    ended = run_to_end([sys.executable, "-P", "-m", "apex_mpi", "train", "cartpole"], {"PYTHONPATH": path})
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert f"'launch' was imported when Python started, from {tmp_path}/launch/__init__.py" in ended.stderr


@pytest.mark.slow
def test_make_and_its_python_may_be_in_a_folder_with_a_space(checkout):
    python = checkout.parent / "my python"
    python.symlink_to(sys.executable)
    (checkout / "native" / "build" / "module.o").unlink(missing_ok=True)  # the file that needs Python
    done = subprocess.run(
        ["make", "native", f"PYTHON={python}"], cwd=checkout, capture_output=True, text=True, timeout=TAKES_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (checkout / "native" / "_native.abi3.so").is_file()
