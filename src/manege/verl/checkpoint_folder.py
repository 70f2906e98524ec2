"""Weights from verl's trainer to rollout servers on other machines, through a folder that all of them see.

verl's own ways need GPUs or RDMA. This one is `checkpoint_engine.backend=manege_folder`, for `separate_async` with the
rollout engine `manege`. The first rank writes a file and renames it when it is whole; servers wait for it. verl calls
`prepare` everywhere and waits for all before it sends, so a file that is there then is of the update before.
"""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from manege.errors import ConfigError, TrainerError

__all__ = ["FolderCheckpointEngine"]

_NAME = "manege_folder"
_POLL_S = 0.05
_PATIENCE_S = 1800.0
"""A trainer that has not written its weights by then has died or hangs."""


@CheckpointEngineRegistry.register(_NAME)
class FolderCheckpointEngine(CheckpointEngine):
    """See the module, and CheckpointEngine for each method."""

    def __init__(self, bucket_size: int, is_master: bool = False, folder: str | None = None) -> None:
        """`folder`: from `checkpoint_engine.engine_kwargs.manege_folder.folder`."""
        if not folder:
            raise ConfigError(
                f"checkpoint_engine.backend={_NAME} needs a folder that trainer and rollout machines share; add "
                f"+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{_NAME}.folder=FOLDER"
            )
        self._path, self._is_master = Path(folder).absolute() / "weights.safetensors", is_master

    def prepare(self) -> dict[str, Any]:
        if self._is_master:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """None is needed."""

    def finalize(self) -> None:
        """The file stays for whoever looks."""

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        kept: dict[str, Tensor] = {}
        for name, tensor in weights:  # on all ranks: gathering takes all of them
            if self._is_master:
                kept[name] = tensor.detach().cpu().contiguous().clone()
        if self._is_master:
            unfinished = self._path.with_suffix(".unfinished")
            save_file(kept, unfinished)
            unfinished.rename(self._path)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        end = time.monotonic() + _PATIENCE_S
        while not self._path.exists():
            if time.monotonic() > end:
                raise TrainerError(f"no {self._path} after {_PATIENCE_S:g} s; is the folder shared by all machines?")
            await asyncio.sleep(_POLL_S)
        with safe_open(self._path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                yield name, file.get_tensor(name)
