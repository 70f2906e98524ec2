"""One handler for the model calls of all protocols: authorise, parse, continue, admit, generate, store, answer.

A call is durable before the agent gets its answer; whether it got it is noted afterwards, off its path. A client that
goes away while it waits or while tokens are sampled ends the generation, and nothing is stored; one that goes away
later leaves a call that is stored as not delivered. Errors are answered in the caller's protocol.
"""

from collections.abc import Awaitable, Callable

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from manege.engine.base import Generation, Sampling, collect
from manege.errors import ConflictError, EngineError, ManegeError, NotFoundError
from manege.gateway.admission import admit
from manege.gateway.auth import AgentIdentity
from manege.gateway.capture import answer_message, new_call, reply_to
from manege.gateway.continuation import Conversation, Prompt
from manege.gateway.services import Services
from manege.http import ClientGone, Connection, answer, read_object
from manege.logs import get_logger, kv
from manege.protocols.base import InvalidRequest, ModelRequest, WireProtocol
from manege.protocols.chat import ChatCompletions
from manege.protocols.completions import Completions
from manege.protocols.openai import error_body
from manege.rendering.base import Renderer
from manege.types import Call, Delivered, Event, FinishReason, JsonObject

__all__ = ["inference_routes"]

PREFIX = "/proxy/rollout/{rollout_id}/attempt/{attempt}/mode/{mode}/openai"

_log = get_logger("gateway")


def inference_routes(services: Services) -> list[Route]:
    """Model routes, each by the key alone (`/v1/...`) and by the long path of Agent Lightning."""
    endpoints = {
        "chat/completions": ModelCalls(services, ChatCompletions()),
        "completions": ModelCalls(services, Completions()),
    }
    routes: list[Route] = []
    for prefix in ("", PREFIX):
        routes += [Route(f"{prefix}/v1/{path}", endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
        routes.append(Route(f"{prefix}/v1/models", _models(services), methods=["GET"]))
    return routes


class ModelCalls:
    """A model call of an agent, recorded with its tokens before it is answered."""

    def __init__(self, services: Services, protocol: WireProtocol) -> None:
        self._services = services
        self._protocol = protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            identity = await self._services.auth.authorise_agent(request)
            model_request = self._protocol.parse(await read_object(request))
            async with Connection(receive) as connection:
                call, num_cached = await self._make_call(identity, model_request, connection)
                delivered = not connection.gone
                if delivered:
                    await self._respond(model_request, call, num_cached)(scope, receive, send)
        except (ClientGone, ClientDisconnect):
            _log.info(kv("the client went away before it was answered", path=request.url.path))
        except ManegeError as error:
            self._services.counters.add("manege_call_errors_total")
            await _error_response(self._protocol.error(error), error)(scope, receive, send)
        else:
            await self._note_delivery(call, delivered)

    async def _make_call(
        self, identity: AgentIdentity, request: ModelRequest, connection: Connection
    ) -> tuple[Call, int]:
        """A call that is stored, and how many of its prompt tokens were cached."""
        services = self._services
        created_s = services.clock()
        limits = await services.settings.sampling(identity.rollout.spec.run)
        conversation = await services.conversations.of(identity.rollout_id, identity.attempt)
        prompt = _prompt(request, conversation, services.renderer)
        admitted = admit(
            request.sampling,
            spec=identity.rollout.spec,
            limits=limits,
            num_prompt=len(prompt.ids),
            context_limit=services.context_limit,
            stop_ids=services.renderer.stop_ids,
        )
        generation = await self._generate(identity, prompt, admitted.sampling, connection)
        call = new_call(
            request,
            prompt,
            generation,
            answer_message(request, prompt, generation, services.renderer),
            identity=identity,
            protocol=self._protocol.name,
            admitted=admitted,
            created_s=created_s,
            ended_s=services.clock(),
        )
        await services.store.add_call(call)
        if request.prompt is None:
            conversation.add(call)
        self._count(call)
        return call, generation.num_cached

    async def _generate(
        self, identity: AgentIdentity, prompt: Prompt, sampling: Sampling, connection: Connection
    ) -> Generation:
        """Raises ClientGone, UnavailableError (held too long) or EngineError, which the rollout's log then tells."""
        services = self._services

        async def behind_gate() -> Generation:
            async with services.gate.enter():
                generation = await collect(services.engine.generate(prompt.ids.tolist(), sampling))
            if generation.finish_reason is FinishReason.ABORT:
                raise EngineError("the engine aborted the answer; see its log")
            return generation

        try:
            return await connection.run(behind_gate())
        except EngineError as error:
            event = Event(
                rollout_id=identity.rollout_id,
                attempt=identity.attempt,
                event_type="engine.error",
                data={"message": str(error)},
                timestamp_s=services.clock(),
            )
            await services.store.add_event(event)
            raise

    def _respond(self, request: ModelRequest, call: Call, num_cached: int) -> Response:
        services = self._services
        reply = reply_to(request, call, model=services.model_name, num_cached=num_cached, renderer=services.renderer)
        return answer(self._protocol.reply(reply), headers={"x-request-id": call.id})

    async def _note_delivery(self, call: Call, delivered: bool) -> None:
        """After the answer, so that the agent does not wait for it."""
        try:
            if not delivered:
                self._services.conversations.forget_call(call)
            await self._services.store.set_delivered(call.id, Delivered.YES if delivered else Delivered.NO)
        except NotFoundError as error:
            # The rollout was deleted between the answer and this note.
            _log.info(kv("delivery not noted", call_id=call.id, reason=error))

    def _count(self, call: Call) -> None:
        add = self._services.counters.add
        add("manege_calls_total")
        add("manege_prompt_tokens_total", len(call.prompt_ids_P))
        add("manege_sampled_tokens_total", len(call.response_ids_R))
        if call.parent is not None:
            add("manege_continued_calls_total")


def _models(services: Services) -> Callable[[Request], Awaitable[Response]]:
    async def models(request: Request) -> Response:
        """The one model that is served."""
        try:
            await services.auth.authorise_agent(request)
        except ManegeError as error:
            return _error_response(error_body(error), error)
        known = {"id": services.model_name, "max_model_len": services.context_limit}
        return answer({"object": "list", "data": [known | {"object": "model", "created": 0, "owned_by": "manege"}]})

    return models


def _prompt(request: ModelRequest, conversation: Conversation, renderer: Renderer) -> Prompt:
    if request.prompt is None:
        return conversation.prompt(request, renderer)
    ids = renderer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
    unknown = [token for token in ids if token >= renderer.vocab_size]
    if unknown:
        raise InvalidRequest(
            f"prompt holds token id {unknown[0]}, but the model's ids are below {renderer.vocab_size}", param="prompt"
        )
    return Prompt(ids=np.asarray(ids, np.int32), parent=None, new_messages=())


def _error_response(body: JsonObject, error: ManegeError) -> Response:
    # OpenAI's SDK would try a 409 again; an attempt that is over stays over.
    return answer(body, error.status, {"x-should-retry": "false"} if isinstance(error, ConflictError) else {})
