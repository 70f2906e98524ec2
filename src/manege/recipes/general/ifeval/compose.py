"""A plain text that follows given instructions: proof that they do not contradict each other, and a reference solution.

It knows the instructions' arguments, as a writer knows the prompt; it does not call the checks.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from manege.recipes.general.ifeval.prompts import Instruction

__all__ = ["compose"]

_FILLER = (
    "It was there on the old wooden table near the open door",
    "The children saw it first and told their mother about it",
    "Then the neighbours came in to look at it with a lamp",
    "In the end it was put on a shelf for the rest of the year",
)
_IN_LANGUAGE = {
    "de": "Das ist ein kleiner Text über einen Gegenstand, den die Kinder gestern im Garten gefunden haben",
    "es": "Este es un texto pequeño sobre una cosa que los niños encontraron ayer en el jardín de la casa",
    "fr": "Ceci est un petit texte sur une chose que les enfants ont trouvée hier dans le jardin de la maison",
    "it": "Questo è un piccolo testo su una cosa che i bambini hanno trovato ieri nel giardino della casa",
    "pt": "Este é um pequeno texto sobre uma coisa que as crianças encontraram ontem no jardim da nossa casa",
    "ru": "Это небольшой текст о вещи, которую дети вчера нашли в саду нашего дома",
}


def compose(instructions: Sequence[Instruction], facts: Sequence[str] = ()) -> str:
    """A text that follows all of them, and holds `facts` as they are unless its letters must be of one case."""
    wanted = {one.type: one.arguments for one in instructions}
    if "detectable_format:constrained_response" in wanted:
        return "My answer is yes."
    if "combination:two_responses" in wanted:
        return f"{_text(wanted, facts)}\n******\n{_text(wanted, [*facts, *_filler(wanted)])}"
    if "detectable_format:json_format" in wanted:
        return json.dumps({"text": _text(wanted, facts)})
    text = _text(wanted, facts)
    if "combination:repeat_prompt" in wanted:
        text = f"{wanted['combination:repeat_prompt']['prompt_to_repeat']}\n{text}"
    if "change_case:english_capital" in wanted:
        text = text.upper()
    if "change_case:english_lowercase" in wanted:
        text = text.lower()
    return f'"{text}"' if "startend:quotation" in wanted else text


def _filler(wanted: Mapping[str, Any]) -> Sequence[str]:
    if language := wanted.get("language:response_language"):
        return [_IN_LANGUAGE[language["language"]]] * 2
    return _FILLER


def _text(wanted: Mapping[str, Any], facts: Sequence[str]) -> str:
    paragraphs, between = _paragraphs(wanted, [*facts, *_needed(wanted)])
    if "detectable_format:title" in wanted:
        paragraphs[0] = f"{paragraphs[0]}\n<<about it>>"
    for kind, lines in _LINES.items():
        if kind in wanted:
            paragraphs[-1] = "\n".join([paragraphs[-1], *lines(wanted[kind])])
    text = between.join(paragraphs)
    return text.replace(",", "") if "punctuation:no_comma" in wanted else text


def _needed(wanted: Mapping[str, Any]) -> list[str]:
    """Words that must be there."""
    keywords = list(wanted.get("keywords:existence", {}).get("keywords", ()))
    if frequency := wanted.get("keywords:frequency"):
        keywords += [frequency["keyword"]] * frequency["frequency"]
    capitals = wanted.get("change_case:capital_word_frequency")
    if capitals and capitals["capital_relation"] == "at least":
        keywords += ["GOOD"] * capitals["capital_frequency"]
    return keywords


def _paragraphs(wanted: Mapping[str, Any], needed: Sequence[str]) -> tuple[list[str], str]:
    """And what goes between them."""
    filler = _filler(wanted)
    nth = wanted.get("length_constraints:nth_paragraph_first_word")
    parts = wanted.get("length_constraints:number_paragraphs")
    num = (nth or parts or {"num_paragraphs": 1})["num_paragraphs"]
    paragraphs = [f"{filler[n % len(filler)]}." for n in range(num)]
    if nth:
        paragraphs[nth["nth_paragraph"] - 1] = f"{nth['first_word']} {filler[0]}."
    if needed:
        paragraphs[0] += f" With it came {' and '.join(needed)}."
    num_sentences = wanted.get("length_constraints:number_sentences", {"relation": "less than"})
    if num_sentences["relation"] == "at least":
        paragraphs[0] += f" {filler[1]}." * num_sentences["num_sentences"]
    num_words = wanted.get("length_constraints:number_words", {"relation": "less than"})
    if num_words["relation"] == "at least":
        paragraphs[0] += f" {filler[1]}." * (num_words["num_words"] // len(filler[1].split()) + 1)
    if letters := wanted.get("keywords:letter_frequency"):
        # Each of the letters that are asked for is in it at least once.
        paragraphs[0] += " Another sentence about their raisin bread." * letters["let_frequency"]
    return paragraphs, "\n***\n" if parts else "\n\n"


_LINES = {
    "detectable_format:multiple_sections": lambda given: [
        f"{given['section_spliter']} {n + 1}\nabout it" for n in range(given["num_sections"])
    ],
    "detectable_content:number_placeholders": lambda given: [" ".join(["[name]"] * given["num_placeholders"])],
    "detectable_format:number_bullet_lists": lambda given: ["* one point"] * given["num_bullets"],
    "detectable_format:number_highlighted_sections": lambda given: [
        "with " + " ".join(["*one part*"] * given["num_highlights"])
    ],
    "detectable_content:postscript": lambda given: [f"{given['postscript_marker']} it was a good day"],
    "startend:end_checker": lambda given: [given["end_phrase"]],
}
"""What comes at the end, by instruction."""
