"""Public question sets as tasks: Natural Questions, HotpotQA, 2WikiMultihopQA, MuSiQue, from the hub or from files.

    [tasks]
    train = "manege.recipes.search.public:generate"
    options = { sets = ["nq", "hotpotqa"] }

Rows have the fields of FlashRAG, which Search-R1 uses too: `question`, `golden_answers`, perhaps `id` and `metadata`. A
file instead of the hub: `options = { train = "train.parquet", heldout = "dev.jsonl" }`. Where a row names the pages
that hold the facts, passages with their titles are the chain that the scorer looks for.
"""

import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manege.curation.rows import read_rows
from manege.errors import ConfigError
from manege.types import Task

__all__ = ["HELDOUT", "HUB", "generate"]

HUB = "RUC-NLPIR/FlashRAG_datasets"
HELDOUT: Mapping[str, str] = {"nq": "test", "hotpotqa": "dev", "2wikimultihopqa": "dev", "musique": "dev"}
"""The split of each set that is evaluated on, as Search-R1 does."""

Row = Mapping[str, Any]


def generate(
    *,
    split: str,
    num: int,
    seed: int,
    sets: Sequence[str] = ("nq", "hotpotqa"),
    train: str | None = None,
    heldout: str | None = None,
) -> Sequence[Task]:
    """`num` rows drawn from all `sets`, or from the file of that split; held-out ones whatever the seed. Raises
    ConfigError: what is not there, or rows without a question or an answer."""
    file = train if split == "train" else heldout
    rows = list(_of_file(Path(file)) if file else _of_hub(sets, split))
    if num > len(rows):
        raise ConfigError(f"{num} tasks of the split {split} were wanted, {file or ', '.join(sets)} has {len(rows)}")
    rng = random.Random("heldout" if split == "heldout" else f"train:{seed}")
    return [_task(*row) for row in rng.sample(rows, num)]


def _of_file(path: Path) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(read_rows(path.expanduser()), start=1):
        yield f"{path.stem}-{row.get('id', number)}", row


def _of_hub(sets: Sequence[str], split: str) -> Iterator[tuple[str, Row]]:
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise ConfigError(
            f"{HUB} is read by the library `datasets`: pip install datasets, or name files in tasks.options "
            "(train, heldout)"
        ) from error
    for name in sets:
        if name not in HELDOUT:
            raise ConfigError(f"tasks.options.sets: {name!r} is not one of {', '.join(HELDOUT)}")
        part = HELDOUT[name] if split == "heldout" else "train"
        try:
            rows = load_dataset(HUB, name, split=part)
        except Exception as error:  # of whichever HTTP library it uses
            raise ConfigError(
                f"{HUB} {name} {part} cannot be read from the hub ({error}); name files in tasks.options "
                "(train, heldout)"
            ) from error
        for number, row in enumerate(rows):
            yield f"{name}-{row.get('id', f'{part}_{number}')}", row


def _task(task_id: str, row: Row) -> Task:
    question, answers = row.get("question"), row.get("golden_answers", row.get("answer"))
    answers = [answers] if isinstance(answers, str) else list(answers) if answers is not None else []
    if not isinstance(question, str) or not answers:
        raise ConfigError(
            f"{task_id}: want question and golden_answers, got {', '.join(row) or 'nothing'}; rename the columns"
        )
    # What a passage of that page begins with, as agents are shown it.
    chain = [{"title": title, "fact": f"{title}:"} for title in _titles(row.get("metadata") or row)]
    return Task(id=task_id, input={"question": question}, hidden={"answers": answers, "chain": chain})


def _titles(metadata: Row) -> Sequence[str]:
    """Of the pages that hold the facts, each once: HotpotQA and 2WikiMultihopQA name them, MuSiQue marks them."""
    facts = metadata.get("supporting_facts") or []
    titles = facts["title"] if isinstance(facts, Mapping) else [title for title, _ in facts]
    marked = [each["title"] for each in metadata.get("paragraphs") or [] if each.get("is_supporting")]
    return list(dict.fromkeys([*titles, *marked]))
