"""BM25 of the search service against the formula, written out, and against the library's own index."""

import math
from collections import Counter

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manege.recipes.search.retrieval.bm25 import K1, B, BM25Index
from manege.recipes.search.retrieval.corpus import Passage
from manege.recipes.search.retrieval.words import words_of

# Stop words, two forms of one stem, a word that is not ASCII, punctuation.
WORDS = ["the", "of", "film", "Films", "Łódź", "river", "rivers,", "1897", "x", "novel.", "it's", "snow", "snowed"]
text = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


def passages(texts):
    return [Passage(id=str(number), title="", text=text) for number, text in enumerate(texts)]


def by_the_formula(texts, query, top_k):
    counts = [Counter(words_of(text)) for text in texts]
    lengths = [count.total() for count in counts]
    mean = sum(lengths) / len(lengths) or 1
    scores = []
    for count, length in zip(counts, lengths, strict=True):
        score = 0.0
        for word in words_of(query):
            num_with = sum(word in other for other in counts)
            idf = math.log(1 + (len(texts) - num_with + 0.5) / (num_with + 0.5))
            if count[word]:
                score += idf * count[word] / (count[word] + K1 * (1 - B + B * length / mean))
        scores.append(score)
    best = sorted(range(len(texts)), key=lambda number: (-round(scores[number], 5), number))[:top_k]
    return [(number, scores[number]) for number in best if scores[number] > 0]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(text, min_size=1, max_size=12), query=text, block_words=st.sampled_from([1, 7, 1000]))
def test_rank_and_score_are_those_of_the_formula_however_the_corpus_is_cut_into_blocks(
    tmp_path_factory, texts, query, block_words
):
    folder = tmp_path_factory.mktemp("index")
    BM25Index.build(passages(texts), folder, block_words=block_words)
    (found,) = BM25Index(folder).search([query], 3)
    wanted = by_the_formula(texts, query, 3)
    assert [score for _, score in found] == pytest.approx([score for _, score in wanted], rel=1e-4)
    # The order of two that differ less than float32 can tell is anybody's guess.
    scores = dict(by_the_formula(texts, query, len(texts)))
    for (number, score), (other, _) in zip(found, wanted, strict=True):
        assert number == other or scores[number] == pytest.approx(scores[other], rel=1e-4)
        assert score == pytest.approx(scores[number], rel=1e-4)


def test_of_equal_passages_the_first_comes_first(tmp_path):
    BM25Index.build(passages(["a snow film"] * 50), tmp_path)
    (found,) = BM25Index(tmp_path).search(["film"], 5)
    assert [number for number, _ in found] == [0, 1, 2, 3, 4]


def test_the_folder_holds_what_the_library_would_have_built(tmp_path):
    texts = ["Dracula is a novel by Bram Stoker", "a novel idea", "rivers of snow", "novel novel snow"]
    BM25Index.build(passages(texts), tmp_path, block_words=4)
    theirs = bm25s.BM25(k1=K1, b=B, method="lucene")
    theirs.index([words_of(text) for text in texts], show_progress=False)
    ours = bm25s.BM25.load(tmp_path)
    for word in ("novel", "snow", "stoker", "river"):
        assert ours.get_scores([word]) == pytest.approx(theirs.get_scores([word]))
    assert ours.scores["indptr"][-1] == theirs.scores["indptr"][-1]


@pytest.mark.parametrize("query", ["", "the of", "unheard"])
def test_nothing_is_found_where_no_word_matches(tmp_path, query):
    BM25Index.build(passages(["snow", "", "the"]), tmp_path)
    assert BM25Index(tmp_path).search([query], 3) == [[]]


def test_a_corpus_of_stop_words_alone_can_be_opened(tmp_path):
    BM25Index.build(passages(["the", "of"]), tmp_path)
    assert BM25Index(tmp_path).search(["snow"], 3) == [[]]
