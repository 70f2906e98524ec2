"""Dense search: vectors as the model's own tokenizer and one text at a time give them, and what only they find."""

import json

import numpy as np
import pytest
import torch
import transformers

from manege.errors import ConfigError
from manege.recipes.search.retrieval.bm25 import BM25Index
from manege.recipes.search.retrieval.corpus import Passage
from manege.recipes.search.retrieval.dense import DenseIndex
from manege.recipes.search.retrieval.encoder import MINILM, Encoder, encoder_folder
from manege.recipes.search.retrieval.passages import Passages, write_passages

MODEL = encoder_folder(MINILM)
TEXTS = ["", "Oslo", "A novel of 1897 by Bram Stoker.", "word " * 700, "Łódź is a city in Poland. " * 5]

PARAPHRASES = {
    "Which drug lowers fever?": "Aspirin brings down a high body temperature.",
    "car that needs no petrol": "Electric automobiles run on batteries alone.",
    "Who rules Denmark?": "King Frederik has sat on the throne in Copenhagen since 2024.",
    "how to stop a baby crying": "Rocking an infant gently often soothes its tears.",
    "money the state takes from wages": "Income tax is withheld by the employer each month.",
    "fear of spiders": "Arachnophobia makes people panic at the sight of eight legs.",
    "cheapest way of flying abroad": "Budget airlines sell low-cost tickets to foreign destinations.",
    "Why is the sky blue?": "Air molecules scatter short wavelengths of sunlight more strongly.",
    "movie about a sinking ship": "Titanic, a film by James Cameron, tells of the liner that hit an iceberg.",
    "puppy will not eat": "A young dog that refuses its food should see a vet.",
}


@pytest.fixture(scope="module")
def encoder():
    return Encoder(MODEL)


def by_hand(text, pool):
    """Without padding, by the tokenizer and model classes of transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModel.from_pretrained(MODEL).eval()
    with torch.inference_mode():
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        hidden_TE = model(**inputs).last_hidden_state[0]
    vector_E = hidden_TE.mean(0) if pool == "mean" else hidden_TE[0]
    return (vector_E / vector_E.norm()).numpy()


def changed(folder, **files):
    """A copy of the encoder's folder with other settings."""
    folder.mkdir()
    for path in MODEL.iterdir():
        (folder / path.name).symlink_to(path)
    for name, settings in files.items():
        path = folder / name.replace("__", "/")
        if path.parent.is_symlink():
            path.parent.unlink()
            path.parent.mkdir()
        path.with_suffix(".json").unlink(missing_ok=True)
        path.with_suffix(".json").write_text(json.dumps(settings))
    return folder


def test_vectors_of_a_batch_are_those_of_each_text_alone(encoder):
    vectors = encoder.passages(TEXTS)
    assert np.abs(vectors - [by_hand(text, "mean") for text in TEXTS]).max() < 1e-5


def test_the_first_token_is_taken_and_prompts_are_put_before_where_the_folder_says_so(tmp_path):
    folder = changed(
        tmp_path / "model",
        **{"1_Pooling__config": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}},
        config_sentence_transformers={"prompts": {"query": "query: ", "document": "passage: "}},
    )
    encoder = Encoder(folder)
    assert np.abs(encoder.queries(["Oslo"])[0] - by_hand("query: Oslo", "first")).max() < 1e-5
    assert np.abs(encoder.passages(["Oslo"])[0] - by_hand("passage: Oslo", "first")).max() < 1e-5


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"1_Pooling__config": {"pooling_mode_max_tokens": True}},
            "pools by max_tokens; want mean_tokens or cls_token",
        ),
        ({"modules": [{"type": "m.Transformer", "path": ""}, {"type": "m.Dense", "path": ""}]}, "Transformer, Dense;"),
    ],
    ids=["pooling", "module"],
)
def test_an_encoder_that_would_be_read_wrongly_is_refused(tmp_path, files, said):
    with pytest.raises(ConfigError, match=said):
        Encoder(changed(tmp_path / "model", **files))


def test_paraphrases_are_found_that_have_no_word_in_common(tmp_path):
    texts = list(PARAPHRASES.values())
    write_passages([Passage(id=str(n), title="", text=text) for n, text in enumerate(texts)], tmp_path)
    passages = Passages(tmp_path)
    BM25Index.build(passages, tmp_path)
    DenseIndex.build(passages, tmp_path, MODEL)
    right = {}
    for index in (BM25Index(tmp_path), DenseIndex(tmp_path, MODEL)):
        found = index.search(list(PARAPHRASES), 1)
        right[type(index)] = sum(ranking[:1] != [] and ranking[0][0] == n for n, ranking in enumerate(found))
    assert right == {BM25Index: 0, DenseIndex: len(texts)}


def test_ranking_is_exact_and_more_than_there_is_is_all(tmp_path, encoder):
    texts = [f"{number} {word}" for number in range(20) for word in ("snow", "river", "tax")]
    write_passages([Passage(id=str(n), title="", text=text) for n, text in enumerate(texts)], tmp_path)
    DenseIndex.build(Passages(tmp_path), tmp_path, MODEL)
    queries = ["income", "winter"]
    found = DenseIndex(tmp_path, MODEL).search(queries, 100)
    vectors = encoder.passages([f"\n{text}" for text in texts])
    for ranking, query in zip(found, encoder.queries(queries), strict=True):
        cosines = vectors @ query
        assert [score for _, score in ranking] == pytest.approx(sorted(cosines, reverse=True), abs=1e-5)
        assert sorted(number for number, _ in ranking) == list(range(len(texts)))
        assert all(score == pytest.approx(cosines[number], abs=1e-5) for number, score in ranking)
