"""The agents' routes: every protocol, each by the key alone (`/v1/...`) and by the long path of Agent Lightning."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from manege.errors import ManegeError, NotFoundError
from manege.gateway.declare import answers
from manege.gateway.inference import ModelCalls, TokenCounts, error_response
from manege.gateway.services import Services
from manege.http import answer
from manege.protocols.anthropic import AnthropicMessages
from manege.protocols.base import ServedModel, WireProtocol
from manege.protocols.chat import ChatCompletions
from manege.protocols.completions import Completions
from manege.protocols.gemini import Gemini
from manege.protocols.responses import Responses

__all__ = ["agent_routes"]

_PREFIX = "/proxy/rollout/{rollout_id}/attempt/{attempt}/mode/{mode}"


def agent_routes(services: Services) -> list[Route]:
    """All of them need an agent's key, or the operator's and the long path."""
    chat, anthropic, gemini = ChatCompletions(), AnthropicMessages(), Gemini()
    openai = {
        "/v1/chat/completions": ModelCalls(services, chat),
        "/v1/completions": ModelCalls(services, Completions()),
        "/v1/responses": ModelCalls(services, Responses()),
    }
    messages = {
        "/v1/messages": ModelCalls(services, anthropic),
        "/v1/messages/count_tokens": TokenCounts(services, anthropic),
    }
    # Google's clients say v1beta or v1.
    generate = dict.fromkeys(("/v1beta/models/{action:path}", "/v1/models/{action:path}"), _GeminiActions(services))
    routes: list[Route] = []
    for openai_at, anthropic_at, gemini_at in (
        ("", "", ""),
        (_PREFIX + "/openai", _PREFIX + "/anthropic", _PREFIX + "/gemini"),
    ):
        for at, endpoints in ((openai_at, openai), (anthropic_at, messages), (gemini_at, generate)):
            routes += [Route(at + path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
        lists: dict[str, WireProtocol | None] = {openai_at + "/v1": chat, anthropic_at + "/v1": anthropic}
        lists |= {gemini_at + "/v1": gemini if gemini_at else None, gemini_at + "/v1beta": gemini}
        for at, protocol in lists.items():
            routes.append(Route(f"{at}/models", _models(services, protocol), methods=["GET"]))
            routes.append(Route(f"{at}/models/{{model:path}}", _models(services, protocol), methods=["GET"]))
        routes.append(Route(openai_at + "/v1/responses", _no_websocket, methods=["GET"]))
    return routes


class _GeminiActions:
    """`models/<model>:<action>`: the action is a part of the path."""

    def __init__(self, services: Services) -> None:
        whole = Gemini()
        self._whole = whole
        self._actions: dict[str, ASGIApp] = {
            "generateContent": ModelCalls(services, whole),
            "countTokens": TokenCounts(services, whole),
        }
        self._streams = {kind: ModelCalls(services, Gemini(stream=kind)) for kind in ("sse", "array")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        action = request.path_params["action"].rpartition(":")[2]
        if action == "streamGenerateContent":
            app = self._streams["sse" if request.query_params.get("alt") == "sse" else "array"]
        else:
            app = self._actions.get(action)
        if app is None:
            known = ", ".join([*self._actions, "streamGenerateContent"])
            error = NotFoundError(f"the action {action!r} of a model is not one of {known}")
            app = error_response(self._whole, error)
        await app(scope, receive, send)


def _models(services: Services, protocol: WireProtocol | None) -> Callable[[Request], Awaitable[Response]]:
    """The one model that is served, under any name. None: the caller's headers say which protocol it speaks."""
    chat = ChatCompletions()
    by_header: dict[str, WireProtocol] = {"anthropic-version": AnthropicMessages(), "x-goog-api-client": Gemini()}

    async def models(request: Request) -> Response:
        """The one model that is served."""
        told = (known for header, known in by_header.items() if header in request.headers)
        spoken = protocol or next(told, chat)
        try:
            await services.auth.authorise_agent(request)
        except ManegeError as error:
            return error_response(spoken, error)
        name = request.path_params.get("model")
        served = ServedModel(id=name or services.model_name, context_limit=services.context_limit)
        return answer(spoken.model(served) if name else spoken.models([served]))

    return models


@answers(426, "text/plain")
async def _no_websocket(_request: Request) -> Response:
    """Codex tries a WebSocket first and falls back to HTTP at once when it is told so."""
    return PlainTextResponse("WebSockets are not served here; use POST with server-sent events", 426)
