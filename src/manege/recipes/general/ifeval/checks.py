"""IFEval's instruction types, each as a check of a response.

Names and arguments are the published ones (https://arxiv.org/abs/2311.07911, table 4, and the rows of google/IFEval);
the checks are written from the descriptions there. In: a response and the arguments of one instruction. Out: whether it
was followed. A response of nothing but space follows no instruction.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from string import punctuation

from manege.errors import ConfigError
from manege.recipes.general.ifeval import text
from manege.types import JsonObject

__all__ = ["CHECKS", "CONSTRAINED_ANSWERS", "follows"]

CONSTRAINED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": lambda number, bound: number >= bound,
    "less than": lambda number, bound: number < bound,
}


def follows(response: str, instruction: str, arguments: JsonObject) -> bool:
    """Arguments that are None are left out, as the rows of google/IFEval have them. Raises ConfigError for an
    instruction that is not known, or arguments that are not its own."""
    check = CHECKS.get(instruction)
    if check is None:
        raise ConfigError(f"there is no instruction type {instruction!r}; known are {', '.join(sorted(CHECKS))}")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return bool(response.strip()) and check(response, **given)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"instruction {instruction} cannot be checked with {given!r}: {error}") from error


def _existence(response: str, *, keywords: Sequence[str]) -> bool:
    return all(_count(keyword, response) for keyword in keywords)


def _frequency(response: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return _RELATIONS[relation](_count(keyword, response), frequency)


def _count(keyword: str, response: str) -> int:
    """Also inside of words, as published; capitals do not count."""
    return response.lower().count(keyword.lower())


def _forbidden(response: str, *, forbidden_words: Sequence[str]) -> bool:
    """Inside of words they are allowed."""
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


def _letters(response: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _RELATIONS[let_relation](response.lower().count(letter.lower()), let_frequency)


def _language(response: str, *, language: str) -> bool:
    return text.is_language(response, language)


def _sentences(response: str, *, num_sentences: int, relation: str) -> bool:
    return _RELATIONS[relation](text.num_sentences(response), num_sentences)


def _paragraphs(response: str, *, num_paragraphs: int) -> bool:
    """Separated by `***`; only before the first and after the last one may there be nothing."""
    parts = [part.strip() for part in re.split(r"\*\*\*", response)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def _words(response: str, *, num_words: int, relation: str) -> bool:
    return _RELATIONS[relation](text.num_words(response), num_words)


def _nth_paragraph(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are separated by empty lines; marks around the word do not count."""
    parts = [part.split() for part in re.split(r"\n\n", response) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    return parts[nth_paragraph - 1][0].strip(punctuation + "“”‘’").lower() == first_word.lower()


def _placeholders(response: str, *, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", response)) >= num_placeholders


def _postscript(response: str, *, postscript_marker: str) -> bool:
    """At the beginning of a line; spaces between its letters and the last full stop may differ."""
    letters = [re.escape(letter) for letter in re.findall(r"\w", postscript_marker)]
    return bool(re.search(r"^\W*" + r"\.?\s?".join(letters) + r"\b", response, re.IGNORECASE | re.MULTILINE))


def _bullets(response: str, *, num_bullets: int) -> bool:
    """Lines that begin with `*` (but not with two: that is bold) or `-`."""
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-(?!--))[ \t]*\S", response, re.MULTILINE)) == num_bullets


def _constrained(response: str) -> bool:
    return any(answer in response for answer in CONSTRAINED_ANSWERS)


def _highlights(response: str, *, num_highlights: int) -> bool:
    """Between single or double asterisks, in one line."""
    found = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", response)
    return sum(bool(part.strip("*").strip()) for part in found) >= num_highlights


def _sections(response: str, *, section_spliter: str, num_sections: int) -> bool:
    """`section_spliter` before a number opens one."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", response)) >= num_sections


def _json(response: str) -> bool:
    """All of it, a fence around it apart."""
    unfenced = re.sub(r"^```(?:json)?\s*|\s*```$", "", response.strip(), flags=re.IGNORECASE)
    try:
        json.loads(unfenced)
    except ValueError:
        return False
    return True


def _title(response: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", response))


def _two_responses(response: str) -> bool:
    """Separated by six asterisks, and different."""
    parts = [part.strip() for part in response.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def _repeat(response: str, *, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end(response: str, *, end_phrase: str) -> bool:
    """A quotation mark may follow."""
    return response.strip().strip('"').rstrip().lower().endswith(end_phrase.strip().lower())


def _capital_words(response: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return _RELATIONS[capital_relation](text.capital_words(response), capital_frequency)


def _capital(response: str) -> bool:
    """The language is guessed from the text in small letters: of capitals langdetect often guesses wrong."""
    return response.isupper() and text.is_language(response.lower(), "en")


def _lowercase(response: str) -> bool:
    return response.islower() and text.is_language(response, "en")


def _no_comma(response: str) -> bool:
    return "," not in response


def _quotation(response: str) -> bool:
    return bool(re.fullmatch(r'"[\s\S]*"', response.strip()))


CHECKS: Mapping[str, Callable[..., bool]] = {
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
