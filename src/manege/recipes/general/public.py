"""The public tasks of LLM-in-Sandbox (https://arxiv.org/abs/2601.16206), from a hub: daixuancheng/llm-in-sandbox-rl.

In the paper contexts lie as files in the sandbox, and the outcome alone counts. A row has id, domain,
problem_statement, ground_truth, often input_files (names and texts, also as JSON) and qa_type. Here the files come into
`documents/`, and the answer is that of every task of this recipe: answer.txt, else the last line printed.

Rewards: a letter where the truth is one (multiple choice); else 1 for the same number or text, and for other texts how
much of the longest common sequence of words the two share (ROUGE-L, F1). The paper also asks `math-verify`, which knows
more ways to write a number.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from manege.controller.record import AttemptRecord
from manege.errors import ConfigError
from manege.recipes.general.hub import hub_rows
from manege.recipes.general.left import Left
from manege.recipes.general.tasks import how_to_answer
from manege.types import Task

__all__ = ["generate", "score"]

_NAME = "daixuancheng/llm-in-sandbox-rl"
_FOLDER = PurePosixPath("documents")


def generate(
    *,
    split: str,
    num: int,
    seed: int,
    train: str = "instruct_pretrain",
    heldout: Sequence[str] = ("math_mini", "biomed_mini", "long_context_mini"),
) -> Sequence[Task]:
    """The first `num` rows of the data set's parts, which do not depend on the seed. Raises ConfigError where they
    cannot be had."""
    if split == "train":
        rows = hub_rows(_NAME, split="train", config=train)
    else:
        rows = [row for part in heldout for row in hub_rows(_NAME, split="test", config=part)]
    return [task_of(row, split) for row in rows[:num]]


def task_of(row: Mapping[str, Any], split: str) -> Task:
    """Raises ConfigError for a row of another form, or a file that would lie elsewhere."""
    files = row.get("input_files") or {}
    try:
        files = json.loads(files) if isinstance(files, str) else files
        texts = {str(_FOLDER / name): text for name, text in files.items() if text is not None}
        question, truth = row["problem_statement"], str(row["ground_truth"])
    except (ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"{_NAME}: row {row.get('id')!r} is not of the known form: {error!r}") from error
    if outside := [name for name in files if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise ConfigError(f"{_NAME}: row {row.get('id')!r} has a file outside of its folder: {outside[0]!r}")
    where = f" The documents are in {_FOLDER}/." if texts else ""
    question = f"{question}{where}"
    return Task(
        id=f"{split}-{row.get('domain', '')}-{row['id']}",
        input={"question": question, "task": question + how_to_answer()},
        hidden={"files": texts, "truth": truth},
    )


def score(task: Task, attempt: AttemptRecord) -> float:
    """See the module."""
    answer = Left(workspace=attempt.workspace, stdout=attempt.stdout).answer()
    return agreement(answer, task.hidden["truth"].strip())


def agreement(answer: str, truth: str) -> float:
    """From 0 to 1."""
    if boxed := re.findall(r"\\boxed\{([^{}]*)\}", answer):
        answer = boxed[-1]
    if re.fullmatch(r"[A-Z]", truth):
        letters = re.findall(r"\b[A-Z]\b", answer)
        return float(len(set(letters)) == 1 and letters[0] == truth)
    number, expected = _number(answer), _number(truth)
    if expected is not None:
        return float(number is not None and abs(number - expected) <= 1e-6 * max(1.0, abs(expected)))
    return _rouge_l(_words(answer), _words(truth))


def _number(text: str) -> float | None:
    try:
        return float(text.strip().strip("$").replace(",", ""))
    except ValueError:
        return None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _rouge_l(answer: Sequence[str], truth: Sequence[str]) -> float:
    """F1 of the longest common subsequence (Lin, 2004)."""
    lengths = [0] * (len(truth) + 1)
    for word in answer:
        before = 0
        for n, expected in enumerate(truth, start=1):
            before, lengths[n] = lengths[n], before + 1 if word == expected else max(lengths[n], lengths[n - 1])
    return 2 * lengths[-1] / (len(answer) + len(truth)) if answer and truth else 0.0
