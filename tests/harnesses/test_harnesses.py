"""Every shipped harness, real and unmodified, does a coding task whose model is the scripted engine."""

import secrets

import numpy as np
import pytest

from manege.engine.scripted import ScriptedEngine
from manege.harnesses.harness import load, names
from manege.model.folder import open_folder
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.types import Outcome
from tests.harnesses.matrix import record
from tests.harnesses.policy import CONTEXT_LIMIT, MODEL, coding_reply
from tests.harnesses.running import run_harness
from tests.harnesses.table import ROWS

pytestmark = pytest.mark.anyio


def test_every_harness_is_a_row():
    assert sorted(ROWS) == sorted(names())


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, id=name, marks=() if row.in_ci else pytest.mark.harnesses) for name, row in ROWS.items()],
)
async def test_the_task_is_done_and_every_token_is_captured_once(name, tmp_path):
    row = ROWS[name]
    words = [f"secret-{''.join(secrets.choice('abcdefgh') for _ in range(12))}" for _ in range(3)]
    decode = open_folder(MODEL).tokenizer.decode
    engine = ScriptedEngine(
        coding_reply(row.shell), decode=lambda ids: decode(list(ids)), context_limit=CONTEXT_LIMIT, chunk_size=8
    )
    ran = await run_harness(name, engine, tmp_path, words=words)
    rollout, calls = ran.rollout, ran.calls
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), (rollout.message, rollout.evidence)
    main = [call for call in calls if call.thread == "main"]
    assert len(main) == 4
    assert {call.thread for call in calls} - {"main"} == row.side_threads
    samples, ledger = build_samples(build_forest(calls))
    assert (ledger.dead, ledger.excluded) == (0, 0)
    assert all(num_trained_in(samples, call) == 1 for call in calls)
    in_main = [sample for sample in samples if sample.call_ids[-1] in {call.id for call in main}]
    if row.one_sample:
        assert len(in_main) == 1
    else:
        assert "one per call" in load(name).samples
    assert ran.left == []
    record(load(name), calls=calls, samples=samples, seconds=ran.seconds)


def num_trained_in(samples, call):
    """In how many samples the call's sampled tokens are trained; they are trained all together or not at all."""
    where = slice(len(call.prompt_ids_P), len(call.prompt_ids_P) + len(call.response_ids_R))
    found = 0
    for sample in samples:
        if call.id in sample.call_ids:
            mask = sample.mask_T[where]
            assert mask.all() or not mask.any()
            assert np.array_equal(sample.ids_T[where], call.response_ids_R)
            found += int(mask.all())
    return found
