"""format: the facts of a brief in a text of a given form; the forms are IFEval's instructions.

A level is the number of instructions. Without the facts nothing counts, nor do instructions that the brief, copied,
follows already.
"""

import shlex

from manege.recipes.general.draw import CITIES, NAMES, Draw
from manege.recipes.general.families.problem import PART, Family, Problem
from manege.recipes.general.ifeval.checks import follows
from manege.recipes.general.ifeval.compose import compose
from manege.recipes.general.ifeval.prompts import Instruction, conflict, draw_instruction
from manege.recipes.general.left import Left
from manege.types import JsonObject

__all__ = ["FAMILY"]

_FILE = "note.txt"
_TYPES = (
    "detectable_content:number_placeholders",
    "detectable_content:postscript",
    "detectable_format:multiple_sections",
    "detectable_format:number_bullet_lists",
    "detectable_format:number_highlighted_sections",
    "detectable_format:title",
    "keywords:existence",
    "keywords:forbidden_words",
    "keywords:frequency",
    "length_constraints:nth_paragraph_first_word",
    "length_constraints:number_paragraphs",
    "length_constraints:number_sentences",
    "length_constraints:number_words",
    "punctuation:no_comma",
    "startend:end_checker",
    "startend:quotation",
)
"""Those that a text with given facts can follow as they are."""


def make(draw: Draw, level: int) -> Problem:
    """See the module."""
    facts = {"who": draw.word(NAMES), "what": draw.word(), "where": draw.word(CITIES), "number": draw.code()}
    brief = "".join(f"{name}: {fact}\n" for name, fact in facts.items())
    instructions: list[Instruction] = []
    while len(instructions) < level:
        taken = [one.type for one in instructions]
        kind = draw.rng.choice([kind for kind in _TYPES if not any(conflict(kind, other) for other in taken)])
        one = draw_instruction(draw, kind, "")
        if instructions or not follows(brief, one.type, one.arguments):
            instructions.append(one)
    rules = " ".join(one.text for one in instructions)
    return Problem(
        question=f"Write a text with all four facts of brief.txt to {_FILE}. {rules}",
        files={"brief.txt": brief},
        hidden={
            "facts": list(facts.values()),
            "brief": brief,
            "rules": [[one.type, dict(one.arguments)] for one in instructions],
        },
        answers=False,
        solution=f"printf %s {shlex.quote(compose(instructions, list(facts.values())))} > {_FILE}",
    )


def score(hidden: JsonObject, left: Left) -> float:
    """1 if all rules are followed; else a part for those that the brief does not follow."""
    text = left.text(_FILE)
    if not all(fact in text for fact in hidden["facts"]):
        return 0.0
    followed = [follows(text, kind, given) for kind, given in hidden["rules"]]
    if all(followed):
        return 1.0
    gained = [
        good
        for good, (kind, given) in zip(followed, hidden["rules"], strict=True)
        if not follows(hidden["brief"], kind, given)
    ]
    return PART * sum(gained) / len(gained)


FAMILY = Family(make=make, score=score)
