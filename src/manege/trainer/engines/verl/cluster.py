"""Ray, as a run uses it: started on this machine for the run, or a cluster that runs already.

A Ray of our own ends with this process, however that ends, listens on loopback, and lets in only who has the key of
`environment`. What a run needs is counted before anything is placed, so that nothing waits for a machine that will
never come.
"""

# pyright: reportMissingImports=false
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from manege.config import BackendConfig
from manege.errors import TrainerError
from manege.logs import get_logger, kv

__all__ = ["meeting_place", "places", "ray_session"]

_LOOPBACK = "127.0.0.2"
"""Ray takes 127.0.0.1 for a mistake, and listens on the machine's own address instead."""
_SYSTEM_CPUS = 1
"""For what is no rank."""
_TRIES = 3
"""Ray gives its processes half a minute, too little on a busy machine. Those of a try that failed end with this one."""
_REMOVE_S = 30
"""For places to be given back; a cluster gives them back by itself when the run has left it."""

_log = get_logger("trainer")


@contextmanager
def ray_session(backend: BackendConfig, environment: Mapping[str, str], *, cpu: bool) -> Iterator[None]:
    """Ray is there inside. `environment`: of every worker. Raises TrainerError for a cluster that cannot be reached."""
    options = {
        "namespace": "manege",
        "runtime_env": {"env_vars": dict(environment)},
        "log_to_driver": False,
        "logging_level": "error",
    }
    if backend.ray_address is None:
        options |= {
            "address": "local",
            "include_dashboard": False,
            "_node_ip_address": _LOOPBACK,
            "num_cpus": backend.num_ranks + _SYSTEM_CPUS,
        }
        if cpu:
            options["num_gpus"] = backend.num_ranks
    else:
        options["address"] = backend.ray_address
    _init(options, where=backend.ray_address or "on this machine")
    try:
        yield
    finally:
        ray.shutdown()


def _init(options: Mapping[str, Any], *, where: str) -> None:
    for tries_left in reversed(range(_TRIES)):
        try:
            ray.init(**options)
        except Exception as error:  # for a start that took too long Ray has no class
            ray.shutdown()
            if tries_left and type(error) is Exception:
                _log.warning(kv("Ray did not start in time; once more", reason=error))
                continue
            raise TrainerError(f"Ray {where} cannot be had: {error}; look at backend.ray_address") from error
        return


@contextmanager
def places(backend: BackendConfig) -> Iterator[Sequence[PlacementGroup]]:
    """A group per node, with a bundle of one GPU per rank. Raises TrainerError where the cluster has too few."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [node for node in nodes if node.get("GPU", 0) >= backend.ranks_per_node]
    if len(fitting) < backend.nodes:
        raise TrainerError(
            f"backend.nodes = {backend.nodes} and backend.ranks_per_node = {backend.ranks_per_node} need as many "
            f"machines with as many GPUs; Ray has {len(nodes)} with {_listed(nodes)}"
        )
    bundles = [{"GPU": 1, "CPU": 1}] * backend.ranks_per_node
    groups = [placement_group(bundles, strategy="STRICT_PACK") for _ in range(backend.nodes)]
    try:
        for group in groups:
            if not group.wait(timeout_seconds=min(60, backend.timeout_s)):
                raise TrainerError(
                    f"backend.nodes = {backend.nodes} machines with {backend.ranks_per_node} free GPUs and CPUs each: "
                    f"Ray has free {ray.available_resources().get('GPU', 0):.0f} GPUs and "
                    f"{ray.available_resources().get('CPU', 0):.0f} CPUs; is another run there?"
                )
        yield groups
    finally:
        removing = threading.Thread(target=_remove, args=(groups,), daemon=True)
        removing.start()
        removing.join(_REMOVE_S)


def _remove(groups: Sequence[PlacementGroup]) -> None:
    # The cluster may be what has failed: then this fails, or never returns.
    with suppress(Exception):
        for group in groups:
            remove_placement_group(group)


def meeting_place(group: PlacementGroup) -> tuple[str, str]:
    """Address and port on the group's machine, where its first rank lets the others find it. verl's own way is a
    process that imports all of verl."""
    there = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
    return ray.get(ray.remote(_free_port).options(scheduling_strategy=there).remote())


def _free_port() -> tuple[str, str]:
    with socket.socket() as listening:
        listening.bind(("", 0))
        return ray.util.get_node_ip_address(), str(listening.getsockname()[1])


def _listed(nodes: Sequence[Mapping[str, float]]) -> str:
    return ", ".join(f"{node.get('GPU', 0):.0f}" for node in nodes) + " GPUs"
