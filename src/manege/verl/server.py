"""The local engine as an inference server of verl's, for machines without a GPU: a Ray actor, called by verl's client.

It decodes while two doors are open. verl shuts one while it trains (`sleep`, `wake_up`), the other while it aborts what
is under way (`abort_all_requests`, `resume_generation`); a request that comes meanwhile waits, or is sent away where
verl says so. An answer that an abort cuts has the tokens that it had, and stop reason `aborted`.

verl's methods and their arguments: verl/workers/rollout/replica.py, and vLLM's server beside it.
"""
# pyright: reportMissingImports=false

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manege.config import EngineConfig
from manege.engine.base import Collector, Sampling, Weights
from manege.engine.local import LocalEngine
from manege.engine.under_way import UnderWay
from manege.errors import EngineError
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.types import FinishReason, PolicyVersion

__all__ = ["Server"]


class Server:
    """See the module; all methods run in the actor's event loop."""

    def __init__(self, path: str, config: Any, *, seed: int) -> None:
        """`config`: verl's RolloutConfig."""
        self._folder = open_folder(str(Path(path).expanduser()))
        self._model = load_model(self._folder)
        self._sleeps = bool(config.free_cache_engine)
        self._engine = LocalEngine(
            self._model,
            self._folder,
            config=EngineConfig(max_batch=config.max_num_seqs),
            seed=seed,
            max_context=config.max_model_len,
        )
        self._under_way = UnderWay(self._engine)
        self._asleep = self._shut = self._rejects = False
        self._changing = asyncio.Lock()
        self._version = PolicyVersion(0)

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str, **others: Any
    ) -> Any:
        """A verl TokenOutput."""
        from verl.workers.rollout.replica import TokenOutput

        if any(others.get(key) for key in ("image_data", "video_data", "audio_data")):
            raise EngineError("the rollout engine `manege` reads text only; use vllm for images, video and sound")
        answer, version = Collector(), self._version
        cut = self._shut and self._rejects
        if not cut:
            async with aclosing(self._under_way.generate(list(prompt_ids), self._sampling(sampling_params))) as chunks:
                async for chunk in chunks:
                    cut = chunk.finish_reason is FinishReason.ABORT
                    if not cut:
                        version = chunk.version
                        answer.add(chunk)
        generation = answer.generation(aborted=cut)
        return TokenOutput(
            token_ids=generation.ids_R.tolist(),
            log_probs=generation.logprobs_R.tolist(),
            stop_reason="aborted" if cut else "completed",
            extra_fields={"global_steps": int(version), "num_cached_tokens": generation.num_cached},
        )

    async def update_weights(self, weights: Mapping[str, Tensor], global_steps: int | None) -> None:
        """Whole tensors by their names in the model folder. Raises EngineError if one is missing."""
        async with self._changing:
            await self._engine.pause()
            self._copy(weights)
            if global_steps is not None:
                self._version = PolicyVersion(global_steps)
            await self._engine.load(Weights(kind="shared"), self._version)
            await self._go_on()

    async def sleep(self) -> None:
        """Nothing is decoded, and the cache is free, until `wake_up`."""
        async with self._changing:
            self._asleep = self._sleeps
            await self._engine.pause()
            await self._go_on()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """verl wakes the weights first, then the cache."""
        async with self._changing:
            self._asleep = self._asleep and tags is not None and "kv_cache" not in tags
            await self._go_on()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End what is under way; what comes waits until `resume_generation`, or is sent away."""
        async with self._changing:
            self._shut, self._rejects = True, reject_request
            await self._under_way.abort()

    async def resume_generation(self) -> None:
        """The reverse."""
        async with self._changing:
            self._shut = False
            await self._go_on()

    async def clear_kv_cache(self) -> None:
        """New weights clear it anyway."""

    async def release_kv_cache(self) -> None:
        """As `sleep`: weights stay."""
        await self.sleep()

    async def resume_kv_cache(self) -> None:
        """As `wake_up`."""
        await self.wake_up()

    async def start_profile(self, **_: Any) -> None:
        """No profiler."""

    async def stop_profile(self) -> None:
        """No profiler."""

    async def _go_on(self) -> None:
        if not (self._asleep or self._shut):
            await self._engine.resume()

    def _copy(self, weights: Mapping[str, Tensor]) -> None:
        parameters = dict(self._model.module.named_parameters())
        if missing := parameters.keys() - weights.keys():
            raise EngineError(f"verl's trainer sent {len(weights)} weights, but not {min(missing)}, of {len(missing)}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])

    def _sampling(self, params: Mapping[str, Any]) -> Sampling:
        limit = params.get("max_tokens") or params.get("max_new_tokens")
        return Sampling(
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=max(0, params.get("top_k", 0)),
            max_new_tokens=limit or self._model.context_limit,
            stop_ids=frozenset(params.get("stop_token_ids") or ()) | frozenset(self._folder.eos_ids),
            stop_strings=params.get("stop") or (),
            seed=params.get("seed"),
        )
