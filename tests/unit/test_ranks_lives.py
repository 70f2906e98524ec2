"""Ranks of their own lives: how they begin, serve, and end, also when they die or hang."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from manege.cli.parts import served
from manege.config import CreditConfig, EngineConfig
from manege.engine.base import Sampling, collect
from manege.errors import TrainerError
from manege.trainer.objective import objective_of
from manege.types import PolicyVersion, VersionSpan
from tests.calls import HEAD, linear_rollout, merged, split, weighted
from tests.rank_runs import FOLDER, config_of, started

OBJECTIVE = objective_of(CreditConfig(clip_high=0.28))


def steps(engine, batch, number):
    for _ in range(number):
        engine.step(batch, OBJECTIVE)


def test_a_rank_that_dies_in_a_step_ends_them_all(tmp_path):
    rollouts = [(1.0 - 2 * (i % 2), linear_rollout(f"r{i}", [([10 + i] * 100, [20] * 100)])) for i in range(24)]
    batch = weighted("rollout_mean", merged, rollouts)
    with started(tmp_path, config_of(2)) as (ranks, engine, *_):
        [process] = ranks.processes
        # Both ranks are at work on shares that take seconds.
        killing = threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL))
        killing.start()
        began_s = time.monotonic()
        with pytest.raises(TrainerError, match=r"rank 1 ended with exit code -9; .*--resume"):
            steps(engine, batch, 50)
        assert time.monotonic() - began_s < 60
        with pytest.raises(TrainerError, match="exit code -9"):
            engine.logprobs([batch[0].sample])


def test_a_rank_that_hangs_ends_them_all_in_time(tmp_path):
    batch = weighted("rollout_mean", merged)
    with started(tmp_path, config_of(3, timeout_s=6)) as (ranks, engine, *_):
        engine.step(batch, OBJECTIVE)
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(TrainerError, match=r"rank 2 hangs: .*backend\.timeout_s"):
            engine.step(batch, OBJECTIVE)
        assert time.monotonic() - began_s < 60
        assert all(process.end for process in ranks.processes)


def test_a_rank_that_cannot_begin_says_why(tmp_path):
    config = config_of(2, model=tmp_path / "nowhere")
    with pytest.raises(TrainerError, match=r"rank 1 could not begin: .*nowhere"), started(tmp_path, config):
        pass


@pytest.mark.anyio
async def test_every_rank_serves_the_weights_that_it_trains(tmp_path):
    """Greedy answers are those of the present weights, at every rank, under the version that was given."""
    sampling = Sampling(temperature=0, max_new_tokens=8)
    config = config_of(2, learning_rate=0.05)
    with started(tmp_path, config, serves=True) as (_, engine, model, others):
        local = served(model, FOLDER, config.model, EngineConfig(), seed=0)
        engines = [local, *others.values()]
        try:
            found = []
            for version in (1, 2):
                for each in engines:
                    await each.pause()
                engine.step(weighted("rollout_mean", split), OBJECTIVE)
                for each in engines:
                    await each.load(engine.publish(), PolicyVersion(version))
                    await each.resume()
                first, second = [await collect(each.generate(HEAD, sampling)) for each in engines]
                assert np.array_equal(first.ids_R, second.ids_R)
                assert first.logprobs_R == pytest.approx(second.logprobs_R, abs=1e-5)
                assert first.spans == second.spans == [VersionSpan(first_token=0, version=PolicyVersion(version))]
                found.append(second.logprobs_R)
            assert abs(found[0] - found[1]).max() > 1e-3
        finally:
            for each in engines:
                await each.close()
