"""Configuration: presets and overrides, every refusal in one line, and the way back to TOML."""

import dataclasses
import tomllib

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from apex import config as configuration
from apex.config import (
    Config,
    ConfigError,
    field_type,
    fields,
    from_tables,
    load,
    override,
    presets,
    sections,
    to_tables,
    to_toml,
)
from replay_rank.rate_limit import RateLimiter


def refusal(call, *args):
    """Return the one line with which ``call`` refuses."""
    with pytest.raises(ConfigError) as error:
        call(*args)
    message = str(error.value)
    assert "\n" not in message and 10 < len(message) < 900
    return message


def set_field(text):
    return load("cartpole", [text])


# --- presets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_runs_within_its_limits_and_survives_the_way_to_toml_and_back(name, tmp_path):
    config = load(name)
    RateLimiter(config)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load(str(path)) == config


def test_the_presets_that_are_documented_are_there():
    assert {"cartpole", "pong", "pong-small", "paper"} <= set(presets())


def test_a_preset_only_overrides_the_defaults(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[learner]\nbatch_size = 7\n")
    config = load(str(path))
    assert config == dataclasses.replace(
        Config(), learner=dataclasses.replace(Config().learner, batch_size=7)
    )


def test_overrides_win_over_the_preset_and_later_ones_over_earlier_ones():
    assert load("cartpole").learner.batch_size == 64
    config = load("cartpole", ["learner.batch_size=16", "run.seed=3", "learner.batch_size=32"])
    assert (config.learner.batch_size, config.run.seed) == (32, 3)


def test_override_replaces_and_checks_fields_of_a_configuration():
    config = load("cartpole")
    assert override(config, run__seed=3, env__id="Acrobot-v1") == load(
        "cartpole", ["run.seed=3", "env.id=Acrobot-v1"]
    )
    assert "run.seed" in refusal(lambda: override(config, run__seed=-1))


def test_a_configuration_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("cartpole").run.seed = 3


# --- fields ---------------------------------------------------------------------------------------

ALL_FIELDS = [(section, name) for section, cls in sections().items() for name in fields(cls)]


@pytest.mark.parametrize("section, name", ALL_FIELDS)
def test_every_field_has_a_plain_type_one_line_of_doc_and_a_default_it_would_accept(section, name):
    cls = sections()[section]
    field, kind = fields(cls)[name], field_type(cls, name)
    assert kind in (int, float, bool, str) and type(field.default) is kind
    assert field.metadata["doc"] and "\n" not in field.metadata["doc"]
    assert from_tables([("test", {section: {name: field.default}})]) == Config()


# --- values on the command line -----------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("replay.capacity=50_000", 50_000),
        (" run.seed = 7 ", 7),
        ("learner.learning_rate=1e-3", 1e-3),
        ("run.max_wall_s=60", 60.0),
        ("algorithm.dueling=False", False),
        ("algorithm.dueling=TRUE", True),
        ("run.transport=local", "local"),
        ("env.id=ns/Some=Game-v0", "ns/Some=Game-v0"),
        ("run.directory=5", "5"),
        ("run.directory=true", "true"),
        ("run.directory=", ""),
    ],
)
def test_text_is_read_as_its_fields_type(text, expected):
    section, name = text.split("=")[0].strip().split(".")
    value = getattr(getattr(set_field(text), section), name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("run.sed=1", "unknown field 'run.sed'; did you mean 'seed'?"),
        ("runn.seed=1", "unknown section 'runn'; did you mean 'run'?"),
        (
            "run.transport=mpl",
            "run.transport = 'mpl' is not a choice; did you mean 'mpi'? (choices: local, mpi",
        ),
        ("learner.optimizer=adamw", "did you mean 'adam'?"),
        ("algorithm.network=nature", "did you mean 'nature_cnn'?"),
        ("run.seed=1.5", "run.seed = '1.5' must be a whole number"),
        ("run.seed=1e3", "run.seed = '1e3' must be a whole number"),
        ("run.seed=", "run.seed = '' must be a whole number"),
        ("learner.beta=half", "learner.beta = 'half' must be a number"),
        ("algorithm.double=1", "algorithm.double = '1' must be true or false"),
        ("algorithm.double=yes", "algorithm.double = 'yes' must be true or false"),
        ("learner.beta=nan", "learner.beta = nan must be finite"),
        ("replay.alpha=inf", "replay.alpha = inf must be finite"),
        ("replay.alpha=-inf", "replay.alpha = -inf must be finite"),
        ("learner.beta=1.01", "learner.beta = 1.01 is too large; the most is 1.0"),
        ("run.seed=-1", "run.seed = -1 is too small; the least is 0"),
        ("algorithm.n_step=0", "algorithm.n_step = 0 is too small; the least is 1 agent steps"),
        ("algorithm.n_step=65", "algorithm.n_step = 65 is too large; the most is 64 agent steps"),
        ("replay.eps=0", "replay.eps = 0.0 is too small"),
        ("seed=1", "write --set section.field=value"),
        ("run.seed", "write --set section.field=value"),
        ("run.=1", "write --set section.field=value"),
        (".seed=1", "write --set section.field=value"),
        ("=", "write --set section.field=value"),
    ],
)
def test_an_override_that_cannot_be_used_is_refused_in_one_line(text, expected):
    message = refusal(set_field, text)
    assert message.startswith("--set") and expected in message


# --- preset files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "toml, expected",
    [
        ("[run]\nsed = 1", "unknown field 'run.sed'; did you mean 'seed'?"),
        ("[lerner]\nbeta = 1", "unknown section 'lerner'; did you mean 'learner'?"),
        ("run = 3", "'run' must be a section with fields, got 3"),
        ("[run]\nseed = '1'", "run.seed = '1' must be a whole number"),
        ("[run]\nseed = true", "run.seed = True must be a whole number"),
        ("[run]\nseed = 1.0", "run.seed = 1.0 must be a whole number"),
        ("[run]\ndirectory = 3", "run.directory = 3 must be text"),
        ("[run]\nstop_at_target = 1", "run.stop_at_target = 1 must be true or false"),
        ("[learner]\nbeta = true", "learner.beta = True must be a number"),
        ("[learner]\nbeta = nan", "learner.beta = nan must be finite"),
        ("[learner]\nbeta = inf", "learner.beta = inf must be finite"),
        ("[run]\nseed = [1]", "run.seed = [1] must be a whole number"),
        ("[run.seed]\nx = 1", "must be a whole number"),
        ("[run]\nseed = ", "is not valid TOML"),
        ("[run]\nseed = 1\nseed = 2", "is not valid TOML"),
    ],
)
def test_a_preset_file_that_cannot_be_used_is_refused_in_one_line_by_its_name(tmp_path, toml, expected):
    path = tmp_path / "mine.toml"
    path.write_text(toml)
    message = refusal(load, str(path))
    assert message.startswith(f"preset '{path}'") and expected in message


def test_a_whole_number_is_taken_for_a_number(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[learner]\nbeta = 1")
    beta = load(str(path)).learner.beta
    assert beta == 1.0 and type(beta) is float


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not valid TOML" in refusal(load, str(path))


@pytest.mark.parametrize(
    "name, nearest", [("cartpol", "cartpole"), ("pong_small", "pong-small"), ("papper", "paper")]
)
def test_an_unknown_preset_is_refused_with_the_nearest_and_all_choices(name, nearest):
    message = refusal(load, name)
    assert message.startswith(f"unknown preset '{name}'") and all(preset in message for preset in presets())
    assert nearest is None or f"did you mean '{nearest}'?" in message


# --- settings that must fit each other ----------------------------------------------------------------


@pytest.mark.parametrize(
    "batch, ranks, capacity", [(50, 1, 50_001), (50, 2, 50_050), (7, 3, 1), (50, 3, 100_000)]
)
def test_a_capacity_that_is_no_multiple_is_refused_with_one_that_is_accepted(batch, ranks, capacity):
    overrides = [f"actor.intake_batch={batch}", f"replay.ranks={ranks}", "replay.min_size=1"]
    message = refusal(load, "cartpole", [*overrides, f"replay.capacity={capacity}"])
    assert message.startswith(
        f"replay.capacity = {capacity} must be a multiple of actor.intake_batch x replay.ranks"
    )
    assert f"= {batch * ranks}" in message
    suggested = int(message.rsplit(" ", 1)[1])
    assert load("cartpole", [*overrides, f"replay.capacity={suggested}"]).replay.capacity == suggested
    assert 0 <= suggested - capacity < batch * ranks


def test_a_minimum_size_beyond_the_capacity_is_refused():
    overrides = ["replay.capacity=500", "replay.min_size=501"]
    assert refusal(load, "cartpole", overrides).startswith(
        "replay.min_size = 501 exceeds replay.capacity = 500"
    )
    load("cartpole", ["replay.capacity=500", "replay.min_size=500", "replay.error_buffer=1"])


# --- back to TOML -----------------------------------------------------------------------------------


def values(section, name):
    """Return a strategy of values that the field accepts by itself."""
    cls = sections()[section]
    meta, kind = fields(cls)[name].metadata, field_type(cls, name)
    if meta["choices"]:
        return st.sampled_from(meta["choices"])
    if kind is float:
        return st.floats(meta["low"], meta["high"], allow_nan=False, allow_infinity=False)
    if kind is int:
        return st.integers(meta["low"], meta["high"] or 2**62)
    return (
        st.booleans()
        if kind is bool
        else st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_configuration_survives_the_way_to_toml_and_back(data):
    chosen = data.draw(st.lists(st.sampled_from(ALL_FIELDS), max_size=8, unique=True))
    tables = {}
    for section, name in chosen:
        tables.setdefault(section, {})[name] = data.draw(values(section, name))
    try:
        config = from_tables([("test", tables)])
    except ConfigError as error:
        assume("multiple of" not in str(error) and "exceeds" not in str(error))
        raise
    assert from_tables([("again", tomllib.loads(to_toml(config)))]) == config
    assert from_tables([("again", to_tables(config))]) == config


@pytest.mark.parametrize("text", ['a"b', "a\\b", "a\nb\tc\rd", "\x01\x1f\x7f\x80", "ä€😀", "'''", "#"])
def test_any_text_survives_the_way_to_toml_and_back(text):
    config = override(Config(), run__directory=text)
    assert tomllib.loads(to_toml(config))["run"]["directory"] == text


def test_a_raw_value_never_stays_in_a_configuration():
    config = load("cartpole", ["env.id=X", "run.directory=y"])
    assert type(config.env.id) is str and not isinstance(config.run.directory, configuration._Raw)


class TestOldNames:
    """Names of fields that have changed are read for one release."""

    @pytest.fixture(autouse=True)
    def as_in_a_new_process(self, monkeypatch):
        monkeypatch.setattr(configuration, "_warned_of", set())

    @pytest.mark.parametrize("old, value", [
        ("run.tolerate", "actors"), ("run.silence_s", 12.0), ("run.drain_s", 9.0), ("replay.error_band", 0.5),
    ])  # fmt: skip
    def test_an_old_name_sets_the_field_and_one_line_says_the_new_name(self, capsys, old, value):
        section, name = old.split(".")
        new = configuration.RENAMED[section, name]
        for _ in range(2):
            made = load("cartpole", [f"{old}={value}"])
            assert vars(vars(made)[section])[new] == value
        told = capsys.readouterr().err
        assert told == f"apex: --set: '{old}' is now '{section}.{new}'; the next release drops the old name\n"

    def test_a_rank_whose_launcher_has_told_says_nothing(self, capsys, monkeypatch):
        monkeypatch.setenv("APEX_RUN_FOLDER", "/somewhere")
        assert load("cartpole", ["run.drain_s=9"]).run.shutdown_timeout_s == 9
        assert capsys.readouterr().err == ""

    def test_a_file_may_use_old_names_and_both_at_once_are_refused(self, tmp_path, capsys):
        path = tmp_path / "mine.toml"
        path.write_text("[run]\nsilence_s = 17.0\n")
        assert load(str(path)).run.heartbeat_timeout_s == 17
        path.write_text("[run]\nsilence_s = 17.0\nheartbeat_timeout_s = 18.0\n")
        both = r"'run\.silence_s' and 'run\.heartbeat_timeout_s' are one field; give the new name"
        with pytest.raises(ConfigError, match=both):
            load(str(path))

    @pytest.mark.parametrize("order", [1, -1])
    def test_an_old_and_a_new_name_in_two_settings_are_refused_and_one_name_twice_is_not(self, order):
        given = ["run.drain_s=5", "run.shutdown_timeout_s=6"][::order]
        with pytest.raises(
            ConfigError, match=r"^--set: 'run\.\w+' and 'run\.\w+' are one field; give the new name"
        ):
            load("cartpole", given)
        assert load("cartpole", ["run.drain_s=5", "run.drain_s=7"]).run.shutdown_timeout_s == 7

    def test_a_setting_by_a_new_name_wins_over_a_preset_that_has_the_old_one(self, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text("[run]\nsilence_s = 17.0\n")
        assert load(str(path), ["run.heartbeat_timeout_s=18"]).run.heartbeat_timeout_s == 18

    def test_a_name_close_to_an_old_one_leads_to_the_new_one(self):
        with pytest.raises(
            ConfigError, match=r"unknown field 'run\.tolerat'; did you mean 'fault_tolerance'\?"
        ):
            load("cartpole", ["run.tolerat=actors"])
        with pytest.raises(
            ConfigError, match=r"unknown field 'replay\.eror_band'; did you mean 'error_buffer'\?"
        ):
            load("cartpole", ["replay.eror_band=1"])

    def test_every_new_name_is_a_field_and_no_old_one_is(self):
        for (section, old), new in configuration.RENAMED.items():
            names = fields(sections()[section])
            assert new in names and old not in names
