"""The gateway inside a sandbox: a listening socket there, which the gateway of this machine answers, or a relay.

In: an attempt's claim and the socket on which its agent finds the gateway, at AGENT_URL. The socket is handed to the
gateway through its door (`gateway/handed.py`), and again whenever who took it has ended; what the agent sends
meanwhile waits in the socket, since a copy of it stays here. A gateway whose door cannot be reached from here is on
another machine, or in another container: then its answers are relayed (`relay.py`). Either way the agent needs no key:
what comes from its socket counts as sent with the attempt's.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from manege.client import Claim, Client
from manege.controller.relay import relay
from manege.errors import StoreError, UnauthorizedError, UnavailableError
from manege.logs import get_logger, kv

__all__ = ["AGENT_PORT", "AGENT_URL", "answering"]

AGENT_PORT = 8400
AGENT_URL = f"http://127.0.0.1:{AGENT_PORT}"
"""Where an agent with a network of its own finds the gateway."""

_OK = b"ok"
_MAX_ANSWER_BYTES = 4096
_RETRY_S = 1.0
"""After a gateway that cannot be reached, beyond what the client tries."""

_log = get_logger("controller")


@asynccontextmanager
async def answering(client: Client, claim: Claim) -> AsyncIterator[Callable[[socket.socket], None]]:
    """While the context lasts, the gateway answers on the listening socket that is given to the callback, at most once,
    as if all that is sent there had the attempt's key. Raises ManegeError when the gateway does not take the key."""
    given: list[socket.socket] = []
    try:
        async with asyncio.TaskGroup() as group:
            serving: list[asyncio.Task[None]] = []

            def take(listener: socket.socket) -> None:
                assert not given, "an attempt has one listening socket"
                given.append(listener)
                work = _keep_answered(client, claim, listener)
                serving.append(group.create_task(work, name=f"gateway of {claim.rollout.spec.id}"))

            yield take
            for task in serving:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for listener in given:
            listener.close()


async def _keep_answered(client: Client, claim: Claim, listener: socket.socket) -> None:
    """Until cancelled."""
    lost: str | None = None
    was_taken = False
    while True:
        try:
            door = await client.door(lost=lost)
        except (UnavailableError, StoreError) as error:
            _log.warning(str(error))
            await asyncio.sleep(_RETRY_S)
            continue
        # One of the gateway's processes may have ended: behind the same door there are others.
        if door is None or (door == lost and not was_taken):
            break
        was_taken = await _hand_over(door, claim.agent_key, listener)
        lost = door
    _log.info(kv("model calls are relayed", rollout_id=claim.rollout.spec.id, gateway=client.url))
    await relay(listener, client, claim.agent_key)


async def _hand_over(door: str, key: str, listener: socket.socket) -> bool:
    """Return when nobody is behind the door, or not any more: then it was taken. Raises UnauthorizedError if the
    gateway refuses."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, f"\0{door}")
            socket.send_fds(connection, [key.encode()], [listener.fileno()])
            answer = await loop.sock_recv(connection, _MAX_ANSWER_BYTES)
            if answer == _OK:
                await loop.sock_recv(connection, 1)
                return True
            if answer:
                raise UnauthorizedError(f"the gateway does not answer on the agent's socket: {answer.decode()}")
        except OSError as error:
            _log.info(kv("the gateway's door is closed", door=door, reason=error))
    return False
