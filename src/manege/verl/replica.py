"""The rollout engine `manege` of verl's: `actor_rollout_ref.rollout.name=manege` needs no GPU and no vLLM.

A replica is one `Server`, an actor beside the ranks that it belongs to. The ranks reach it by its name: the first of
them sends the weights, once all have gathered them.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import os
from collections.abc import Iterable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from manege.errors import EngineError
from manege.verl.server import Server

__all__ = ["Replica", "ServerAdapter"]


class Replica(RolloutReplica):
    """One server; see `Server`."""

    async def launch_servers(self) -> None:
        """verl has started the ranks."""
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(Server)
            .options(
                name=_server_name(self.replica_rank),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                max_concurrency=self.max_concurrency,
            )
            .remote(self.model_config.path, self.config, seed=self.config.seed + self.replica_rank)
        )
        await server.clear_kv_cache.remote()  # started
        self.servers = [server]
        self._server_handle, self._server_address = server, _server_name(self.replica_rank)

    def rollout_worker_use_gpu(self) -> bool:
        """None has one."""
        return False


class ServerAdapter(BaseRollout):
    """A rank's side of it."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank < 0 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """See BaseRollout."""
        if self.is_leader_rank:
            await self._found().wake_up.remote(tags=tags)

    async def release(self) -> None:
        """See BaseRollout."""
        if self.is_leader_rank:
            await self._found().sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """See BaseRollout."""
        if wire_format != "named_tensors":
            raise EngineError(f"the rollout engine `manege` takes whole tensors, not {wire_format!r}")
        kept: dict[str, Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):  # all ranks: gathering takes all of them
            if self.is_leader_rank:
                kept[name] = tensor.detach().cpu().clone()
        if self.is_leader_rank:
            await self._found().update_weights.remote(kept, global_steps)

    def _found(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(_server_name(self.replica_rank))
        return self._server


def _server_name(replica_rank: int) -> str:
    return f"manege_server_{replica_rank}"
