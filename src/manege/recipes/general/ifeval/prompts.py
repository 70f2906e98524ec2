"""Our own prompts with IFEval's instructions, generated from a seed: one, two or three of them a prompt.

The words of the prompts are ours. Which instructions go together is a table: two that cannot both be followed, or only
against common sense, never meet, and `compose` (which tests run on each prompt) writes a response that follows all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from manege.recipes.general.draw import Draw
from manege.recipes.general.ifeval.checks import CONSTRAINED_ANSWERS

__all__ = ["Instruction", "Prompt", "conflict", "draw_instruction", "make_prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One, with its arguments."""

    type: str
    arguments: Mapping[str, Any]
    text: str
    """As the prompt says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked, and what is checked."""

    text: str
    instructions: Sequence[Instruction]


_REQUESTS = (
    "Write a short story about {a_word}.",
    "Write a letter to a friend who has lost {a_word}.",
    "Describe {a_word} to a child.",
    "Write an advertisement for {a_word}.",
    "Explain why somebody would collect every {word} in town.",
    "Write a news report about {a_word} that was found in a park.",
    "Give advice to somebody who wants to buy {a_word}.",
)
_QUESTION = "Is {a_word} a good present for a teacher?"
_KEYWORDS = ("morning", "market", "winter", "teacher", "ticket", "letter", "kitchen", "doctor")
_FORBIDDEN = ("never", "always", "maybe", "often", "people", "money", "nice", "great")
_LANGUAGES = {"de": "German", "es": "Spanish", "fr": "French", "it": "Italian", "pt": "Portuguese", "ru": "Russian"}
_ENDS = ("That is all for now.", "Let me know what you think.", "Is there anything else you need?")
_FIRST_WORDS = ("weather", "tomorrow", "nobody", "luckily", "friends")

_LENGTHS = {
    "length_constraints:number_words",
    "length_constraints:number_sentences",
    "keywords:letter_frequency",
}
_PARAGRAPHS = {"length_constraints:number_paragraphs", "length_constraints:nth_paragraph_first_word"}
_CASES = {
    "change_case:english_capital",
    "change_case:english_lowercase",
    "change_case:capital_word_frequency",
    "detectable_format:multiple_sections",
}
_ENDINGS = {"startend:end_checker", "detectable_content:postscript"}
_EXCLUSIVE = (_LENGTHS, _PARAGRAPHS, _CASES, _ENDINGS)
"""Of each set, a prompt has one at most."""
_ALONE = {
    "detectable_format:constrained_response": {"punctuation:no_comma", "keywords:forbidden_words"},
    "detectable_format:json_format": {"keywords:existence", "keywords:forbidden_words", "keywords:frequency"},
    "combination:two_responses": {
        "keywords:existence",
        "keywords:forbidden_words",
        "language:response_language",
        "punctuation:no_comma",
    },
    "combination:repeat_prompt": {
        "detectable_format:title",
        "keywords:forbidden_words",
        "startend:end_checker",
        "detectable_content:postscript",
    },
    "language:response_language": {
        "combination:two_responses",
        "detectable_format:number_bullet_lists",
        "length_constraints:number_paragraphs",
        "punctuation:no_comma",
        "startend:quotation",
    },
}
"""What these go together with; with nothing else."""


def conflict(one: str, other: str) -> bool:
    """Whether two instruction types must not meet in a prompt."""
    if one == other or any({one, other} <= exclusive for exclusive in _EXCLUSIVE):
        return True
    return any(a in _ALONE and b not in _ALONE[a] for a, b in ((one, other), (other, one)))


def make_prompt(draw: Draw, types: Sequence[str]) -> Prompt:
    """With instructions of these types. Conflicts are the caller's to avoid."""
    is_question = "detectable_format:constrained_response" in types
    word = draw.word()
    a_word = f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
    request = (_QUESTION if is_question else draw.rng.choice(_REQUESTS)).format(word=word, a_word=a_word)
    instructions = [draw_instruction(draw, kind, request) for kind in types]
    # What is to be repeated comes first, and the order to repeat it last.
    instructions.sort(key=lambda instruction: instruction.type == "combination:repeat_prompt")
    return Prompt(text=" ".join([request, *(one.text for one in instructions)]), instructions=instructions)


def draw_instruction(draw: Draw, kind: str, request: str) -> Instruction:
    """Of a type, for a request."""
    arguments, text = _MAKERS[kind](draw, request)
    return Instruction(type=kind, arguments=arguments, text=text)


_Made = tuple[dict[str, Any], str]


def _existence(draw: Draw, _: str) -> _Made:
    keywords = draw.rng.sample(_KEYWORDS, 2)
    return {"keywords": keywords}, f"Use the words {keywords[0]} and {keywords[1]}."


def _frequency(draw: Draw, _: str) -> _Made:
    keyword, num = draw.rng.choice(_KEYWORDS), draw.between(2, 5)
    return (
        {"keyword": keyword, "frequency": num, "relation": "at least"},
        f"The word {keyword} must be there {num} times or more.",
    )


def _forbidden(draw: Draw, _: str) -> _Made:
    words = draw.rng.sample(_FORBIDDEN, 3)
    return {"forbidden_words": words}, f"These words must not occur: {', '.join(words)}."


def _letters(draw: Draw, _: str) -> _Made:
    letter, num = draw.rng.choice("aeinorst"), draw.between(10, 60)
    return (
        {"letter": letter, "let_frequency": num, "let_relation": "at least"},
        f"The letter {letter} must occur at least {num} times.",
    )


def _language(draw: Draw, _: str) -> _Made:
    code = draw.rng.choice(sorted(_LANGUAGES))
    return {"language": code}, f"Answer in {_LANGUAGES[code]} and in no other language."


def _sentences(draw: Draw, _: str) -> _Made:
    if draw.rng.random() < 0.5:
        num = draw.between(4, 15)
        return {"num_sentences": num, "relation": "at least"}, f"Write at least {num} sentences."
    num = draw.between(14, 20)
    return {"num_sentences": num, "relation": "less than"}, f"Write fewer than {num} sentences."


def _words(draw: Draw, _: str) -> _Made:
    if draw.rng.random() < 0.5:
        num = draw.between(4, 25) * 10
        return {"num_words": num, "relation": "at least"}, f"Use {num} words or more."
    num = draw.between(16, 30) * 10
    return {"num_words": num, "relation": "less than"}, f"Use fewer than {num} words."


def _paragraphs(draw: Draw, _: str) -> _Made:
    num = draw.between(2, 5)
    return {"num_paragraphs": num}, f"Write exactly {num} paragraphs with a line of three asterisks, ***, between two."


def _nth_paragraph(draw: Draw, _: str) -> _Made:
    num = draw.between(2, 5)
    nth, word = draw.between(1, num), draw.rng.choice(_FIRST_WORDS)
    return (
        {"num_paragraphs": num, "nth_paragraph": nth, "first_word": word},
        f"Write exactly {num} paragraphs with an empty line between two; paragraph {nth} must begin with {word}.",
    )


def _placeholders(draw: Draw, _: str) -> _Made:
    num = draw.between(2, 5)
    return {"num_placeholders": num}, f"Leave at least {num} places to be filled in, in square brackets like [date]."


def _postscript(draw: Draw, _: str) -> _Made:
    marker = draw.rng.choice(("P.S.", "P.P.S"))
    return {"postscript_marker": marker}, f"Add a postscript at the end that begins with {marker}"


def _bullets(draw: Draw, _: str) -> _Made:
    num = draw.between(2, 6)
    return {"num_bullets": num}, f"Include a list of exactly {num} points, each on a line that begins with an asterisk."


def _constrained(_: Draw, __: str) -> _Made:
    return {}, f"Choose one of these answers: {' / '.join(CONSTRAINED_ANSWERS)}"


def _highlights(draw: Draw, _: str) -> _Made:
    num = draw.between(2, 4)
    return {"num_highlights": num}, f"Highlight at least {num} parts with asterisks, like *this part*."


def _sections(draw: Draw, _: str) -> _Made:
    num, splitter = draw.between(2, 5), draw.rng.choice(("Section", "Part"))
    return (
        {"section_spliter": splitter, "num_sections": num},
        f"Divide it into {num} parts and open each with {splitter} and its number, like {splitter} 1.",
    )


def _json(_: Draw, __: str) -> _Made:
    return {}, "The whole answer must be JSON; you may put it into a Markdown code fence."


def _title(_: Draw, __: str) -> _Made:
    return {}, "Give it a title in double angle brackets, like <<a day out>>."


def _two_responses(_: Draw, __: str) -> _Made:
    return {}, "Give two different answers with a line of six asterisks, ******, between them and nowhere else."


def _repeat(_: Draw, request: str) -> _Made:
    return (
        {"prompt_to_repeat": request},
        f'Before you answer, repeat this word for word: "{request}" Say nothing before it.',
    )


def _end(draw: Draw, _: str) -> _Made:
    phrase = draw.rng.choice(_ENDS)
    return {"end_phrase": phrase}, f"The very last words must be: {phrase}"


def _capital_words(draw: Draw, _: str) -> _Made:
    if draw.rng.random() < 0.5:
        num = draw.between(2, 10)
        return {"capital_frequency": num, "capital_relation": "at least"}, f"Write {num} or more words all in capitals."
    num = draw.between(8, 14)
    return (
        {"capital_frequency": num, "capital_relation": "less than"},
        f"Write fewer than {num} words all in capitals.",
    )


def _capital(_: Draw, __: str) -> _Made:
    return {}, "Answer in English and in capital letters only."


def _lowercase(_: Draw, __: str) -> _Made:
    return {}, "Answer in English and in small letters only: no capital anywhere."


def _no_comma(_: Draw, __: str) -> _Made:
    return {}, "Use no comma at all."


def _quotation(_: Draw, __: str) -> _Made:
    return {}, "Put your whole answer between double quotation marks."


_MAKERS: Mapping[str, Callable[[Draw, str], _Made]] = {
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _capital,
    "change_case:english_lowercase": _lowercase,
    "combination:repeat_prompt": _repeat,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:title": _title,
    "keywords:existence": _existence,
    "keywords:forbidden_words": _forbidden,
    "keywords:frequency": _frequency,
    "keywords:letter_frequency": _letters,
    "language:response_language": _language,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_words": _words,
    "punctuation:no_comma": _no_comma,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
}
