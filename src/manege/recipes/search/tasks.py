"""Questions over a generated world: a chain of one to three relations, of which only the first entity is named.

"Where is the employer of Anna Oakley based?" is two hops: her passage names the company, the company's the town. The
facts of the chain are hidden from the agent; the scorer looks for them in what the agent was shown.
"""

import random
from collections.abc import Sequence

from manege.errors import ConfigError
from manege.recipes.search.corpus import NUM_ENTITIES, NUM_FACTS
from manege.recipes.search.world import Entity, Fact, make_world
from manege.types import Task

__all__ = ["generate"]


def generate(
    *,
    split: str,
    num: int,
    seed: int,
    hops: Sequence[int] = (1, 2, 3),
    num_entities: int = NUM_ENTITIES,
    world: int = 0,
    num_facts: int = NUM_FACTS,
) -> Sequence[Task]:
    """`num` questions of lengths `hops` over the corpus of `num_entities` with the seed `world` and `num_facts` per
    passage. Held-out ones do not depend on `seed`: every run is judged on the same ones. Raises ConfigError when there
    are not as many."""
    if not hops or not set(hops) <= {1, 2, 3}:
        raise ConfigError(f"tasks.options.hops = {list(hops)!r}: questions have 1, 2 or 3 hops")
    made = make_world(num_entities, world, num_facts)
    entities = made.heldout if split == "heldout" else made.train
    rng = random.Random(f"heldout:{world}" if split == "heldout" else f"train:{world}:{seed}")
    tasks: dict[str, Task] = {}
    for _ in range(20 * num):
        chain = _chain(rng.choice(entities), rng.choice(list(hops)), rng)
        if chain is not None:
            task = _task(*chain)
            tasks.setdefault(task.id, task)
        if len(tasks) == num:
            return list(tasks.values())
    raise ConfigError(f"{num} questions were wanted and {len(tasks)} found; have more entities or fewer tasks")


def _chain(start: Entity, length: int, rng: random.Random) -> tuple[Entity, list[Fact]] | None:
    """None: it would come back to where it was, or end where there is nothing to ask."""
    seen, facts, entity = {start}, [], start
    for _ in range(length):
        fact = rng.choice(entity.facts)
        entity = fact.to
        if entity in seen:
            return None
        seen.add(entity)
        facts.append(fact)
    return start, facts


def _task(start: Entity, facts: Sequence[Fact]) -> Task:
    described = start.name
    for fact in facts[:-1]:
        described = fact.relation.phrase.format(a=described)
    holders = [start, *(fact.to for fact in facts[:-1])]
    return Task(
        id=f"{start.id}-{'-'.join(fact.relation.name for fact in facts)}",
        input={"question": facts[-1].relation.question.format(a=described)},
        hidden={
            "answers": [facts[-1].to.name],
            "chain": [
                {"id": holder.id, "title": holder.name, "fact": fact.sentence}
                for holder, fact in zip(holders, facts, strict=True)
            ],
        },
    )
