"""A curation file: the rows that come in, the steps that they pass through, the files that come out.

Steps are `[[steps]]` tables, in the order in which they are done; `kind` says which. A default stands here and nowhere
else.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from manege.config import override
from manege.errors import ConfigError
from manege.section import PositiveInt, Section

__all__ = [
    "AtMost",
    "CurationConfig",
    "Decontaminate",
    "HasRef",
    "NotEmpty",
    "Probe",
    "Select",
    "Split",
    "StepConfig",
    "load_curation",
]


File = Annotated[str, AfterValidator(os.path.expanduser)]


class NotEmpty(Section):
    """Drops rows that have nothing in a column."""

    kind: Literal["not_empty"]
    column: str = "problem_statement"


class HasRef(Section):
    """Drops rows whose branch or tag does not exist."""

    kind: Literal["has_ref"]
    column: str | None = None
    """Where a row names it; None: the column of ids."""
    refs: File | None = None
    """A file that lists those that exist, one a line; or ..."""
    remote: str | None = None
    """... a repository to ask (`git ls-remote`), with `{column}` for a value of the row. What it answers is not part of
    what makes a step be done again."""

    @model_validator(mode="after")
    def _one_source(self) -> "HasRef":
        if (self.refs is None) == (self.remote is None):
            raise ValueError("say where refs are known from: set either refs or remote")
        return self


class AtMost(Section):
    """Drops rows with too many tests."""

    kind: Literal["at_most"]
    columns: list[str] = Field(default_factory=lambda: ["FAIL_TO_PASS", "PASS_TO_PASS"])
    """Of lists, or their JSON; what counts is how much is in all of them together."""
    max: PositiveInt = 200


class Decontaminate(Section):
    """Drops rows of repositories that the agent is evaluated on, and rows whose statement comes from there."""

    kind: Literal["decontaminate"]
    column: str = "repo"
    repos: list[str] = Field(default_factory=list)
    """Of the evaluation, in any of the spellings that are known (docs/guides/curation.md)."""
    rows: list[File] = Field(default_factory=list)
    """Files of the evaluation's rows, for their `repo` and statements."""
    statement: str = "problem_statement"
    ngram: PositiveInt | None = None
    """A statement that has as many words in a row in common with one of `rows` is taken from it; None: not looked
    at."""

    @model_validator(mode="after")
    def _has_evaluation(self) -> "Decontaminate":
        if not (self.repos or self.rows):
            raise ValueError("name what the agent is evaluated on: set repos, rows or both")
        if self.ngram is not None and not self.rows:
            raise ValueError(f"ngram = {self.ngram} compares statements with those of rows, which is not set")
        return self


class Probe(Section):
    """Has an agent try each task, and notes in two columns how often it was tried and solved: `probe_rollouts` and
    `probe_successes`."""

    kind: Literal["probe"]
    run: File | None = None
    """The run file with model, agent and scorer; or ..."""
    results: File | None = None
    """... a file of what was seen before, rows of `id`, `rollouts` and `successes`."""
    rollouts: PositiveInt = 8
    """Per task."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Of its rollouts."""
    task: str | None = None
    """`module:function` that makes a task of a row, f(row) -> Task; None: rows are `id`, `input` and `hidden`."""
    overrides: list[str] = Field(default_factory=list)
    """Of the run file, as on a command line."""

    @model_validator(mode="after")
    def _one_source(self) -> "Probe":
        if (self.run is None) == (self.results is None):
            raise ValueError("say where results come from: set either run or results")
        return self


class Select(Section):
    """Keeps what can be learnt from: drops tasks that were always solved, keeps those that sometimes were, and a sample
    of those that never were."""

    kind: Literal["select"]
    mixed: PositiveInt | None = None
    """Sometimes solved, at most, drawn at random; None: all."""
    unsolved: Annotated[int, Field(ge=0)] = 1000
    """Never solved, drawn at random."""


class Split(Section):
    """Notes in the column `split` whether a row is for `train` or `heldout`; each has a file in the end."""

    kind: Literal["split"]
    by: Literal["repo", "task"] = "repo"
    """`repo`: no repository is on both sides."""
    column: str = "repo"
    heldout: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the rows; by repository, as near as whole repositories come."""


StepConfig = Annotated[NotEmpty | HasRef | AtMost | Decontaminate | Probe | Select | Split, Field(discriminator="kind")]


class CurationConfig(Section):
    """A curation file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]
    input: list[File]
    """Files of rows: JSON lines (.jsonl, .jsonl.zst) or Parquet, relative to the curation file."""
    id: str = "instance_id"
    """The column that tells rows apart."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of all that is drawn."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """Of what comes out."""
    steps: list[StepConfig]
    """In the order in which they are done."""

    @model_validator(mode="after")
    def _probed_before(self) -> "CurationConfig":
        kinds = [step.kind for step in self.steps]
        if "select" in kinds and "probe" not in kinds[: kinds.index("select")]:
            raise ValueError("steps: select needs a probe before it")
        return self


def load_curation(path: Path, overrides: Sequence[str] = ()) -> CurationConfig:
    """Read a file and apply `key=value`, or `steps.2.key=value` for the third step. Raises ConfigError."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"curation file {path} cannot be read: {error}") from error
    if isinstance(steps := tree.get("steps"), list):
        tree["steps"] = {str(number): step for number, step in enumerate(steps)}
    override(tree, overrides)
    if isinstance(steps := tree.get("steps"), dict):
        tree["steps"] = list(steps.values())
    try:
        return CurationConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: " + "; ".join(_explain(dict(item)) for item in error.errors())) from error


def _explain(item: Mapping[str, Any]) -> str:
    # A union adds its member's name after the number of the step; users know only keys.
    key = ".".join(str(part) for part in item["loc"][:2] + item["loc"][3:] if item["loc"][0] == "steps") or ".".join(
        str(part) for part in item["loc"]
    )
    if item["type"] == "missing":
        return f"key {key!r} is missing"
    if item["type"] == "extra_forbidden":
        return f"unknown key {key!r} (value {item['input']!r})"
    shown = "" if isinstance(item["input"], dict) else f" (value {item['input']!r})"
    return f"{key or 'curation'}: {item['msg'].removeprefix('Value error, ')}{shown}"
