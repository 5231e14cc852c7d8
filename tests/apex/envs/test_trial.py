"""Code that is not ours may raise anything.

The check before the start refuses it in one line that names it.
"""

import os
import subprocess
import sys

import nasty_envs
import numpy as np
import pytest
from places import HELPERS, ROOT

from apex.config import ConfigError, EnvConfig, load
from apex.envs import GuardedEnvs, env_spec, make_envs
from apex.envs.foreign import in_one_line
from launch.cli.doctor_checks import WRONG, Facts, roms
from launch.run import preflight

SMALL = ["actor.envs=2", "evaluator.episodes=3"]


def config(name, *overrides):
    return load("cartpole", [f"env.id=nasty_envs:{name}-v0", *SMALL, *overrides])


def refusal(call, *args):
    """Return the one line with which ``call`` refuses."""
    with pytest.raises(ConfigError) as error:
        call(*args)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message


@pytest.mark.parametrize("name", ["Plain", "PlainMany"])
def test_environments_as_they_should_be_are_approved(name):
    assert preflight.check(config(name)).frame_shape == (3,)


@pytest.mark.parametrize("place", ["Constructor", "Reset", "Step"])
@pytest.mark.parametrize("error", nasty_envs.ERRORS)
def test_whatever_an_environment_raises_is_refused_in_one_line_with_its_id_and_type(place, error):
    name = f"nasty_envs:{place}{error}-v0"
    message = refusal(preflight.check, config(f"{place}{error}"))
    assert message.startswith(f"env.id = '{name}'") and type(nasty_envs.ERRORS[error]).__name__ in message


@pytest.mark.parametrize("name", nasty_envs.REFUSED)
def test_what_a_rank_would_refuse_is_refused_before_the_start(name):
    message = refusal(preflight.check, config(name))
    assert message.startswith(f"env.id = 'nasty_envs:{name}-v0'") and nasty_envs.REFUSED[name][2] in message


MODULES = {
    "raises": ("raise AttributeError('module has no attribute')", "AttributeError: module has no attribute"),
    "exits": ("import sys; sys.exit('end of all')", "SystemExit: end of all"),
    "syntax": ("def broken(:", "SyntaxError"),
    "file": ("open('no/such/file')", "FileNotFoundError"),
    "divides": ("1 / 0", "ZeroDivisionError"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_raises_anything_is_refused_in_one_line(name, tmp_path, monkeypatch):
    text, expected = MODULES[name]
    (tmp_path / f"module_that_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    env = EnvConfig(id=f"module_that_{name}:Game-v0")
    for call in (env_spec, lambda env: make_envs(env, 1, 0)):
        assert expected in refusal(call, env)


def test_ctrl_c_is_not_taken_for_the_environments(monkeypatch):
    monkeypatch.setattr(
        nasty_envs.Plain, "reset", lambda self, **options: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        preflight.check(config("Plain"))


def test_the_command_refuses_an_environment_that_exits_in_one_line_and_starts_nothing(tmp_path):
    path = os.pathsep.join((str(HELPERS), str(ROOT)))
    overrides = [
        "env.id=nasty_envs:StepExit-v0",
        "run.transport=local",
        f"run.directory={tmp_path}/runs",
        *SMALL,
    ]
    sets = [word for override in overrides for word in ("--set", override)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launch.cli.main", "train", "cartpole", *sets],
        env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    told = "apex: env.id = 'nasty_envs:StepExit-v0' fails in training: SystemExit: 3\n"
    assert (
        done.returncode == 2 and done.stderr.endswith(told) and "Traceback" not in done.stdout + done.stderr
    )
    assert not (tmp_path / "runs").exists()


def test_the_doctor_finds_an_environment_that_raises():
    facts = Facts(1, "nothing", [], config=config("ResetFile"))
    facts.refusal = refusal(preflight.check, facts.config)
    finding = next(roms(facts))
    assert (finding.level, finding.name) == (WRONG, "environment") and "FileNotFoundError" in finding.text


# --- while a run lasts --------------------------------------------------------------------------------


def test_an_environment_that_exits_in_the_middle_is_made_anew():
    envs = GuardedEnvs(lambda attempt: make_envs(EnvConfig(id="nasty_envs:Plain-v0"), 2, 0), 1, "actor 0")
    envs.reset()
    envs._envs.step = lambda actions: sys.exit(0)
    assert not envs.step(np.zeros(2, np.int64)).valid.any() and envs.restarts == 1
    assert envs.step(np.zeros(2, np.int64)).valid.all()


def test_environments_that_cannot_be_made_at_first_are_tried_again(capsys):
    def make(attempt):
        return make_envs(EnvConfig(id=f"nasty_envs:{'Plain' if attempt == 2 else 'ConstructorOs'}-v0"), 2, 0)

    envs = GuardedEnvs(make, 2, "actor 0")
    assert envs.restarts == 2 and envs.reset().shape == (2, 1, 3)
    assert "OSError: no display" in capsys.readouterr().err


def test_environments_that_do_not_close_cost_a_line_and_not_the_run(capsys):
    envs = GuardedEnvs(lambda attempt: make_envs(EnvConfig(id="nasty_envs:Plain-v0"), 1, 0), 0, "actor 0")
    envs._envs.close = lambda: sys.exit("window is gone")
    envs.close()
    assert (
        capsys.readouterr().err
        == "apex: actor 0: its environments do not close: SystemExit: window is gone\n"
    )


def test_what_an_error_says_cannot_speak_to_the_terminal():
    told = in_one_line(ValueError("red \x1b[31m, rung \a, torn \udcff"))
    assert told == "ValueError: red \\x1b[31m, rung \\x07, torn \\udcff"
