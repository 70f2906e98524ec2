"""A world of people, companies, towns and books, and what relates them, from a seed.

Who works where is drawn anew for each world, so nobody knows it by heart. The world falls apart into two: no fact of a
training entity names a held-out one, so that chains, answers and passages of the splits are disjoint. Some people have
a namesake with a middle name. What a relation is called in passages and questions is in one table.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from manege.errors import ConfigError
from manege.recipes.search import names

__all__ = ["KINDS", "MAX_ENTITIES", "RELATIONS", "Entity", "Fact", "Relation", "World", "make_world"]

MAX_ENTITIES = 80_000
"""There are no names for many more people and towns."""
KINDS: Mapping[str, float] = {"person": 0.5, "company": 0.2, "town": 0.1, "book": 0.2}
"""Share of each among the entities."""
_HELDOUT = 0.25
_NAMESAKES = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """From an entity of one kind to one of another; `{a}` is the first, `{b}` the second."""

    name: str
    kind: str
    to: str
    sentences: Sequence[str]
    """How a passage says it."""
    phrase: str
    """The second one, described by the first."""
    question: str
    """What asks for the second one."""


RELATIONS: Sequence[Relation] = (
    Relation(
        name="employer",
        kind="person",
        to="company",
        sentences=("{a} works for {b}.", "{a} is employed by {b}.", "The employer of {a} is {b}."),
        phrase="the employer of {a}",
        question="Who is the employer of {a}?",
    ),
    Relation(
        name="birthplace",
        kind="person",
        to="town",
        sentences=("{a} was born in {b}.", "The birthplace of {a} is {b}.", "{a} is a native of {b}."),
        phrase="the birthplace of {a}",
        question="Where was {a} born?",
    ),
    Relation(
        name="teacher",
        kind="person",
        to="person",
        sentences=("{a} was a pupil of {b}.", "The teacher of {a} was {b}.", "{a} learnt the trade from {b}."),
        phrase="the teacher of {a}",
        question="Who was the teacher of {a}?",
    ),
    Relation(
        name="seat",
        kind="company",
        to="town",
        sentences=("{a} is based in {b}.", "The seat of {a} is {b}.", "{a} has its head office in {b}."),
        phrase="the town where {a} is based",
        question="Where is {a} based?",
    ),
    Relation(
        name="founder",
        kind="company",
        to="person",
        sentences=("{a} was founded by {b}.", "The founder of {a} is {b}.", "{b} founded {a}."),
        phrase="the founder of {a}",
        question="Who founded {a}?",
    ),
    Relation(
        name="mayor",
        kind="town",
        to="person",
        sentences=("The mayor of {a} is {b}.", "{b} is the mayor of {a}.", "{a} elected {b} as its mayor."),
        phrase="the mayor of {a}",
        question="Who is the mayor of {a}?",
    ),
    Relation(
        name="author",
        kind="book",
        to="person",
        sentences=("{a} was written by {b}.", "The author of {a} is {b}.", "{b} wrote {a}."),
        phrase="the author of {a}",
        question="Who wrote {a}?",
    ),
    Relation(
        name="publisher",
        kind="book",
        to="company",
        sentences=("{a} was published by {b}.", "The publisher of {a} is {b}.", "{b} published {a}."),
        phrase="the publisher of {a}",
        question="Who published {a}?",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One relation of an entity, as its passage says it."""

    relation: Relation
    to: "Entity"
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entity:
    """What a passage is about."""

    id: str
    kind: str
    name: str
    facts: list[Fact] = field(default_factory=list)
    """In the order of the passage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All entities of each split."""

    train: Sequence[Entity]
    heldout: Sequence[Entity]


@lru_cache(maxsize=2)
def make_world(num: int, seed: int, num_facts: int) -> World:
    """Of `num` entities with `num_facts` facts each, or as many as their kind has. Raises ConfigError for more than
    there are names, or too few to relate."""
    if not 100 <= num <= MAX_ENTITIES:
        raise ConfigError(f"num = {num} entities: a world has 100 to {MAX_ENTITIES}")
    rng = random.Random(f"world:{seed}")
    splits: dict[str, dict[str, list[Entity]]] = {"train": {}, "heldout": {}}
    for kind, share in KINDS.items():
        made = list(_named(kind, round(num * share), rng))
        cut = round(len(made) * _HELDOUT)
        splits["heldout"][kind], splits["train"][kind] = made[:cut], made[cut:]
    for split in splits.values():
        for entity in (entity for entities in split.values() for entity in entities):
            _relate(entity, split, num_facts, rng)
    return World(**{name: [each for kind in split.values() for each in kind] for name, split in splits.items()})


def _named(kind: str, num: int, rng: random.Random) -> Iterator[Entity]:
    makers = {
        "person": names.person_names,
        "company": names.company_names,
        "town": names.town_names,
        "book": names.book_names,
    }
    found = islice(makers[kind](rng), num)
    number, before = 0, ""
    while number < num:
        is_namesake = kind == "person" and before.count(" ") == 1 and rng.random() < _NAMESAKES
        before = names.with_middle_name(before, rng) if is_namesake else next(found)
        yield Entity(id=f"{kind}-{number}", kind=kind, name=before)
        number += 1


def _relate(entity: Entity, split: Mapping[str, Sequence[Entity]], num_facts: int, rng: random.Random) -> None:
    for relation in [each for each in RELATIONS if each.kind == entity.kind][:num_facts]:
        to = rng.choice(split[relation.to])
        while to is entity:
            to = rng.choice(split[relation.to])
        sentence = rng.choice(relation.sentences).format(a=entity.name, b=to.name)
        entity.facts.append(Fact(relation=relation, to=to, sentence=sentence))
    rng.shuffle(entity.facts)
