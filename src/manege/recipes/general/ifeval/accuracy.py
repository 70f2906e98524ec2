"""The four numbers of IFEval: strict and loose accuracy, of prompts and of instructions.

Strict looks at the response as it is. Loose also looks at what it becomes without asterisks (which only dress it up),
without its first line (a greeting), without its last (a farewell), and all combinations of these, eight texts in all:
an instruction is followed if one of them follows it (https://arxiv.org/abs/2311.07911, section 2.4).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from manege.recipes.general.ifeval.checks import follows
from manege.types import JsonObject

__all__ = ["Accuracy", "Followed", "accuracy", "judge", "variants"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """By one response, per instruction of its prompt."""

    strict: Sequence[bool]
    loose: Sequence[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Shares, from 0 to 1."""

    prompt_strict: float
    instruction_strict: float
    prompt_loose: float
    instruction_loose: float


def judge(response: str, instructions: Sequence[str], arguments: Sequence[JsonObject]) -> Followed:
    """Raises ConfigError for an instruction that is not known."""
    pairs = list(zip(instructions, arguments, strict=True))
    strict = [follows(response, *pair) for pair in pairs]
    loose = [any(follows(text, *pair) for text in variants(response)) for pair in pairs]
    return Followed(strict=strict, loose=loose)


def variants(response: str) -> Sequence[str]:
    """The eight texts that loose accuracy looks at.

    >>> variants("Sure!\\n*Yes*")
    ['Sure!\\n*Yes*', '*Yes*', 'Sure!', '', 'Sure!\\nYes', 'Yes', 'Sure!', '']
    """
    lines = response.split("\n")
    cuts = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    texts = [response, *cuts]
    return [*texts, *(text.replace("*", "") for text in texts)]


def accuracy(judged: Sequence[Followed]) -> Accuracy:
    """Of at least one response."""

    def of_prompts(all_followed: Sequence[Sequence[bool]]) -> float:
        return sum(map(all, all_followed)) / len(all_followed)

    def of_instructions(all_followed: Sequence[Sequence[bool]]) -> float:
        return sum(map(sum, all_followed)) / sum(map(len, all_followed))

    strict, loose = [one.strict for one in judged], [one.loose for one in judged]
    return Accuracy(
        prompt_strict=of_prompts(strict),
        instruction_strict=of_instructions(strict),
        prompt_loose=of_prompts(loose),
        instruction_loose=of_instructions(loose),
    )
