"""Prompts with their instructions as rows and as tasks: our own, those of a file, or the public ones of a hub.

A row has the published form, one JSON object a line: key, prompt, instruction_id_list, kwargs.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manege.curation.rows import read_rows
from manege.errors import ConfigError
from manege.recipes.general.draw import Draw
from manege.recipes.general.hub import hub_rows
from manege.recipes.general.ifeval.checks import CHECKS
from manege.recipes.general.ifeval.prompts import conflict, make_prompt
from manege.types import Task

__all__ = ["generate", "make_rows", "read_prompts"]

Row = Mapping[str, Any]


def generate(*, split: str, num: int, seed: int, source: str = "own") -> Sequence[Task]:
    """`source`: `own`, a file of rows (.jsonl or .parquet), or a data set of a hub such as google/IFEval, of 541
    prompts. Raises ConfigError where it cannot be read, or knows an instruction that we do not."""
    if source == "own":
        rows = make_rows(split=split, num=num, seed=seed)
    else:
        is_file = Path(source).suffix in (".jsonl", ".zst", ".parquet")
        rows = read_prompts(Path(source)) if is_file else hub_rows(source, split="train")
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
    seen: set[str] = set()
    for n in range(num):
        wanted = [types[n // 3 % len(types)]]
        while len(wanted) < 1 + n % 3:
            free = [kind for kind in types if not any(conflict(kind, other) for other in wanted)]
            if not free:
                break
            wanted.append(rng.choice(free))
        prompt = make_prompt(draw, wanted)
        while prompt.text in seen:
            prompt = make_prompt(draw, wanted)
        seen.add(prompt.text)
        rows.append(
            {
                "key": f"{split}-{n}" if heldout else f"{split}-{seed}-{n}",
                "prompt": prompt.text,
                "instruction_id_list": [one.type for one in prompt.instructions],
                "kwargs": [dict(one.arguments) for one in prompt.instructions],
            }
        )
    return rows


def read_prompts(path: Path) -> Sequence[Row]:
    """Of a file. Raises ConfigError that names it, the row and what is missing."""
    rows = list(read_rows(path))
    for number, row in enumerate(rows, start=1):
        if missing := {"key", "prompt", "instruction_id_list", "kwargs"} - set(row):
            raise ConfigError(f"{path}, row {number}: {', '.join(sorted(missing))} missing; it has {', '.join(row)}")
    return rows
