"""The parts of the local engine by themselves: choosing tokens, cache rows, threads."""

import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from manege.engine.base import Sampling
from manege.engine.kv_cache import KvCache
from manege.engine.sampling import choose_tokens
from manege.engine.threads import ThreadChoice
from manege.errors import EngineError
from manege.model.folder import open_folder
from manege.model.load import load_model
from tests.conftest import TINY_MODEL

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw(sampling, count=4000):
    rng = random.Random(0)
    ids, logprobs = choose_tokens(LOGITS.repeat(count, 1), [sampling] * count, [rng.random() for _ in range(count)])
    return np.bincount(ids, minlength=len(LOGITS)) / count, dict(zip(ids, logprobs, strict=True))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_in_proportion_to_their_probability(temperature):
    frequencies, logprobs = draw(Sampling(temperature=temperature, max_new_tokens=1))
    expected = (LOGITS / temperature).softmax(-1).numpy()
    np.testing.assert_allclose(frequencies, expected, atol=4 * math.sqrt(0.25 / 4000))
    for id, logprob in logprobs.items():
        assert logprob == pytest.approx(math.log(expected[id]), abs=1e-5)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2, max_new_tokens=1), {0, 1}),
        (Sampling(top_p=0.7, max_new_tokens=1), {0, 1}),  # 0.56, 0.77
        (Sampling(top_p=0.8, max_new_tokens=1), {0, 1, 2}),  # 0.77, 0.89
        (Sampling(top_p=0.01, max_new_tokens=1), {0}),
        (Sampling(top_p=0.9, top_k=1, max_new_tokens=1), {0}),
        (Sampling(temperature=0, max_new_tokens=1), {0}),
    ],
    ids=["top_k", "top_p", "top_p reaches further", "top_p keeps one", "both", "greedy"],
)
def test_truncation_chooses_from_fewer_tokens_but_reports_the_full_distribution(sampling, kept):
    frequencies, logprobs = draw(sampling)
    assert set(np.flatnonzero(frequencies).tolist()) == kept
    expected = LOGITS.log_softmax(-1)
    assert all(logprob == pytest.approx(expected[id].item(), abs=1e-5) for id, logprob in logprobs.items())


def test_each_row_of_a_batch_has_its_own_settings():
    samplings = [Sampling(temperature=t, top_k=k, max_new_tokens=1) for t, k in ((0, 0), (1.0, 1), (4.0, 0))]
    ids, logprobs = choose_tokens(LOGITS.repeat(3, 1), samplings, [0.999, 0.999, 0.999])
    assert ids == [0, 0, 5]
    assert logprobs[2] == pytest.approx((LOGITS / 4).log_softmax(-1)[5].item(), abs=1e-5)


def test_the_edges_of_a_uniform_number_are_tokens_that_can_be():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    for uniform, expected in ((0.0, 1), (0.4999, 1), (0.5001, 3), (1 - 2**-53, 3)):
        assert choose_tokens(logits, [Sampling(max_new_tokens=1)], [uniform])[0] == [expected]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(wrong):
    with pytest.raises(EngineError, match="diverged"):
        choose_tokens(torch.tensor([[0.0, wrong]]), [Sampling(max_new_tokens=1)], [0.5])


@pytest.fixture
def cache():
    cache = KvCache(load_model(open_folder(str(TINY_MODEL))), 4 * 256)
    cache.grow(1)
    return cache


def tokens(*values):
    return np.array(values, np.int32)


def fill(cache, row, value):
    """Compute a row: its keys and values become `value`, by which they can be followed."""
    cache.pool_RL2TKD[row.index, :, :, row.length : len(row.tokens)] = value
    row.length = len(row.tokens)


def run(cache, ids, value):
    row, cached = cache.claim(ids)
    fill(cache, row, value)
    cache.release(row, ids)
    return row, cached


def values(cache, row):
    return cache.pool_RL2TKD[row.index, 0, 0, : row.length, 0, 0].tolist()


def test_a_row_is_taken_over_by_what_extends_it_and_copied_for_what_branches_off(cache):
    first, _ = run(cache, tokens(1, 2, 3), 1)
    extended, cached = cache.claim(tokens(1, 2, 3, 4))
    assert (extended, cached) == (first, 3)
    branch, cached = cache.claim(tokens(1, 2, 9, 9))
    assert (branch is not first, cached) == (True, 2)
    assert values(cache, branch) == [1, 1]


def test_the_last_token_of_a_prompt_is_always_computed(cache):
    run(cache, tokens(1, 2, 3), 1)
    assert cache.claim(tokens(1, 2, 3))[1] == 2


def test_the_least_recently_used_row_goes_first_and_busy_ones_stay(cache):
    for start in (10, 20, 30, 40):
        run(cache, tokens(start, start + 1), start)
    run(cache, tokens(10, 11, 12), 10)
    busy, _ = cache.claim(tokens(30, 31, 32))
    claimed = [cache.claim(tokens(start, 0))[0] for start in (50, 60)]
    held = sorted(row.tokens.tolist() for row in cache.rows)
    assert held == [[10, 11, 12], [30, 31, 32], [50, 0], [60, 0]]
    assert cache.claim(tokens(10, 11, 12, 13))[1] == 3
    assert cache.claim(tokens(70, 0)) is None
    cache.release(busy, tokens(30, 31, 32))
    assert cache.claim(tokens(70, 0)) is not None
    assert claimed


def test_running_rows_move_to_the_lowest_indexes_with_what_they_hold(cache):
    rows = [run(cache, tokens(start, start + 1, start + 2), start)[0] for start in (10, 20, 30)]
    row, cached = cache.claim(tokens(30, 31, 32, 33))
    assert (row, row.index, cached) == (rows[2], 0, 3)
    assert values(cache, row) == [30, 30, 30]
    assert values(cache, rows[0]) == [10, 10, 10]
    assert sorted(row.index for row in cache.rows) == [0, 1, 2, 3]


def test_growing_keeps_busy_rows_first_then_recent_ones(cache):
    for start in (10, 20, 30):
        run(cache, tokens(start, start + 1), start)
    busy, _ = cache.claim(tokens(40, 41))
    fill(cache, busy, 40)
    assert cache.grow(300) == []
    assert (cache.capacity, len(cache.rows)) == (512, 2)
    assert [row.tokens.tolist() for row in cache.rows] == [[40, 41], [30, 31]]
    assert [values(cache, row) for row in cache.rows] == [[40, 40], [30, 30]]
    other, _ = cache.claim(tokens(50, 51))
    assert cache.grow(600) in ([busy], [other])


def test_a_sequence_waits_for_a_long_prefix_that_another_is_computing(cache):
    prefix = list(range(100))
    row, _ = cache.claim(tokens(*prefix, 1))
    assert cache.claim(tokens(*prefix, 2)) is None
    assert cache.claim(tokens(*prefix[:5], 200)) is not None  # too little to wait for
    fill(cache, row, 1)
    assert cache.claim(tokens(*prefix, 2))[1] == 100


def test_after_new_weights_a_busy_row_keeps_what_it_holds_and_serves_nobody_else(cache):
    run(cache, tokens(1, 2, 3), 1)
    busy, _ = cache.claim(tokens(4, 5, 6))
    fill(cache, busy, 4)
    cache.outdate()
    assert (busy.outdated, values(cache, busy)) == (True, [4, 4, 4])
    for ids in (tokens(1, 2, 3, 9), tokens(4, 5, 6, 9)):
        assert cache.claim(ids)[1] == 0
    cache.grow(300)
    assert busy.outdated
    cache.release(busy, tokens(4, 5, 6))
    assert (busy.outdated, cache.claim(tokens(4, 5, 6, 7))[1]) == (False, 0)


def test_nobody_waits_for_a_prefix_that_is_computed_over_an_old_cache(cache):
    prefix = list(range(100))
    row, _ = cache.claim(tokens(*prefix, 1))
    row.length = 10
    cache.outdate()
    assert cache.claim(tokens(*prefix, 2))[1] == 0


def test_a_row_of_which_nothing_is_computed_has_nothing_old(cache):
    row, _ = cache.claim(tokens(1, 2, 3))
    cache.outdate()
    assert not row.outdated


def test_a_cache_that_was_dropped_holds_no_memory_until_it_is_needed(cache):
    run(cache, tokens(1, 2, 3), 1)
    cache.drop()
    assert (cache.pool_RL2TKD.numel(), cache.rows) == (0, [])
    assert cache.grow(300) == []
    assert (cache.capacity, cache.claim(tokens(1, 2, 3, 4))[1]) == (512, 0)


def test_threads_are_what_was_asked_for_or_at_most_the_cores():
    assert ThreadChoice(3).num_threads() == 3
    assert 1 <= ThreadChoice(None).num_threads() <= (os.cpu_count() or 1)


def test_openmp_is_calm_before_torch_is_imported_unless_told_otherwise():
    code = (
        "import os, sys; from manege.engine.threads import calm_threads; calm_threads();"
        "print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT'], os.environ['KMP_BLOCKTIME'])"
    )
    environment = {"PATH": "/usr/bin", "GOMP_SPINCOUNT": "5"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "False 5 0\n"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells what other processes use")
def test_a_busy_neighbour_takes_a_thread_away():
    cores = ThreadChoice(None).num_threads()
    if cores == 1:
        pytest.skip("one core: nothing to give up")
    choice = ThreadChoice(None)
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    time.sleep(2.5)
    busy = choice.num_threads()
    for neighbour in neighbours:
        neighbour.kill()
        neighbour.wait()
    assert busy < cores
