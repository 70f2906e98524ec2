"""`python -m verl.trainer.main_ppo` as people start it, on this machine's CPU, with a model of a quarter of a million
parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

from manege.trainer.engines.verl.environment import ENVIRONMENT

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "tiny"
GROUPS = SIZE = 8

SETTINGS = [
    f"data.train_batch_size={GROUPS}",
    "data.max_prompt_length=128",
    "data.max_response_length=128",
    "data.dataloader_num_workers=0",
    "data.filter_overlong_prompts=False",
    f"actor_rollout_ref.model.path={TINY / 'model'}",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    # verl computes in bfloat16 unless it is told: half a per cent of the gradient's norm.
    *(
        f"+actor_rollout_ref.actor.fsdp_config.mixed_precision.{name}_dtype=fp32"
        for name in ("param", "reduce", "buffer")
    ),
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.actor.optim.lr=5e-4",
    "actor_rollout_ref.actor.optim.weight_decay=0",
    "actor_rollout_ref.actor.policy_loss.loss_mode=manege",
    "actor_rollout_ref.rollout.name=manege",
    f"actor_rollout_ref.rollout.n={SIZE}",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=manege.verl.manager.AgentLoopManager",
    "algorithm.adv_estimator=manege",
    "+manege.agent.limits.run_s=300",
    "algorithm.rollout_correction.bypass_mode=True",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.logger=[console,file]",
    "trainer.val_before_train=False",
    "trainer.resume_mode=disable",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "ray_kwargs.ray_init.num_cpus=32",
    "+ray_kwargs.ray_init.num_gpus=1",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init._node_ip_address=127.0.0.2",
]


def dataset(run_file, folder):
    """Tasks of a run file as verl's files, by the command that people use."""
    command = [sys.executable, "-m", "manege.verl.dataset", str(run_file), str(folder), "tasks.num_train=512"]
    subprocess.run(command, check=True, cwd=ROOT, env=environment(folder), timeout=120)


def environment(folder):
    paths = [str(ROOT / "src"), str(TINY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "RAY_enable_worker_prestart": "0",
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
    }


def train(folder, mode, *, steps, run_file=TINY / "run.toml", more=(), timeout_s=900):
    """Rows of verl's file logger by step, and all that was printed."""
    dataset(run_file, folder)
    command = [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *SETTINGS,
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        f"trainer.v1.trainer_mode={mode}",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        f"+manege.run={run_file}",
        f"+manege.folder={folder / 'run'}",
        *more,
    ]
    log = folder / "log"
    with log.open("w") as file:
        ended = subprocess.run(
            command, cwd=folder, env=environment(folder), stdout=file, stderr=subprocess.STDOUT, timeout=timeout_s
        )
    text = log.read_text()
    assert ended.returncode == 0, text[-6000:]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["data"] for row in map(json.loads, lines)}, text
