"""IFEval's instruction types, on responses written by hand; strict and loose accuracy."""

import pytest

from manege.errors import ConfigError
from manege.recipes.general.ifeval.accuracy import accuracy, judge, variants
from manege.recipes.general.ifeval.checks import CHECKS, follows
from manege.recipes.general.ifeval.text import capital_words, num_sentences, num_words

ENGLISH = "the old dog sleeps all day under the big tree in front of our house"
GERMAN = "Der alte Hund schläft den ganzen Tag unter dem großen Baum vor unserem Haus."
TWO = {"relation": "at least"}
FEW = {"relation": "less than"}

# instruction type, its arguments, responses that follow it, responses that do not
CASES = [
    ("keywords:existence", {"keywords": ["cat", "New York"]}, ["A Cat in new york"], ["A cat in York", "new york"]),
    ("keywords:existence", {"keywords": ["c++ (old)"]}, ["I like C++ (old)."], ["I like c+++ (new)."]),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, **TWO}, ["cat, Cats", "catcat"], ["one cat"]),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, **FEW}, ["one cat", "dogs"], ["cat and cat"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat", "a.b"]}, ["catalogue", "axb"], ["The CAT.", "see a.b"]),
    (
        "keywords:letter_frequency",
        {"letter": "E", "let_frequency": 3, "let_relation": "at least"},
        ["Eee", "three e"],
        ["tee", "none"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
        ["#one", "none"],
        ["# one #two"],
    ),
    ("language:response_language", {"language": "de"}, [GERMAN], [ENGLISH]),
    ("language:response_language", {"language": "en"}, [ENGLISH, "12345 ..."], [GERMAN]),
    ("length_constraints:number_sentences", {"num_sentences": 2, **TWO}, ["One. Two!", "Eh?! Yes. No."], ["Only one."]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, **FEW},
        ["It costs 3.50, says Mr. Smith, e.g. today.", "no mark at all"],
        ["It is. So be it"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na *** b\n***"],
        ["a\n\nb", "a"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n\n* * \n***\nb"],
        ["a\n***\n***\nb", "a***b***c"],
    ),
    ("length_constraints:number_words", {"num_words": 3, **TWO}, ["one two three", "well-made it"], ["one, two!"]),
    ("length_constraints:number_words", {"num_words": 3, **FEW}, ["one - two", "?"], ["one two three"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weather"},
        ["One.\n\n'Weather', it is.", "a\n\n\n\nweather\nc"],
        ["Weather\n\nOne.", "a\n\nThe weather", "a\n\nweather\n\nb", "weather"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a] and [b c]"],
        ["[a] and []", "[a]", "(a) (b)"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Hi.\nP.S. Me", "a\np. s. me"],
        ["P.P.S.", "It ps."],
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["a\nP.P.S. Me", "a\n P.P.S me"], ["a\nP.S. me"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b\ntext"],
        ["* a", "* a\n- b\n* c"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 1},
        ["**bold**\n* a\n***\nx"],
        ["**bold**", "1. a", "*\n\n"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Well: My answer is maybe."],
        ["Yes.", "my answer is no"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and **b c**"],
        ["*a*", "* * and *b*", "*a\nb*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section1 a Section2 b Section3"],
        ["Section 1", "SECTION 1\nSECTION 2", "Section one Section two"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[]\n```"],
        ["{'a': 1}", 'Sure: {"a": 1}'],
    ),
    ("detectable_format:title", {}, ["<<A day>>\ntext", "text <<x>>"], ["<A day>", "<<>>", "<< >>", "<<a\nb>>"]),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******a******b******"],
        ["a******a", "a", "a******b******c", "a************b"],
    ),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, ["say it. Yes."], ["Yes. Say it.", "Say: it."]),
    ("startend:end_checker", {"end_phrase": "Any more?"}, ["So. any more? ", '"Any more?"'], ["Any more? Yes."]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and the U.S. army", "GO GO go"],
        ["NASA and Nasa", "123 456"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["WELL-MADE it is", "none"],
        ["I SEE"],
    ),
    (
        "change_case:english_capital",
        {},
        [ENGLISH.upper(), "IT IS 5 O'CLOCK IN THE MORNING."],
        [ENGLISH, GERMAN.upper(), "123"],
    ),
    ("change_case:english_lowercase", {}, [ENGLISH], [ENGLISH.capitalize(), GERMAN.lower()]),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
    ("startend:quotation", {}, ['"a"', ' "a "b" c"\n'], ['"', '"a', "'a'", 'He said "a"']),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "good", "bad"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)]
)
def test_responses_follow_or_do_not(kind, arguments, good, bad):
    assert [text for text in good if not follows(text, kind, arguments)] == []
    assert [text for text in bad if follows(text, kind, arguments)] == []


def test_all_types_of_the_publication_are_there_and_tested():
    assert len(CHECKS) == 25
    assert {case[0] for case in CASES} == set(CHECKS)


@pytest.mark.parametrize("kind", sorted(CHECKS))
def test_nothing_follows_nothing(kind):
    arguments = next(case[1] for case in CASES if case[0] == kind)
    assert not follows(" \n", kind, arguments)


def test_arguments_that_are_none_are_those_of_other_types():
    row = {"num_words": None, "keywords": ["cat"], "relation": None}
    assert follows("a cat", "keywords:existence", row)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("keywords:exist", {}, "no instruction type 'keywords:exist'"),
        ("keywords:existence", {"words": ["a"]}, "cannot be checked with"),
        ("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "exactly"}, "exactly"),
    ],
)
def test_what_cannot_be_checked_is_named(kind, arguments, message):
    with pytest.raises(ConfigError, match=message):
        follows("a", kind, arguments)


@pytest.mark.parametrize(
    ("text", "words", "sentences", "capitals"),
    [
        ("", 0, 0, 0),
        ("Well... what? No!", 3, 3, 0),
        ('He said "Stop!" and left. (So it was.)', 8, 3, 0),
        ("Dr. J. R. Brown lives at No. 5, St. James St. in L.A. now.", 15, 1, 3),
        ("1. First\n2. Second", 4, 1, 0),
        ("日本語です。 はい。", 2, 1, 0),
        ("A U.S.-made NASA/ESA thing I OWN", 9, 1, 6),
    ],
)
def test_texts_are_counted(text, words, sentences, capitals):
    assert (num_words(text), num_sentences(text), capital_words(text)) == (words, sentences, capitals)


def test_loose_looks_at_eight_texts():
    assert variants("Sure!\n*a*\n**b**\nBye") == [
        "Sure!\n*a*\n**b**\nBye",
        "*a*\n**b**\nBye",
        "Sure!\n*a*\n**b**",
        "*a*\n**b**",
        "Sure!\na\nb\nBye",
        "a\nb\nBye",
        "Sure!\na\nb",
        "a\nb",
    ]
    followed = judge("Sure, here it is:\n{}\nBye", ["detectable_format:json_format", "punctuation:no_comma"], [{}, {}])
    assert (followed.strict, followed.loose) == ([False, False], [True, True])
    assert judge("**", ["detectable_format:title"], [{}]).loose == [False]


def test_accuracy_is_of_prompts_and_of_instructions():
    kinds = ["punctuation:no_comma", "change_case:english_capital"]
    both = judge("ALL OF IT IS WRITTEN IN CAPITALS", kinds, [{}, {}])
    one = judge("only this", kinds, [{}, {}])
    loose = judge("Well, so:\nALL OF IT IS WRITTEN IN CAPITALS", kinds, [{}, {}])
    found = accuracy([both, one, loose])
    assert found.prompt_strict == pytest.approx(1 / 3)
    assert found.instruction_strict == pytest.approx(3 / 6)
    assert found.prompt_loose == pytest.approx(2 / 3)
    assert found.instruction_loose == pytest.approx(5 / 6)
