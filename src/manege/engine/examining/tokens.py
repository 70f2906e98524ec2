"""What a server can do that takes token ids: sample from them, tell the truth about it, pause, change its weights.

Its weights stay as they are. It is paused for a moment only where it says that it runs nothing, with everything kept.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

from manege.engine.base import Engine, Sampling, collect
from manege.engine.examining.identity import Identity
from manege.engine.examining.peek import ANSWER_S, Finding, Peek
from manege.engine.proof import tells_tempered_logprobs
from manege.engine.sglang import SglangEngine
from manege.engine.upstream import UpstreamEngine
from manege.errors import EngineError, ManegeError
from manege.types import JsonObject

__all__ = ["TEXT", "examine_tokenizer", "examine_tokens", "examine_weights"]

_DEV_MODE = "VLLM_SERVER_DEV_MODE=1 in its environment"
_PROCESSED = "--logprobs-mode processed_logprobs"
TEXT = "Grüße, 你好: def f(x):\n    return x  # 3.14"


async def examine_tokens(peek: Peek, server: Identity) -> AsyncIterator[Finding]:
    """Whether answers can be had from token ids, and be learnt from. The last finding decides."""
    if server.wire == "vllm" and (await peek.ask("GET", "/is_paused")).get("is_paused"):
        yield Finding(False, "it is paused, and is left so: nothing can be sampled before POST /resume")
        return
    if server.kind == "vllm":
        yield await _token_route(peek)
    if server.kind == "sglang":
        for finding in _settings(server.info):
            yield finding
    engine = SglangEngine(peek.url) if server.wire == "sglang" else UpstreamEngine(peek.url)
    try:
        async with asyncio.timeout(ANSWER_S):
            answer = await collect(engine.generate([0, 1, 2], Sampling(max_new_tokens=8)))
        told = f"{len(answer.ids_R)} sampled"
        yield Finding(True, f"token ids in, token ids and log-probabilities out ({told})")
        async with asyncio.timeout(ANSWER_S):
            is_tempered = await tells_tempered_logprobs(engine)
        option = "unset SGLANG_RETURN_ORIGINAL_LOGPROB" if server.wire == "sglang" else _PROCESSED
        if is_tempered is None:
            yield Finding(None, "log-probabilities at temperature 0.6: the model never hesitates, so it shows nothing")
        else:
            what = "those of softmax(logits / T)" if is_tempered else "not those of softmax(logits / T)"
            yield Finding(is_tempered, f"log-probabilities at temperature 0.6: {what}", "" if is_tempered else option)
    except TimeoutError:
        yield Finding(False, f"no answer from token ids within {ANSWER_S:g} s; is it paused?")
    except ManegeError as error:
        yield Finding(False, f"no answer from token ids: {error}")
    finally:
        await engine.close()


async def examine_weights(peek: Peek, server: Identity) -> AsyncIterator[Finding]:
    """Whether it can be given new weights while agents run."""
    sglang = server.wire == "sglang"
    told = (
        server.info.get("weight_version") if sglang else (await peek.ask("GET", "/weight_info")).get("weight_version")
    )
    yield Finding(told is not None, f"the version of its weights: {told!r}" if told is not None else "no version told")
    yield await _pause(peek, server)
    route = "/update_weights_from_disk" if sglang else "/collective_rpc"
    can_reload = await peek.has(route)
    text = f"new weights from a folder, by {route}" + (" (not tried)" if can_reload else ": it has no such route")
    yield Finding(can_reload, text, "" if can_reload or sglang else _DEV_MODE)
    sleeps = await peek.has("/release_memory_occupation" if sglang else "/sleep")
    if sglang:
        sleeps &= bool(server.info.get("enable_memory_saver"))
    option = "--enable-memory-saver" if sglang else "--enable-sleep-mode"
    yield Finding(None, f"sleep, to share its GPU with a trainer: {'a route for it' if sleeps else f'no ({option})'}")


async def examine_tokenizer(peek: Peek, server: Identity, expected: list[int]) -> Finding:
    """Whether its tokens are those of the model folder; `expected`: of `TEXT`."""
    if server.wire == "sglang":
        reply = await peek.ask("POST", "/tokenize", {"prompt": TEXT, "add_special_tokens": False})
        ids = reply.get("tokens")
    else:
        body = {"model": server.model, "prompt": TEXT, "max_tokens": 1, "return_token_ids": True}
        reply = await peek.ask("POST", "/v1/completions", {**body, "add_special_tokens": False})
        choices = reply.get("choices") or [{}]
        ids = choices[0].get("prompt_token_ids") or reply.get("prompt_token_ids")
    if not isinstance(ids, list):
        return Finding(None, f"its tokenizer cannot be compared with the model folder's: it answered {reply}")
    same = ids == expected
    return Finding(same, f"its tokens are {'' if same else 'NOT '}those of the model folder")


def _settings(info: JsonObject) -> Iterator[Finding]:
    """What SGLang was started with, as far as our client needs it."""
    if not info.get("incremental_streaming_output"):
        text = "each event repeats the answer so far, so that long answers cost their square"
        yield Finding(None, text, "--incremental-streaming-output")
    if (backend := info.get("grammar_backend")) != "llguidance":
        text = f"grammar backend {backend}: JSON schemas only; calls of tools are not constrained"
        yield Finding(None, text, "--grammar-backend llguidance")
    if not info.get("enable_deterministic_inference"):
        yield Finding(None, "seeds are ignored (--enable-deterministic-inference is slower)")


async def _token_route(peek: Peek) -> Finding:
    body = {"token_ids": [0], "sampling_params": {"max_tokens": 1}}
    reply = await peek.ask("POST", "/inference/v1/generate", body)
    if reply.status == 200:
        return Finding(True, "/inference/v1/generate, whose answers say which weights sampled what")
    text = f"/inference/v1/generate answered {reply}; /v1/completions is used, which does not say which weights sampled"
    return Finding(None, text, "--enable-scale-out")


async def _pause(peek: Peek, server: Identity) -> Finding:
    if server.wire == "vllm" and not await peek.has("/pause"):
        return Finding(False, "pause: it has no such route", _DEV_MODE)
    if (num_running := await _num_running(peek, server)) != 0:
        known = "unknown whether it runs anything" if num_running is None else f"{num_running:g} requests run"
        return Finding(None, f"pause: a route for it; not tried, since {known}")
    engine: Engine = SglangEngine(peek.url) if server.wire == "sglang" else UpstreamEngine(peek.url)
    try:
        async with asyncio.timeout(ANSWER_S):
            try:
                await engine.pause(keep=True)
            finally:
                await engine.resume()
    except (TimeoutError, EngineError) as error:
        return Finding(False, f"pause: {error or 'no answer'}", "" if server.wire == "sglang" else _DEV_MODE)
    finally:
        await engine.close()
    return Finding(True, "pause and resume (tried for a moment, with everything kept)")


async def _num_running(peek: Peek, server: Identity) -> float | None:
    if server.wire == "vllm":
        return await peek.metric("vllm:num_requests_running")
    loads = (await peek.ask("GET", "/v1/loads?include=core")).get("loads")
    if not isinstance(loads, list):
        return None
    return sum(load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0) for load in loads)
