"""Prints the four numbers of IFEval: python -m manege.recipes.general.ifeval RUN_FOLDER_OR_RESPONSES.jsonl

Of a run folder, all rollouts that have ended are judged, by what their agents printed, each temperature apart. A file
has a line for each response: {"prompt": ..., "response": ...} with instruction_id_list and kwargs, or without them,
and then --rows names the file that has them for each prompt, as the published responses and rows are.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from manege.controller.folders import log_folder
from manege.errors import ConfigError, ManegeError
from manege.recipes.general.ifeval.accuracy import Followed, accuracy, judge
from manege.recipes.general.ifeval.rows import read_prompts
from manege.store.reading import StoreReader
from manege.types import TERMINAL


def main() -> int:
    """Exit code 2 for what cannot be judged."""
    parser = argparse.ArgumentParser(prog="python -m manege.recipes.general.ifeval", description=__doc__)
    parser.add_argument("responses", type=Path, metavar="RUN_FOLDER_OR_RESPONSES.jsonl")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="prompts with their instructions (.jsonl)")
    parser.add_argument("--json", action="store_true", help="one JSON object per temperature")
    arguments = parser.parse_args()
    try:
        if arguments.responses.is_dir():
            judged = asyncio.run(_of_run(arguments.responses))
        else:
            judged = {"all": _of_file(arguments.responses, arguments.rows)}
        if not any(judged.values()):
            raise ConfigError(f"{arguments.responses} has no response to a prompt with instructions")
        for name, followed in judged.items():
            row = {"responses": name, "num_prompts": len(followed), **asdict(accuracy(followed))}
            print(json.dumps(row) if arguments.json else _line(row))
    except ManegeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['responses']} (n = {row['num_prompts']}): prompts strict {row['prompt_strict']:.1%}, loose "
        f"{row['prompt_loose']:.1%}; instructions strict {row['instruction_strict']:.1%}, loose "
        f"{row['instruction_loose']:.1%}"
    )


async def _of_run(folder: Path) -> Mapping[str, Sequence[Followed]]:
    """By temperature."""
    reader = await StoreReader.open(folder / "manege.db")
    try:
        rollouts = (await reader.list_rollouts(state=TERMINAL, limit=None)).rollouts
    finally:
        await reader.close()
    judged: dict[str, list[Followed]] = {}
    for rollout in rollouts:
        spec = rollout.spec
        hidden = spec.task.hidden
        if "instruction_id_list" not in hidden:
            continue
        printed = log_folder(folder, rollout) / "stdout.txt"
        response = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
        name = "T = as trained" if spec.temperature is None else f"T = {spec.temperature:g}"
        judged.setdefault(name, []).append(judge(response, hidden["instruction_id_list"], hidden["kwargs"]))
    return judged


def _of_file(path: Path, rows: Path | None) -> Sequence[Followed]:
    known = {row["prompt"]: row for row in read_prompts(rows)} if rows else {}
    judged = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in filter(str.strip, lines):
            row = json.loads(line)
            row = {**known.get(row["prompt"], {}), **row}
            judged.append(judge(row["response"], row["instruction_id_list"], row["kwargs"]))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} cannot be judged ({type(error).__name__}: {error}); want prompt, response, "
            "instruction_id_list and kwargs in each line, or --rows with the latter two"
        ) from error
    return judged


if __name__ == "__main__":
    sys.exit(main())
