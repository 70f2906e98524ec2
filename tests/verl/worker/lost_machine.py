"""A cluster of two machines of one GPU each, by Ray's own means; the second is killed, and a step is asked for. Prints
the error."""

import os
import secrets
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "GLOO_SOCKET_IFNAME": "lo"}
os.environ |= {"RAY_raylet_start_wait_time_s": "120"}

from manege.errors import TrainerError
from manege.trainer.engines.verl.environment import prepare
from tests.calls import merged, weighted
from tests.verl.worker.conftest import MODEL, run_config

MACHINE = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.2"}


def main(folder):
    environment = prepare(run_config(folder, backend={"ray_address": "given"}).backend, cpu=True)
    from ray.cluster_utils import Cluster

    from manege.trainer.engines.verl.cluster import ray_session
    from manege.trainer.engines.verl.engine import started_verl_engine
    from tests.verl.worker.test_parity import PPO

    cluster = Cluster(initialize_head=True, head_node_args=MACHINE)
    second = cluster.add_node(num_cpus=2, num_gpus=1, node_ip_address="127.0.0.3")
    config = run_config(folder, kl=0, backend={"ray_address": cluster.address, "nodes": 2, "timeout_s": 200})
    batch = weighted("rollout_mean", merged)
    try:
        with (
            ray_session(config.backend, environment, cpu=True),
            started_verl_engine(config, MODEL, environment, cpu=True) as engine,
        ):
            assert engine.step(batch, PPO).metrics["grad_norm"] > 0
            cluster.remove_node(second, allow_graceful=False)
            started = time.monotonic()
            try:
                engine.step(batch, PPO)
            except TrainerError as error:
                print(error, f"after {time.monotonic() - started:.1f} s")
            else:
                sys.exit("the step went through")
    finally:
        cluster.shutdown()


main(Path(sys.argv[1]))
