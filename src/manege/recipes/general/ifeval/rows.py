"""Prompts with their instructions as rows and as tasks: our own, those of a file, or the public ones of a hub.

A row has the published form, one JSON object a line: key, prompt, instruction_id_list, kwargs.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manege.errors import ConfigError
from manege.recipes.general.draw import Draw
from manege.recipes.general.hub import hub_rows
from manege.recipes.general.ifeval.checks import CHECKS
from manege.recipes.general.ifeval.prompts import conflict, make_prompt
from manege.types import Task

__all__ = ["generate", "make_rows", "read_rows"]

Row = Mapping[str, Any]


def generate(*, split: str, num: int, seed: int, source: str = "own") -> Sequence[Task]:
    """`source`: `own`, a file of rows (.jsonl), or a dataset of a hub such as google/IFEval, which has 541 prompts.
    Raises ConfigError where it cannot be read, or knows an instruction that we do not."""
    if source == "own":
        rows = make_rows(split=split, num=num, seed=seed)
    else:
        rows = read_rows(Path(source)) if source.endswith(".jsonl") else hub_rows(source, split="train")
    tasks = []
    for row in rows[:num]:
        unknown = set(row["instruction_id_list"]) - set(CHECKS)
        if unknown:
            raise ConfigError(f"{source}: prompt {row['key']} has instructions that are not known: {sorted(unknown)}")
        given = [{name: value for name, value in one.items() if value is not None} for one in row["kwargs"]]
        tasks.append(
            Task(
                id=f"{source}-{row['key']}",
                input={"prompt": row["prompt"]},
                hidden={"instruction_id_list": row["instruction_id_list"], "kwargs": given},
            )
        )
    return tasks


def make_rows(*, split: str, num: int, seed: int) -> Sequence[Row]:
    """Our own: one, two and three instructions in turn, so that the first 75 have all types alone or together.

    Held-out rows do not depend on the seed."""
    heldout = split == "heldout"
    rng = random.Random("heldout" if heldout else f"train:{seed}")
    draw, rows, types = Draw(rng, heldout=heldout), [], sorted(CHECKS)
    for n in range(num):
        wanted = [types[n // 3 % len(types)]]
        while len(wanted) < 1 + n % 3:
            free = [kind for kind in types if not any(conflict(kind, other) for other in wanted)]
            if not free:
                break
            wanted.append(rng.choice(free))
        prompt = make_prompt(draw, wanted)
        rows.append(
            {
                "key": f"{split}-{n}" if heldout else f"{split}-{seed}-{n}",
                "prompt": prompt.text,
                "instruction_id_list": [one.type for one in prompt.instructions],
                "kwargs": [dict(one.arguments) for one in prompt.instructions],
            }
        )
    return rows


def read_rows(path: Path) -> Sequence[Row]:
    """Raises ConfigError that names file, line and what is missing."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            missing = {"key", "prompt", "instruction_id_list", "kwargs"} - set(row)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: not a JSON object ({error}): {line[:80]!r}") from error
        if missing:
            raise ConfigError(f"{path}, line {number}: {sorted(missing)} are missing: {line[:80]!r}")
        rows.append(row)
    return rows
