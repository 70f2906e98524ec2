"""`python -m verl.trainer.main_ppo` as people start it, on this machine's CPU, with a model of a quarter of a million
parameters."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from manege.trainer.engines.verl.environment import ENVIRONMENT
from tests.system.test_training import descendants_of

ROOT = Path(__file__).parents[3]
TINY = ROOT / "tests" / "tiny"
GROUPS = SIZE = 8
HELDOUT = 8

ADDRESS = "127.0.0.7"
"""Of loopback, and nobody else's: Ray takes 127.0.0.1 for the machine's own."""
TRIES = 5
# verl asks for ten CPUs per rank: numbers in Ray's books, too.
RAY = [f"--node-ip-address={ADDRESS}", "--num-cpus=32", "--num-gpus=2", "--include-dashboard=false"]

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
    # Scores come from the run file's scorer.
    "reward.num_workers=0",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
]


def write_dataset(folder):
    """Tasks of a run file as verl's files, by the command that people use."""
    command = [sys.executable, "-m", "manege.verl.dataset", str(TINY / "run.toml"), str(folder)]
    overrides = ["tasks.num_train=512", f"tasks.num_heldout={HELDOUT}"]
    subprocess.run([*command, *overrides], check=True, cwd=ROOT, env=environment(), timeout=300)


def environment(**more):
    paths = [str(ROOT / "src"), str(TINY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "RAY_enable_worker_prestart": "0",
        **more,
    }


@contextmanager
def ray_started(folder):
    """Ray's own command, with two GPUs in its books. Its parts give up after 15 s: on a busy machine it takes tries."""
    with ExitStack() as stack:
        for number in range(TRIES):
            with socket.socket() as listening:
                listening.bind((ADDRESS, 0))
                port = listening.getsockname()[1]
            log = folder / f"ray{number}"
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *RAY]
            with log.open("w") as file:
                process = subprocess.Popen(
                    [*command, f"--port={port}"], env=environment(), stdout=file, stderr=subprocess.STDOUT
                )
            stack.enter_context(process)
            stack.callback(process.terminate)
            while process.poll() is None:
                if "Ray runtime started" in log.read_text():
                    yield f"{ADDRESS}:{port}"
                    return
                time.sleep(0.1)
        raise AssertionError(log.read_text()[-3000:])


class Trainings:
    """Starts verl's trainer in the Ray at `address`, with the data in a folder."""

    def __init__(self, address, data):
        self._address, self._data = address, data

    def run(self, folder, mode, *, timeout_s=1200, **settings):
        """To its end: rows of verl's file logger by step, and all that was printed."""
        with self._started(folder, mode, **settings) as process:
            code = process.wait(timeout_s)
        text = (folder / "log").read_text()
        assert code == 0, text[-6000:]
        return logged(folder), text

    def run_and_kill(self, folder, mode, *, step, timeout_s=1200, **settings):
        """Killed when the checkpoint of `step` is there."""
        latest = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
        deadline = time.monotonic() + timeout_s
        with self._started(folder, mode, **settings) as process:
            while not latest.exists() or latest.read_text() != str(step):
                assert process.poll() is None, (folder / "log").read_text()[-6000:]
                assert time.monotonic() < deadline
                time.sleep(0.1)
        # Its actors and agents notice by themselves.
        while descendants_of(folder):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    @contextmanager
    def _started(self, folder, mode, *, steps, run_file=TINY / "run.toml", more=()):
        """The process, killed at the end if it still runs."""
        metrics = {"VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
        command = [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            *SETTINGS,
            *(f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}={value}" for name, value in metrics.items()),
            f"data.train_files={self._data / 'train.parquet'}",
            f"data.val_files={self._data / 'val.parquet'}",
            f"trainer.v1.trainer_mode={mode}",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder / 'checkpoints'}",
            f"trainer.rollout_data_dir={folder / 'trained'}",
            f"+manege.run={run_file}",
            f"+manege.folder={folder / 'run'}",
            *more,
        ]
        variables = environment(RAY_ADDRESS=self._address, **metrics)
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT) as process,
        ):
            try:
                yield process
            finally:
                process.kill()


def logged(folder):
    """Rows of verl's file logger by step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["data"] for row in map(json.loads, lines)}


def trained_groups(folder, step):
    """Uids of the prompts of which a step had rows, beside verl's padding."""
    lines = (folder / "trained" / f"{step}.jsonl").read_text().splitlines()
    uids = {json.loads(line)["uid"].split("_")[0] for line in lines}
    return {uid for uid in uids if not uid.startswith("pad")}
