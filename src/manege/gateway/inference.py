"""One handler for the model calls of all protocols: authorise, parse, filter, answer whole or streamed.

What is answered is made in `answering.py`, in a flight (`flights.py`) that outlives a client for a moment. A call is
durable before the agent gets the end of its answer; whether it got it is noted afterwards, off its path. Errors are
answered in the caller's protocol; once a stream has begun, inside the stream.
"""

import asyncio
import functools
from collections.abc import Mapping
from contextlib import aclosing

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manege.errors import ConflictError, ManegeError, NotFoundError, StoreError
from manege.gateway.answering import Answering
from manege.gateway.auth import AgentIdentity
from manege.gateway.flights import Flight
from manege.gateway.hold import HOLD_S
from manege.gateway.plain_answering import PlainAnswering, is_plain
from manege.gateway.services import Services
from manege.gateway.token_source import prompt_of
from manege.harnesses.traffic import Traffic, read_traffic, recognise
from manege.http import ClientGone, Connection, answer, read_object
from manege.logs import get_logger, kv
from manege.protocols.base import ModelReply, ModelRequest, WireProtocol
from manege.types import Delivered

__all__ = ["ModelCalls", "TokenCounts", "error_response"]

SILENCE_S = 10.0
"""A stream is opened when nothing was sampled for so long, and never stays silent for longer."""
# The second tells proxies of nginx's kind not to collect the answer.
_STREAMED = {"cache-control": "no-cache", "x-accel-buffering": "no"}

_log = get_logger("gateway")


class ModelCalls:
    """A model call of an agent, recorded with its tokens before it is answered: an ASGI endpoint."""

    def __init__(self, services: Services, protocol: WireProtocol) -> None:
        self._services = services
        self._protocol = protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            identity = await self._services.auth.authorise_agent(request)
            answering = await self._answering(request, identity)
            await self._serve(answering, receive, send)
        except ClientDisconnect:
            _log.info(kv("the client went away before its request was read", path=request.url.path))
        except ManegeError as error:
            self._services.counters.add("manege_call_errors_total")
            await error_response(self._protocol, error)(scope, receive, send)

    async def _answering(self, request: Request, identity: AgentIdentity) -> Answering:
        services = self._services
        model_request = self._protocol.parse(await read_object(request, services.max_body_bytes))
        traffic = await read_agent_traffic(services, request, identity, model_request)
        kind = PlainAnswering if is_plain(services, self._protocol.name, traffic.request) else Answering
        return kind(
            services=services,
            identity=identity,
            protocol=self._protocol.name,
            request=traffic.request,
            thread=traffic.thread,
            edits=traffic.edits,
            headers=request.headers.items,
            hold_s=None if model_request.stream else _hold_s(request),
        )

    async def _serve(self, answering: Answering, receive: Receive, send: Send) -> None:
        flights = self._services.flights
        flight = flights.join(answering.key, answering)
        async with Connection(receive) as connection:
            try:
                delivered = await self._answer(answering, flight, connection, send)
            except ClientGone:
                delivered = False
            except ManegeError:
                flights.leave(flight)
                raise
            except BaseException:
                flights.abandon(flight, functools.partial(self._lost, answering))
                raise
        if delivered:
            flights.leave(flight)
            await self._note(flight, Delivered.YES)
        else:
            flights.abandon(flight, functools.partial(self._lost, answering))

    async def _answer(self, answering: Answering, flight: Flight, connection: Connection, send: Send) -> bool:
        """Whether the client got all of it. Raises ClientGone, and ManegeError while nothing was sent."""
        if not answering.request.stream:
            # Shielded: a client that goes away does not end the answer, `Flights.abandon` does.
            reply = await connection.run(_result(flight))
            body = reply if isinstance(reply, bytes) else orjson.dumps(self._protocol.reply(answering.request, reply))
            delivered = not connection.gone
            told = {"content-type": "application/json", "content-length": str(len(body))}
            await _send_start(send, {**told, "x-request-id": flight.calls[0].id})
            await _send_part(send, body, more=False)
            return delivered
        await connection.run(flight.admitted())
        if not self._services.gate.paused:
            await connection.run(flight.started(SILENCE_S))
        if flight.task.done():
            # An error that came before anything was sent is answered with its own status.
            flight.task.result()
        return await connection.run(self._stream(answering, flight, connection, send))

    async def _stream(self, answering: Answering, flight: Flight, connection: Connection, send: Send) -> bool:
        """Deltas as they come, heartbeats in between, then the end or the error."""
        assert flight.head is not None
        stream = self._protocol.stream(answering.request, flight.head)
        await _send_start(send, {**_STREAMED, "content-type": stream.media_type, "x-request-id": flight.head.id})
        await _send_part(send, stream.start())
        async with aclosing(flight.follow(SILENCE_S)) as items:
            async for item in items:
                await _send_part(send, stream.heartbeat() if item is None else stream.delta(*item))
        try:
            reply = flight.task.result()
            assert not isinstance(reply, bytes)  # A plain call is never streamed.
            end = stream.finish(reply)
        except ManegeError as error:
            self._services.counters.add("manege_call_errors_total")
            end = stream.error(error)
        delivered = not connection.gone
        await _send_part(send, end, more=False)
        return delivered

    async def _lost(self, answering: Answering, flight: Flight) -> None:
        """The client went away and nobody took over."""
        await self._note(flight, Delivered.NO)
        if not flight.calls:
            await answering.note_lost()

    async def _note(self, flight: Flight, delivered: Delivered) -> None:
        """After the answer, so that the agent does not wait for it."""
        for call in flight.calls:
            try:
                if delivered is Delivered.NO:
                    self._services.conversations.forget_call(call)
                    self._services.prefixes.forget_call(call)
                await self._services.store.set_delivered(call.id, delivered)
            except (NotFoundError, StoreError) as error:
                # The rollout was deleted between the answer and this note, or the disk is full: it stays unknown.
                _log.info(kv("delivery not noted", call_id=call.id, reason=error))


class TokenCounts:
    """How many tokens a request would be: an ASGI endpoint of the protocols that have one."""

    def __init__(self, services: Services, protocol: WireProtocol) -> None:
        self._services = services
        self._protocol = protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, request = self._services, Request(scope, receive)
        try:
            identity = await services.auth.authorise_agent(request)
            model_request = self._protocol.parse(await read_object(request, services.max_body_bytes))
            traffic = await read_agent_traffic(services, request, identity, model_request)
            conversation = await services.conversations.of(identity.rollout_id, identity.attempt)
            prompt = prompt_of(traffic.request, conversation, services.renderer)
            response = answer(self._protocol.token_count(len(prompt.ids)))
        except ManegeError as error:
            response = error_response(self._protocol, error)
        await response(scope, receive, send)


async def read_agent_traffic(
    services: Services, request: Request, identity: AgentIdentity, model_request: ModelRequest
) -> Traffic:
    """The request as the harness means it: filtered, and with the thread that it belongs to."""
    headers = dict(request.headers)
    setting = await services.settings.of(identity.rollout.spec.run)
    harness = setting.harness or recognise(headers)
    return read_traffic(harness, headers, model_request, with_optional=setting.common_prompts)


def error_response(protocol: WireProtocol, error: ManegeError) -> Response:
    """An error in the protocol's shape."""
    # OpenAI's SDK would try a 409 again; an attempt that is over stays over.
    headers = {"x-should-retry": "false"} if isinstance(error, ConflictError) else {}
    return answer(protocol.error(error), error.status, headers)


async def _result(flight: Flight) -> ModelReply | bytes:
    return await asyncio.shield(flight.task)


def _hold_s(request: Request) -> float:
    """How long a plain call may be held: less than its client waits, as far as SDKs say it in a header."""
    for name in ("x-stainless-read-timeout", "x-stainless-timeout"):
        try:
            return max(min(HOLD_S, float(request.headers[name]) - 10), 1.0)
        except (KeyError, ValueError):
            pass
    return HOLD_S


async def _send_start(send: Send, headers: Mapping[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})
