"""What goes wrong with ranks is one clear error, in time, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manege.errors import ConfigError, TrainerError
from tests.calls import merged, weighted
from tests.verl.worker.conftest import MODEL, run_config
from tests.verl.worker.test_parity import PPO

pytestmark = pytest.mark.verl

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": {"verl": {"engine": {"foo": 1}}}}, r"backend\.verl\.engine\.foo: verl's FSDPEngineConfig has no"),
        ({"backend": {"verl": {"engine": {"qat": {"bar": 1}}}}}, r"backend\.verl\.engine\.qat\.bar: verl's QAT"),
        ({"backend": {"verl": {"actor": {}}}}, r"backend\.verl\.actor: no section"),
        ({"backend": {"verl": {"model": 3}}}, r"backend\.verl\.model = 3"),
        ({"backend": {"verl": {"optimizer": {"lr_scheduler_type": "cosine"}}}}, r"train\.warmup_steps"),
        ({"backend": {"verl": {"engine": {"strategy": "fsdp"}}}}, r"backend\.strategy"),
        ({"frozen": ["embed"]}, r"train\.frozen"),
        ({"lora_rank": 4}, r"train\.lora_rank"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_their_name(start_ranks, settings, message):
    from manege.trainer.engines.verl.settings import worker_config

    with pytest.raises(ConfigError, match=message):
        worker_config(run_config("runs", **settings), MODEL, cpu=True)


def test_keys_of_verls_win_over_ours(start_ranks):
    from manege.trainer.engines.verl.settings import worker_config

    verl = {
        "engine": {"use_torch_compile": True, "qat": {"group_size": 32}},
        "optimizer": {"lr": 0.5},
        "model": {"override_config": {"attn_implementation": "eager"}},
    }
    found = worker_config(run_config("runs", backend={"verl": verl}), MODEL, cpu=True)
    assert found.engine_config.use_torch_compile
    assert found.engine_config.qat.group_size == 32
    assert found.optimizer_config.lr == 0.5
    assert found.model_config.hf_config._attn_implementation == "eager"


def test_more_ranks_than_gpus_are_refused_before_anything_waits(start_ranks):
    from manege.trainer.engines.verl.cluster import places

    started = time.monotonic()
    for settings in ({"ranks_per_node": 40}, {"nodes": 2}):
        with pytest.raises(TrainerError, match="GPUs"), places(run_config("runs", backend=settings).backend):
            pass
    assert time.monotonic() - started < 20


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, pids))


def test_a_killed_rank_and_a_hung_one_end_the_group(start_ranks):
    from manege.trainer.engines.verl.ranks import Ranks

    batch = weighted("rollout_mean", merged)
    group = start_ranks(2)
    engine = group.engine()
    pids = [place.pid for place in group.ranks.places]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(TrainerError, match=r"rank 1 \(.*\) of 2 died.*--resume"):
        engine.step(batch, PPO)
    with pytest.raises(TrainerError, match=r"rank 1 \(.*\) of 2 died"):
        engine.publish()
    wait_until_gone(pids)

    group = start_ranks(2)
    group.ranks = Ranks(group.ranks.workers, timeout_s=15, are_here=True)
    engine = group.engine()
    pids = [place.pid for place in group.ranks.places]
    os.kill(pids[0], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TrainerError, match=r"`step` took longer than backend.timeout_s = 15 s"):
        engine.step(batch, PPO)
    assert time.monotonic() - started < 40
    wait_until_gone(pids)


@pytest.mark.timeout(600)
def test_a_lost_machine_ends_the_group(tmp_path):
    """Two machines of a cluster that runs already: Ray's own processes, on loopback."""
    program = Path(__file__).with_name("lost_machine.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 1 (127.0.0.3) of 2 died in `step`" in done.stdout
    assert "--resume" in done.stdout
