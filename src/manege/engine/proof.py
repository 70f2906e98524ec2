"""Proves that an engine elsewhere tells the log-probabilities of softmax(logits / T), not those of softmax(logits).

Two tokens a and b that may come at one place differ by (logits_a - logits_b) / T in their log-probabilities, whatever
the rest of the vocabulary does. So the same places are sampled at T = 1 and at T = 0.6, and the difference of two
tokens that were seen at both must have grown by 1 / 0.6; where it has not grown, the engine tells the untempered ones
(vLLM without `--logprobs-mode processed_logprobs`) or samples at another temperature than it is asked to. Places are
taken where the model hesitates between few tokens, along an answer of its own.

    at T = 1     a -0.5   b -1.5   difference 1.00
    at T = 0.6   a -0.2   b -1.9   difference 1.67   proven

`ProvenEngine` has an engine prove it before its first call at such a temperature. At temperature 1, and for greedy
answers, both are the same and nothing is to be proven.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from statistics import median
from typing import TypeAlias

from manege.engine.base import Chunk, Engine, EngineInfo, Sampling, Weights, collect
from manege.errors import EngineError
from manege.logs import get_logger, kv
from manege.types import PolicyVersion

__all__ = ["REMEDY", "TEMPERATURE", "ProvenEngine", "tells_tempered_logprobs"]

TEMPERATURE = 0.6
NUM_PATHS = 8
"""Answers along which places are looked for, one after the other."""
NUM_PATH = 48
"""Tokens of such an answer."""
NUM_PLACES = 4
NUM_SAMPLES = 8
"""At each place and temperature."""
HESITANT = math.log(0.05), math.log(0.85)
"""Between these, a model that gave its token this log-probability hesitates between few."""
LIKELY = math.log(0.5)
"""Best."""
MIN_DIFFERENCE = 0.5
"""Of two tokens at temperature 1; what lower precision adds is then far smaller than what is looked for."""
REMEDY = "start vLLM with --logprobs-mode processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB set"

_Seen: TypeAlias = Mapping[int, float]
"""Tokens at a place, and their log-probabilities."""

_log = get_logger("engine")


async def tells_tempered_logprobs(engine: Engine) -> bool | None:
    """None: it cannot be told, since nowhere were two tokens seen at both temperatures. Raises EngineError."""
    prompt = [0]
    for _ in range(NUM_PATHS):
        path = await collect(engine.generate(prompt, Sampling(max_new_tokens=NUM_PATH)))
        ids, logprobs = path.ids_R.tolist(), path.logprobs_R.tolist()
        hesitant = [place for place, logprob in enumerate(logprobs) if HESITANT[0] < logprob < HESITANT[1]]
        places = sorted(hesitant, key=lambda place: abs(logprobs[place] - LIKELY))[:NUM_PLACES]
        seen = await asyncio.gather(*(_both(engine, [*prompt, *ids[:place]]) for place in places))
        if growths := [growth for plain, tempered in seen if (growth := _growth(plain, tempered)) is not None]:
            # Halfway between none and what there must be.
            return median(growths) > (1 + 1 / TEMPERATURE) / 2
        if places and all(len(plain) == 1 for plain, _ in seen):
            # It hesitates by what it tells, and does not by what it samples: more of it would be the same.
            return None
    return None


async def _both(engine: Engine, prompt_ids: Sequence[int]) -> tuple[_Seen, _Seen]:
    plain, tempered = await asyncio.gather(_seen(engine, prompt_ids, 1.0), _seen(engine, prompt_ids, TEMPERATURE))
    return plain, tempered


def _growth(plain: _Seen, tempered: _Seen) -> float | None:
    """Of the difference of two tokens from one temperature to the other; None: no two were seen at both."""
    both = sorted(plain.keys() & tempered.keys(), key=plain.__getitem__)
    if not both or (difference := plain[both[-1]] - plain[both[0]]) < MIN_DIFFERENCE:
        return None
    return (tempered[both[-1]] - tempered[both[0]]) / difference


async def _seen(engine: Engine, prompt_ids: Sequence[int], temperature: float) -> _Seen:
    sampling = Sampling(temperature=temperature, max_new_tokens=1)
    answers = await asyncio.gather(*(collect(engine.generate(prompt_ids, sampling)) for _ in range(NUM_SAMPLES)))
    return {answer.ids_R.item(0): answer.logprobs_R.item(0) for answer in answers if len(answer.ids_R)}


class ProvenEngine:
    """See `engine.base.Engine`. Raises EngineError at the first step of an answer whose log-probabilities would be
    those of another temperature."""

    def __init__(self, engine: Engine, name: str) -> None:
        """`name`: its address, for messages."""
        self.capabilities = engine.capabilities
        self._engine, self._name = engine, name
        self._proving = asyncio.Lock()
        self._is_tempered: bool | None = None
        self._has_tried = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        if sampling.temperature not in (0.0, 1.0) and await self.prove() is False:
            raise EngineError(
                f"the engine at {self._name} does not tell the log-probabilities of temperature "
                f"{sampling.temperature:g}, with which it was asked to sample, and none can be learnt from: {REMEDY}; "
                "or sample at temperature 1"
            )
        async with aclosing(self._engine.generate(prompt_ids, sampling)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def prove(self) -> bool | None:
        """See `tells_tempered_logprobs`; asked once, and warned of where it cannot be told."""
        async with self._proving:
            if not self._has_tried:
                self._is_tempered = await tells_tempered_logprobs(self._engine)
                self._has_tried = True
                if self._is_tempered is None:
                    _log.warning(
                        kv("an engine could not be proven to tell log-probabilities at a temperature", url=self._name)
                    )
        return self._is_tempered

    async def pause(self, *, keep: bool = False) -> None:
        await self._engine.pause(keep=keep)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load(self, weights: Weights, version: PolicyVersion) -> None:
        await self._engine.load(weights, version)

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def close(self) -> None:
        await self._engine.close()
