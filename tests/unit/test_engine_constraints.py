"""Grammars as masks over the vocabulary, alone, in a batch of the local engine and over a script."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from manege.engine.base import Constraint, Sampling, collect
from manege.engine.constraints import Grammars, json_constraint
from manege.engine.local_batch import Batch, LiveSequence
from manege.engine.sampling import choose_tokens
from manege.engine.scripted import ScriptedEngine
from manege.errors import EngineError, ProtocolError
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.types import PolicyVersion
from tests.conftest import TINY_MODEL

FOLDER = open_folder(str(TINY_MODEL))
VOCABULARY = FOLDER.tokenizer.get_vocab_size()
GRAMMARS = Grammars(FOLDER.tokenizer, vocab_size=VOCABULARY, eos_ids=FOLDER.eos_ids)
STOP = FOLDER.tokenizer.token_to_id("<|user|>")
(EOS,) = FOLDER.eos_ids
CITY = json_constraint({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})


def encode(text):
    return FOLDER.tokenizer.encode(text).ids


def allowed_text(guide):
    return "".join(sorted(FOLDER.tokenizer.decode([id]) for id in guide.allowed_V().nonzero()[0].tolist()))


def test_a_guide_allows_what_can_still_match():
    guide = GRAMMARS.guide(Constraint(grammar='start: "ab" | "ac" /[xy]/ "d"'), [])
    assert allowed_text(guide) == "a"
    assert not guide.advance(*encode("a"))
    assert allowed_text(guide) == "bc"
    assert not guide.advance(*encode("c"))
    assert allowed_text(guide) == "xy"
    assert not guide.advance(*encode("y"))
    assert guide.advance(*encode("d"))


def test_stop_ids_are_allowed_where_the_grammar_may_end_and_nowhere_else():
    guide = GRAMMARS.guide(Constraint(grammar="start: /[ab]{2,3}/"), [STOP])
    for may_end in (False, False, True):
        allowed_V = guide.allowed_V()
        assert (guide.can_end, bool(allowed_V[STOP]), bool(allowed_V[EOS])) == (may_end,) * 3
        ended = guide.advance(*encode("a"))
    assert ended


def test_the_mask_is_as_wide_as_the_models_vocabulary():
    for size in (VOCABULARY, VOCABULARY + 59):
        wide = Grammars(FOLDER.tokenizer, vocab_size=size, eos_ids=FOLDER.eos_ids)
        allowed_V = wide.guide(Constraint(grammar="start: /.+/"), []).allowed_V()
        assert len(allowed_V) == size
        assert not allowed_V[VOCABULARY:].any()


def test_white_space_in_json_has_a_bound():
    guide = GRAMMARS.guide(CITY, [])
    for letter in "{" + 12 * " ":
        assert guide.allowed_V()[encode(letter)]
        guide.advance(*encode(letter))
    assert allowed_text(guide) == '"'


def test_a_grammar_that_does_not_compile_says_where():
    with pytest.raises(ProtocolError, match=r"grammar of the answer cannot be used: .*unknown name: \"nothing\""):
        GRAMMARS.guide(Constraint(grammar="start: nothing"), [])
    with pytest.raises(ProtocolError, match=r"JSON schema cannot be used: .*no-such-type"):
        GRAMMARS.guide(json_constraint({"type": "no-such-type"}), [])


def lost_guide():
    """Of an answer that went where its grammar does not lead."""
    guide = GRAMMARS.guide(Constraint(grammar='start: "ab"'), [])
    assert not guide.advance(*encode("x"))
    return guide


def test_a_guide_that_is_lost_says_so():
    with pytest.raises(EngineError, match="cannot be followed"):
        lost_guide().allowed_V()


def test_a_lost_guide_ends_its_own_sequence_and_no_other():
    model = load_model(FOLDER)
    batch = Batch(model, FOLDER.tokenizer, max_batch=4, cache_tokens=1024, prefill_chunk=64)

    def add(guide):
        ids = np.array([*encode("abc"), *range(8)], np.int32)
        sampling = Sampling(max_new_tokens=8)
        sequence = LiveSequence(
            buffer=ids, num_prompt=3, num_tokens=3, sampling=sampling, rng=random.Random(0), sink=None, guide=guide
        )
        batch.add(sequence)
        return sequence

    free, lost = add(None), add(lost_guide())
    found = [item for _ in range(8) for item in batch.step(PolicyVersion(0))]
    errors = [sequence for sequence, item in found if isinstance(item, EngineError)]
    assert errors == [lost]
    assert [sequence for sequence, _ in found if sequence is not lost] == [free] * 8
    assert not batch.running


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_only_allowed_ids_are_chosen_however_unlikely_and_the_logprob_is_that_without_the_mask(temperature):
    logits = torch.tensor([[50.0, 10.0, -200.0, -201.0], [0.0, 1.0, 2.0, 3.0]])
    allowed = {0: np.array([False, False, True, True])}
    samplings = [Sampling(temperature=temperature, max_new_tokens=1, top_p=0.99)] * 2
    counts = np.zeros(4)
    for uniform in np.linspace(0, 0.999, 200):
        ids, logprobs = choose_tokens(logits, samplings, [float(uniform), 0.999], allowed)
        counts[ids[0]] += 1
        expected = (logits / (temperature or 1.0)).log_softmax(-1)[[0, 1], ids]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert ids[1] == 3
    assert counts[:2].sum() == 0
    share = {0.0: 1.0, 0.5: 1 / (1 + np.exp(-2)), 1.0: 1 / (1 + np.exp(-1))}[temperature]
    assert counts[2] / 200 == pytest.approx(share, abs=0.02)


def scripted(text, **options):
    return ScriptedEngine(lambda prompt: [*encode(text), EOS], decode=FOLDER.tokenizer.decode, **options)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("script", "answer"),
    [
        ("Rome", {"city": "Rome"}),
        ('{"city": "Rome", "more": [1]}', {"city": "Rome", "more": [1]}),
        ("", {"city": ""}),
        ("Ro\nme", {"city": "Ro"}),
    ],
    ids=["text", "what was asked for", "nothing", "what JSON does not allow"],
)
async def test_a_script_is_bent_to_its_constraint(script, answer):
    sampling = Sampling(constraint=CITY, max_new_tokens=100, stop_ids=frozenset({EOS}))
    found = await collect(scripted(script, grammars=GRAMMARS).generate([1], sampling))
    assert json.loads(FOLDER.tokenizer.decode(found.ids_R.tolist())) == answer
    assert found.finish_reason == "stop"


@pytest.mark.anyio
async def test_a_script_without_grammars_refuses_a_constraint():
    with pytest.raises(EngineError, match="has no `grammars`"):
        await collect(scripted("Rome").generate([1], Sampling(constraint=CITY, max_new_tokens=100)))


def test_all_engines_but_the_local_one_do_without_torch():
    modules = ["answers", "base", "constraints", "scripted", "server", "token_stream", "upstream"]
    imports = "".join(f"import manege.engine.{module}; " for module in modules)
    subprocess.run([sys.executable, "-c", f"{imports}import sys; assert 'torch' not in sys.modules"], check=True)
