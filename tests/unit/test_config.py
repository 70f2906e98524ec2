"""Run files: what is refused says the key, the value and the nearest right one."""

import subprocess
import sys
from pathlib import Path

import pytest

from manege.config import changed_settings, load_config, parse_config
from manege.errors import ConfigError

GOOD = """
name = "x"
tasks = { train = "t.jsonl" }
agent = { run = ["true"] }
scorer = { run = "m:f" }
[quick]
"train.steps" = 3
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.setps=3", r"unknown key 'train.setps' \(value 3\); did you mean 'train.steps'\?"),
        ("learning_rate=3", r"unknown key 'learning_rate' \(value 3\); did you mean 'train.learning_rate'\?"),
        ("train.steps=0", r"train.steps: .*greater than 0 \(value 0\)"),
        ('train.steps="many"', r"train.steps: .*integer.* \(value 'many'\)"),
        ("train.group_size=1", r"train.group_size: .*greater than or equal to 2 \(value 1\)"),
        ("train.mini_batches=33", r"train: mini_batches = 33: a step has groups \* group_size = 32 rollouts"),
        ("sampling.temperature=0", r"sampling.temperature: .*greater than 0 \(value 0\)"),
        ("gateway.port=70000", r"gateway.port: .*65535 \(value 70000\)"),
        ("credit.weighting=constant", r'credit: weighting = "constant" needs constant_tokens'),
        ("credit.advantage=gae", r"credit.advantage: .*'centred', 'grpo', 'rloo' or 'returns' \(value 'gae'\)"),
        ("name=../x", r"name: .*pattern.* \(value '../x'\)"),
        ("name.x=1", r"override 'name.x': name is a value"),
        ("steps", r"override 'steps' is not of the form"),
    ],
)
def test_impossible_values_are_named(run_file, override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(run_file, [override])


def test_overrides_are_toml_values_or_strings(run_file):
    config = load_config(run_file, ["train.steps=7", "model.path=runs/my model", "evaluation.temperatures=[0.5]"])
    assert (config.train.steps, config.model.path, config.evaluation.temperatures) == (7, "runs/my model", [0.5])


def test_quick_applies_its_table_and_command_line_wins(run_file):
    assert load_config(run_file, quick=True).train.steps == 3
    assert load_config(run_file, ["train.steps=5"], quick=True).train.steps == 5


def test_quick_without_a_table_is_refused(run_file):
    run_file.write_text(GOOD.split("[quick]")[0])
    with pytest.raises(ConfigError, match=r"has no \[quick\] table"):
        load_config(run_file, quick=True)


@pytest.mark.parametrize(("text", "message"), [("name = ", "cannot be read"), ("name = 'x'", "'tasks' is missing")])
def test_broken_files_are_named(run_file, text, message):
    run_file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(run_file)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "no.toml")


def test_shipped_run_files_are_valid():
    folder = Path(__file__).parents[2] / "src" / "manege" / "recipes"
    files = [path for path in folder.glob("*/*.toml") if "[agent]" in path.read_text()]
    assert files
    for path in files:
        load_config(path)
        if "[quick]" in path.read_text():
            load_config(path, quick=True)


def test_the_core_imports_no_torch():
    code = (
        "import sys, manege, manege.config, manege.types, manege.client, manege.gateway.app, manege.controller.loop, "
        "manege.trainer.loop, manege.cli\n"
        "print(*(m for m in ('torch', 'transformers', 'matplotlib', 'openai') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["discount=0.9"], 'discount = 0.9 does nothing here: it needs advantage = "returns"'),
        (["constant_tokens=9"], 'constant_tokens = 9 does nothing here: it needs weighting = "constant"'),
        (["loss=cispo", "dual_clip=2.5"], 'dual_clip = 2.5 does nothing here: it needs loss = "ppo"'),
        (["mismatch_level=call"], 'mismatch_level = "call" does nothing here: it needs ratio = "decoupled"'),
        (["mismatch_cap=3"], 'mismatch_cap = 3.0 does nothing here: it needs ratio = "decoupled"'),
        (["mismatch_band=3"], 'mismatch_band = 3.0 does nothing here: it needs ratio = "decoupled"'),
        (["length_penalty=2"], 'length_penalty = 2.0 does nothing here: it needs cut_short = "penalise" or overlong'),
        (
            ["cut_short=penalise", "overlong_buffer=9"],
            "overlong_buffer = 9 does nothing here: it needs overlong_tokens",
        ),
        (["overlong_tokens=9", "overlong_buffer=10"], "overlong_buffer = 10 begins before the first token"),
        (["advantage=returns", "shuffle_rewards=true"], "shuffle_rewards = true does nothing here: it needs an adv"),
    ],
)
def test_a_credit_key_that_would_do_nothing_is_refused(run_file, overrides, message):
    with pytest.raises(ConfigError) as refused:
        load_config(run_file, [f"credit.{override}" for override in overrides])
    assert f"credit: {message}" in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "nearest"),
    [
        (["level=sample", "advantage=rloo"], 'advantage = "centred"'),
        (["level=sample", "weighting=sample_mean", "advantage=rloo"], 'advantage = "centred"'),
        (["level=sample", "loss=cispo"], 'loss = "ppo"'),
        (["advantage=returns", "weighting=sample_mean"], 'weighting = "rollout_mean"'),
        (["loss=gspo", "ratio=decoupled"], 'mismatch_level = "call"'),
    ],
)
def test_an_untested_combination_is_refused_with_the_nearest_one(run_file, overrides, nearest):
    with pytest.raises(ConfigError, match="is not a tested combination") as refused:
        load_config(run_file, [f"credit.{override}" for override in overrides])
    assert f"the nearest one has {nearest} (" in str(refused.value)
    for override in overrides:
        key, value = override.split("=")
        assert f'{key} = "{value}"' in str(refused.value)


@pytest.mark.parametrize("mismatch", ["token", "call"])
def test_a_stored_run_reads_back_as_the_same_config(run_file, mismatch):
    keys = ["ratio=decoupled", f"mismatch_level={mismatch}", "weighting=constant", "constant_tokens=9"]
    config = load_config(run_file, [f"credit.{key}" for key in keys])
    assert parse_config(config.to_json()) == config


def test_where_a_run_lives_is_no_setting_and_all_else_is(run_file):
    verl = ["backend.kind=verl", "backend.nodes=2"]
    old = load_config(run_file, [*verl, "folder=a", "backend.ray_address=10.0.0.1:20001"])
    new = load_config(run_file, [*verl, "folder=b", "backend.ray_address=10.0.0.7:20002", "tracking.tensorboard=true"])
    assert list(changed_settings(old.to_json(), new.to_json())) == []
    assert old.digest() == new.digest()
    other = load_config(run_file, ["backend.kind=verl", "backend.nodes=3"])
    assert list(changed_settings(old.to_json(), other.to_json())) == ["backend.nodes: 2 -> 3"]
    assert old.digest() != other.digest()
