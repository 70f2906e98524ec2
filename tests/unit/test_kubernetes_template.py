"""A run file names its template's file, and those who make Jobs of it, elsewhere, get its text."""

from argparse import Namespace

import pytest

from manege.cli.arguments import read_run
from manege.errors import ConfigError

RUN = """
name = "run"
tasks.train = "tasks.jsonl"
agent.run = ["agent"]
scorer.run = ["score"]
"""


def read(folder, template):
    (folder / "run.toml").write_text(RUN + f"kubernetes.template = {template}\n")
    return read_run(Namespace(run_file=folder / "run.toml", overrides=[], unsafe=False, quick=False))


def test_a_template_lies_beside_the_run_file(tmp_path):
    (tmp_path / "job.yaml.j2").write_text("kind: Job\nname: {{ job_name }}\n")
    assert read(tmp_path, '"job.yaml.j2"').kubernetes.template.startswith("kind: Job\nname: {{ job_name }}\n")


def test_a_template_may_stand_in_the_run_file(tmp_path):
    assert read(tmp_path, '"""kind: Job\nspec: {}\n"""').kubernetes.template == "kind: Job\nspec: {}\n"


def test_a_template_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"kubernetes\.template = 'none\.yaml' cannot be read"):
        read(tmp_path, '"none.yaml"')
