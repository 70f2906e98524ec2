"""SGLang's native HTTP interface over an engine of ours, as the source of SGLang 0.5.23 has it.

What a client could trip over is kept: events that repeat the answer so far or, incremental, do not (and then repeat the
last id of a request that is aborted before it ran), `top_k` -1 for off, a context that keeps 5 tokens back, `/health`
that samples a token and so never answers in a pause, versions that are text and `default` at first, a cache that cannot
be flushed under answers that were kept, a refusal in an answer's last event.

`python -m tests.sglang_wire FOLDER [PORT]` serves a model folder.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from manege.engine.base import Chunk, Constraint, Engine, Sampling, Weights
from manege.engine.constraints import json_constraint
from manege.engine.under_way import UnderWay
from manege.errors import ProtocolError
from manege.types import FinishReason, PolicyVersion

KEPT_BACK = 6
"""Of the context: one for the longest request, five for the longest prompt."""


@dataclass(slots=True)
class Answer:
    """What an answer has, as `meta_info` says it."""

    num_prompt: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[list[object]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    num_cached: int = 0

    def add(self, chunk: Chunk) -> None:
        self.ids += chunk.ids
        self.logprobs += [[logprob, token, None] for logprob, token in zip(chunk.logprobs, chunk.ids, strict=True)]
        self.versions += [str(chunk.version) if chunk.version else "default"] * len(chunk.ids)
        self.num_cached += chunk.num_cached

    def spans(self) -> list[dict[str, object]]:
        spans: list[dict[str, object]] = []
        for index, version in enumerate(self.versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": index, "end": index})
            spans[-1]["end"] = index + 1
        return spans


class SglangServer:
    """`engine`: what samples; the other options are the server's own."""

    def __init__(
        self,
        engine: Engine,
        *,
        decode: Callable[[Sequence[int]], str],
        context_limit: int,
        incremental: bool = False,
        grammar_backend: str = "llguidance",
        deterministic: bool = True,
        tool_call_parser: str | None = None,
    ) -> None:
        self.engine, self.under_way = engine, UnderWay(engine)
        self.decode, self.context_limit = decode, context_limit
        self.incremental, self.grammar_backend, self.deterministic = incremental, grammar_backend, deterministic
        self.tool_call_parser = tool_call_parser
        self.weight_version = "default"
        self.model_path = "model"
        self.num_running = 0
        self.pause_mode: str | None = None
        self.bodies: list[dict[str, object]] = []
        posts = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.update_weights,
        }
        gets = {
            "/health": self.health,
            "/model_info": self.model_info,
            "/server_info": self.server_info,
            "/v1/loads": self.loads,
            "/v1/models": self.models,
        }
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, handler, methods=["GET"]) for path, handler in gets.items()]
        # Each of these acts on GET as well as on POST.
        both = {"/flush_cache": self.flush_cache, "/release_memory_occupation": self.release_memory}
        routes += [Route(path, handler, methods=["GET", "POST"]) for path, handler in both.items()]
        self.app = Starlette(routes=routes)
        self.has_memory = True
        self.url = ""
        """Where it is served, if who serves it says so."""

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.bodies.append(body)
        if not (isinstance(ids := body.get("input_ids"), list) and all(isinstance(each, int) for each in ids)):
            return JSONResponse({"error": "input_ids must be a list of integers"}, 400)
        assert body["stream"], "this server streams only"
        return StreamingResponse(self._events(ids, body), media_type="text/event-stream")

    async def _events(self, ids: list[int], body: dict):
        answer = Answer(num_prompt=len(ids))
        try:
            sampling = self._sampling(ids, body["sampling_params"])
        except ValueError as error:
            failure = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
            yield event({"error": failure})
        else:
            self.num_running += 1
            try:
                async with aclosing(self.under_way.generate(ids, sampling)) as chunks:
                    async for chunk in chunks:
                        yield event(self._output(answer, chunk))
            except ProtocolError as error:
                reason = {"type": "abort", "status_code": 400, "err_type": "BadRequestError"}
                message = f"Failed to compile {'json' if 'json_schema' in body['sampling_params'] else 'ebnf'} grammar"
                yield event(self._meta(answer, [], {**reason, "message": f"{message}: {error}"}))
            finally:
                self.num_running -= 1
        yield b"data: [DONE]\n\n"

    def _output(self, answer: Answer, chunk: Chunk) -> dict[str, object]:
        num_before = len(answer.ids)
        answer.add(chunk)
        match chunk.finish_reason:
            case FinishReason.ABORT:
                reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                # As a request that waited in the queue is aborted.
                return self._meta(answer, answer.ids[-1:] if self.incremental else answer.ids, reason)
            case FinishReason.LENGTH:
                reason = {"type": "length", "length": len(answer.ids)}
            case FinishReason.STOP:
                reason = {"type": "stop", "matched": answer.ids[-1]}
            case None:
                reason = None
        output = self._meta(answer, answer.ids[num_before:] if self.incremental else answer.ids, reason)
        if self.incremental:
            output["meta_info"]["output_token_logprobs"] = answer.logprobs[num_before:]
        return output

    def _meta(self, answer: Answer, ids: list[int], reason: dict | None) -> dict:
        spans = answer.spans() if reason else []
        return {
            "text": self.decode(ids),
            "output_ids": ids,
            "meta_info": {
                "id": "id",
                "finish_reason": reason,
                "prompt_tokens": answer.num_prompt,
                "weight_version": answer.versions[-1] if answer.versions else self.weight_version,
                "num_retractions": 0,
                "input_token_logprobs": [],
                "output_token_logprobs": answer.logprobs,
                "output_token_logprobs_length": len(answer.logprobs),
                "reasoning_tokens": 0,
                "completion_tokens": len(answer.ids),
                "cached_tokens": answer.num_cached,
                **({"weight_versions": spans} if reason else {}),
            },
        }

    def _sampling(self, ids: list[int], params: dict) -> Sampling:
        if len(ids) >= self.context_limit:
            raise ValueError(f"The input ({len(ids)} tokens) is longer than the model's context length.")
        if (top_k := params.get("top_k", -1)) < 1 and top_k != -1:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
        if len(params.get("stop") or ()) > 32:
            raise ValueError(f"at most 32 stop strings are allowed, got {len(params['stop'])}")
        if len(ids) >= self.context_limit - KEPT_BACK:
            raise ValueError(f"Input length ({len(ids)} tokens) exceeds the maximum allowed length")
        constraint = None
        if schema := params.get("json_schema"):
            constraint = json_constraint(orjson.loads(schema))
        elif "ebnf" in params and params["ebnf"] is not None:
            assert self.grammar_backend == "llguidance", "only llguidance reads Lark"
            constraint = Constraint(grammar=params["ebnf"])
        return Sampling(
            temperature=params["temperature"],
            top_p=params["top_p"],
            top_k=max(top_k, 0),
            max_new_tokens=min(params["max_new_tokens"], self.context_limit - 2 - len(ids)),
            stop_ids=frozenset(params["stop_token_ids"]),
            stop_strings=params["stop"],
            seed=params.get("sampling_seed") if self.deterministic else None,
            constraint=constraint,
        )

    async def pause(self, request: Request) -> Response:
        match orjson.loads(await request.body()).get("mode", "abort"):
            case "abort":
                await self.under_way.abort()
                self.pause_mode = "abort"
            case "in_place" | "retract" as mode:
                await self.engine.pause(keep=mode == "in_place")
                self.pause_mode = mode
            case mode:
                return JSONResponse({"message": f"mode is {mode!r}"}, 400)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        assert isinstance(orjson.loads(await request.body()), dict)
        self.pause_mode = None
        await self.under_way.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        if not isinstance(path := body.get("model_path"), str):
            return JSONResponse({"object": "error", "message": "model_path: field required"}, 400)
        while self.num_running and self.pause_mode is None:
            await asyncio.sleep(0.01)
        version = body.get("weight_version")
        await self.engine.load(Weights(kind="folder", folder=path), PolicyVersion(int(version or 0)))
        self.model_path = path
        if body.get("flush_cache", True) and self.num_running and self.pause_mode == "in_place":
            message = (
                "Weights were updated, but the cache was not flushed because requests are still running or queued."
            )
            return JSONResponse({"success": False, "message": message, "num_paused_requests": 0}, 400)
        self.weight_version = version or self.weight_version
        return JSONResponse({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def health(self, request: Request) -> Response:
        for _ in range(20):
            await asyncio.sleep(1)
            if self.pause_mode is None:
                return Response()
        return Response(status_code=503)

    async def model_info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "model_path": self.model_path,
                "is_generation": True,
                "weight_version": self.weight_version,
                "tool_call_parser": self.tool_call_parser,
            }
        )

    async def server_info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "max_req_input_len": self.context_limit - KEPT_BACK,
                "max_total_num_tokens": 1 << 16,
                "incremental_streaming_output": self.incremental,
                "grammar_backend": self.grammar_backend,
                "enable_deterministic_inference": self.deterministic,
                "internal_states": [{}],
                "version": "0.5.23",
            }
        )

    async def loads(self, request: Request) -> Response:
        load = {"dp_rank": 0, "num_running_reqs": self.num_running, "num_waiting_reqs": 0, "token_usage": 0.25}
        return JSONResponse({"version": "0.5.23", "loads": [load]})

    async def models(self, request: Request) -> Response:
        model = {"id": self.model_path, "object": "model", "owned_by": "sglang", "max_model_len": self.context_limit}
        return JSONResponse({"object": "list", "data": [model]})

    async def flush_cache(self, request: Request) -> Response:
        return Response("Cache flushed.\n")

    async def release_memory(self, request: Request) -> Response:
        self.has_memory = False
        return Response()


def event(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def serve(path: str, port: int) -> None:
    """A model folder, until stopped."""
    from manege.cli.parts import local_engine
    from manege.config import EngineConfig, ModelConfig
    from manege.gateway.server import Server

    folder, engine = local_engine(ModelConfig(path=path, device="cpu"), EngineConfig(), seed=0)
    app = SglangServer(engine, decode=folder.tokenizer.decode, context_limit=folder.context_limit, incremental=True).app
    async with Server(app, port=port) as server:
        print(server.url, flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
