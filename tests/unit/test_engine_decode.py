"""Decoding at fixed shapes, as a GPU captures it, is decoding: the CPU runs the same code, eagerly."""

import random

import numpy as np
import pytest
import torch

from manege.engine.base import Sampling
from manege.engine.decode import DecodeSteps
from manege.engine.kv_cache import KvCache
from manege.engine.local_batch import Batch, LiveSequence
from manege.model.attend import causal_attend
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.types import PolicyVersion
from tests.conftest import TINY_MODEL

FOLDER = open_folder(str(TINY_MODEL))


@pytest.fixture(scope="module")
def model():
    return load_model(FOLDER, dtype=torch.float64)


def sequences(sizes, seed):
    """Prompts and answers of these lengths."""
    rng = random.Random(seed)
    made = []
    for index, (num_prompt, num_new) in enumerate(sizes):
        buffer = np.zeros(num_prompt + num_new, np.int32)
        buffer[:num_prompt] = rng.choices(range(64), k=num_prompt)
        sampling = Sampling(max_new_tokens=num_new)
        made.append(
            LiveSequence(
                buffer=buffer,
                num_prompt=num_prompt,
                num_tokens=num_prompt,
                sampling=sampling,
                rng=random.Random(index),
                sink=index,
            )
        )
    return made


def play(batch, joining):
    """Sequences join one after the other, some steps apart; their tokens and log-probabilities."""
    waiting, found = list(joining), {each.sink: [] for each in joining}
    while waiting or batch.running or batch.waiting:
        if waiting:
            batch.add(waiting.pop(0))
        for _ in range(4):
            if batch.running or batch.waiting:
                for sequence, chunk in batch.step(PolicyVersion(0)):
                    found[sequence.sink] += zip(chunk.ids, chunk.logprobs, strict=True)
    return found


SIZES = [(30, 40), (3, 9), (120, 70), (5, 30), (250, 20), (17, 50), (8, 3), (40, 60)]


def test_answers_are_those_of_steps_of_any_shape(model):
    """Sequences come and go, leave rows between the busy ones, and outgrow the cache's rows."""
    found = []
    for fixed_shapes in (False, True):
        batch = Batch(
            model, FOLDER.tokenizer, max_batch=6, cache_tokens=6 * 256, prefill_chunk=64, fixed_shapes=fixed_shapes
        )
        found.append([play(batch, sequences(SIZES, seed)) for seed in (1, 2)])
        batch.clear()
        found[-1].append(play(batch, sequences(SIZES, 3)))
    for plain, fixed in zip(*found, strict=True):
        for index, (_, num_new) in enumerate(SIZES):
            ids, logprobs = zip(*fixed[index], strict=True)
            assert ids == tuple(id for id, _ in plain[index])
            assert len(ids) == num_new
            assert logprobs == pytest.approx([logprob for _, logprob in plain[index]], abs=1e-9)


def test_a_step_leaves_the_rows_alone_that_are_not_part_of_it(model):
    """Idle rows hold prefixes, even to their last position; rows beyond a power of two do not exist."""
    cache = KvCache(model, 3 * 256)
    cache.grow(1)
    rng = random.Random(0)
    rows = []
    with torch.inference_mode():
        for length in (256, 100, 41):
            ids = np.asarray(rng.choices(range(64), k=length), np.int32)
            row, _ = cache.claim(ids)
            cache.pool_RL2TKD[row.index, :, :, :length] = torch.randn_like(cache.pool_RL2TKD[row.index, :, :, :length])
            row.length = length
            rows.append(row)
        before = [cache.pool_RL2TKD[row.index, :, :, : row.length].clone() for row in rows]
        DecodeSteps(model, cache, captures=False).hidden([rows[2]], [7])
    assert len(cache.rows) == 3
    for row, kept in zip(rows, before, strict=True):
        assert torch.equal(cache.pool_RL2TKD[row.index, :, :, : row.length], kept)


def test_hidden_states_are_those_of_a_plain_forward_pass(model):
    cache = KvCache(model, 5 * 256)
    cache.grow(1)
    steps = DecodeSteps(model, cache, captures=False)
    ids_TR = np.random.default_rng(0).integers(0, 64, (12, 5))
    rows = [cache.claim(ids_T.astype(np.int32))[0] for ids_T in ids_TR.T]
    assert all(row is not None for row in rows)
    with torch.inference_mode():
        for ids_R in ids_TR:
            hidden_RE = steps.hidden(rows, ids_R.tolist())
            for row in rows:
                row.length += 1
        for index, ids_T in enumerate(ids_TR.T):
            ids = torch.from_numpy(ids_T).long()
            plain_TE = model.hidden(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
            torch.testing.assert_close(hidden_RE[index], plain_TE[-1], atol=1e-9, rtol=0)
