"""The corpus of a generated world: one passage per entity, as JSON lines that a retrieval service reads.

    python -m manege.recipes.search.corpus corpus.jsonl --num 20000

A passage says the entity's facts in varied words and order, among sentences that lead nowhere.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from manege.errors import ConfigError
from manege.recipes.search.world import MAX_ENTITIES, Entity, make_world

__all__ = ["NUM_ENTITIES", "NUM_FACTS", "passages", "write_corpus"]

NUM_ENTITIES = 20_000
NUM_FACTS = 3
"""Of a passage, at most: with fewer, questions are easier."""
_ASIDES = {
    "person": ("{a} collects old maps.", "Friends call {a} patient.", "{a} keeps bees.", "{a} plays the cello."),
    "company": ("{a} has {n} employees.", "{a} opened in {y}.", "{a} once made bicycles.", "{a} sponsors a choir."),
    "town": ("{a} has {n} inhabitants.", "{a} was first mentioned in {y}.", "{a} is known for its market."),
    "book": ("{a} has {n} pages.", "{a} came out in {y}.", "{a} was never filmed.", "{a} won a small prize."),
}


def passages(num: int = NUM_ENTITIES, seed: int = 0, num_facts: int = NUM_FACTS) -> Iterator[dict[str, str]]:
    """`id`, `title` and `text` of all, those of both splits among each other. Raises ConfigError."""
    world = make_world(num, seed, num_facts)
    rng = random.Random(f"passages:{seed}")
    entities = [*world.train, *world.heldout]
    rng.shuffle(entities)
    for entity in entities:
        yield {"id": entity.id, "title": entity.name, "text": _text(entity, rng)}


def write_corpus(path: Path, num: int = NUM_ENTITIES, seed: int = 0, num_facts: int = NUM_FACTS) -> int:
    """The number of passages. Raises ConfigError."""
    lines = [json.dumps(passage) for passage in passages(num, seed, num_facts)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def _text(entity: Entity, rng: random.Random) -> str:
    aside = rng.choice(_ASIDES[entity.kind])
    sentences = [fact.sentence for fact in entity.facts]
    said = aside.format(a=entity.name, n=rng.randint(100, 999), y=rng.randint(1500, 1999))
    sentences.insert(rng.randrange(len(sentences) + 1), said)
    return " ".join(sentences)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m manege.recipes.search.corpus", description=__doc__)
    parser.add_argument("file", type=Path, help="where the JSON lines go")
    parser.add_argument(
        "--num", type=int, default=NUM_ENTITIES, help=f"entities, at most {MAX_ENTITIES} (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the world (default: %(default)s)")
    parser.add_argument("--facts", type=int, default=NUM_FACTS, help="of a passage, at most (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        num = write_corpus(arguments.file, arguments.num, arguments.seed, arguments.facts)
    except (ConfigError, OSError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 2
    print(f"{num} passages in {arguments.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
