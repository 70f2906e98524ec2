"""Who may do what: one operator key, and one derived key per attempt.

An agent key is `mk-<attempt>-<HMAC>-<rollout id>`, signed with the operator key: it needs no table, and it alone says
which attempt calls, at every gateway of its database. It is good for model calls and events of that attempt until the
attempt is terminal or superseded; what comes later is answered with 409 and kept apart as an event `late.call` or
`late.event`. Its mode follows the rollout's `is_train`. A scorer's key, `ms-...`, is good for the rewards of one
attempt and nothing else. The operator key opens everything; with it, the path must say which attempt calls (Agent
Lightning's way). Keys are compared in constant time.
"""

import functools
import hashlib
import hmac
import os
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from manege.errors import ConfigError, ConflictError, ForbiddenError, ManegeError, NotFoundError, UnauthorizedError
from manege.gateway.declare import declare
from manege.http import read_json
from manege.logs import get_logger, kv
from manege.store.sql import SqlStore
from manege.types import TERMINAL, Event, Rollout, RolloutId, RolloutState

__all__ = ["AgentIdentity", "Auth", "operator_key", "path_attempt"]

_log = get_logger("gateway")

Handler = Callable[[Request], Awaitable[Response]]

_KEY = "operator_key"
"""Of a keyed hash in the store, by which gateways of one database see that theirs is the same."""
MAX_ATTEMPT_DIGITS = 5
"""Nobody tries a rollout again 100,000 times."""
MAX_SIGNATURES = 4096
"""Kept in memory: more than attempts run at once."""
MAX_LATE_BYTES = 65536
"""Of the body of a late call or event that is kept; a longer one is noted without its body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """Which attempt a request belongs to."""

    rollout: Rollout
    attempt: int
    is_operator: bool
    """Came with the operator key, so it may also do what agents may not."""
    is_scorer: bool = False
    """Came with a scorer's key."""

    @property
    def rollout_id(self) -> RolloutId:
        """The rollout's id."""
        return self.rollout.spec.id

    @property
    def mode(self) -> str:
        """`train` or `val`."""
        return "train" if self.rollout.spec.is_train else "val"


class Auth:
    """Checks the keys of one gateway."""

    def __init__(self, *, operator_key: str, store: SqlStore, clock: Callable[[], float]) -> None:
        if not operator_key:
            raise ConfigError("the operator key is empty; leave it out to have one made")
        self._operator_key = operator_key.encode()
        self._sign = functools.lru_cache(MAX_SIGNATURES)(self._make_signature)
        self._store = store
        self._clock = clock

    async def agree(self, *, is_alone: bool) -> None:
        """Raises ConfigError unless this gateway has the operator key that its database knows, from which the agents'
        keys derive; one that is alone, with no rollout running, may bring a new one. A key and a database in one folder
        belong to each other anyway."""
        if not self._store.is_shared:
            return
        own = hmac.new(self._operator_key, b"operator key of a database", hashlib.sha256).hexdigest()
        if await self._store.update_value(_KEY, lambda known: known or own) == own:
            return
        if not is_alone or (await self._store.count_rollouts())[RolloutState.RUNNING]:
            raise ConfigError(
                f"the operator key is not the one that {self._store.name} was used with, and agents' keys derive from "
                "it; give this gateway the key of the others, with --operator-key KEY (gateway.key) or a copy of the "
                "file operator.key in its folder. For a new key, stop them all and let no rollout run"
            )
        _log.warning(kv("the database has a new operator key", database=self._store.name))
        await self._store.set_value(_KEY, own)

    def agent_key(self, rollout_id: RolloutId, attempt: int) -> str:
        """The key of one attempt."""
        return f"mk-{attempt}-{self._sign('agent', rollout_id, attempt)}-{rollout_id}"

    def scorer_key(self, rollout_id: RolloutId, attempt: int) -> str:
        """The key of a scorer that nobody watches."""
        return f"ms-{attempt}-{self._sign('scorer', rollout_id, attempt)}-{rollout_id}"

    def operator(self, handler: Handler) -> Handler:
        """The handler behind a check for the operator key."""

        @functools.wraps(handler)
        async def checked(request: Request) -> Response:
            self.require_operator(request)
            return await handler(request)

        return declare(checked, key="operator")

    def agent(self, handler: Callable[[Request, AgentIdentity], Awaitable[Response]], *, late: str) -> Handler:
        """The handler behind a check for an agent's key; it gets the attempt. For `late` see `authorise_agent`."""

        @functools.wraps(handler)
        async def checked(request: Request) -> Response:
            return await handler(request, await self.authorise_agent(request, late=late))

        return declare(checked, key="agent")

    def require_operator(self, request: Request) -> None:
        """Raises ForbiddenError without the operator key."""
        if self._owner(request) is not None:
            raise ForbiddenError(
                f"{request.method} {request.url.path} needs the operator key; an agent's key was given"
            )

    async def authorise_agent(self, request: Request, *, late: str = "late.call") -> AgentIdentity:
        """The attempt that a request belongs to, by its key and, where the path names one (`rollout_id`, `attempt`,
        `mode`), by its path. Raises UnauthorizedError (401) for a missing, wrong or outlived key, ForbiddenError (403)
        for one that disagrees with the path, NotFoundError for an unknown rollout, ConflictError (409) once the attempt
        is over; then the request is kept as an event `late`."""
        key = _given_key(request)
        is_scorer = late == "late.event" and key.startswith("ms-")
        owner = self._owner_of(key, role="scorer" if is_scorer else "agent")
        rollout_id, attempt = _named_by_path(request, owner)
        try:
            rollout = await self._store.get_rollout(rollout_id)
        except NotFoundError:
            if owner is None:
                raise
            raise UnauthorizedError(f"the key's rollout {rollout_id} does not exist any more") from None
        identity = AgentIdentity(rollout=rollout, attempt=attempt, is_operator=owner is None, is_scorer=is_scorer)
        mode = request.path_params.get("mode")
        if mode is not None and mode != identity.mode:
            raise ForbiddenError(f"rollout {rollout_id} runs in mode {identity.mode}, but the path says {mode}")
        over = rollout.state in TERMINAL or rollout.attempt != attempt
        # The operator's own events stay welcome: Agent Lightning's trainer posts rewards of ended rollouts.
        if over and not (identity.is_operator and late == "late.event"):
            await self._keep_late(request, rollout_id, attempt, late)
            raise ConflictError(
                f"attempt {attempt} of rollout {rollout_id} is over "
                f"(state {rollout.state}, current attempt {rollout.attempt}); nothing more is accepted for it"
            )
        return identity

    def attempt_of(self, key: str) -> tuple[RolloutId, int]:
        """Whose key it is. Raises UnauthorizedError for one that is not valid, ForbiddenError for the operator's."""
        owner = self._owner_of(key)
        if owner is None:
            raise ForbiddenError("the operator key was given where only an attempt's may be; it opens everything")
        return owner

    def _owner(self, request: Request) -> tuple[RolloutId, int] | None:
        """The attempt whose key was given; None for the operator's."""
        return self._owner_of(_given_key(request))

    def _owner_of(self, key: str, *, role: str = "agent") -> tuple[RolloutId, int] | None:
        if hmac.compare_digest(key.encode(), self._operator_key):
            return None
        prefix, _, rest = key.partition("-")
        number, _, rest = rest.partition("-")
        signature, _, rollout_id = rest.partition("-")
        if (
            prefix == ("ms" if role == "scorer" else "mk")
            and number.isdecimal()
            and len(number) <= MAX_ATTEMPT_DIGITS
            and rollout_id
        ):
            expected = self._sign(role, RolloutId(rollout_id), int(number))
            if hmac.compare_digest(signature.encode(), expected.encode()):
                return RolloutId(rollout_id), int(number)
        raise UnauthorizedError("the key is not valid here; agents find theirs in OPENAI_API_KEY")

    def _make_signature(self, role: str, rollout_id: RolloutId, attempt: int) -> str:
        text = f"{role}:{attempt}:{rollout_id}".encode()
        return hmac.new(self._operator_key, text, hashlib.sha256).hexdigest()[:32]

    async def _keep_late(self, request: Request, rollout_id: RolloutId, attempt: int, late: str) -> None:
        try:
            body = await read_json(request, MAX_LATE_BYTES)
        except ManegeError as error:
            body = f"not kept: {error}"
        data = {"path": request.url.path, "body": body}
        await self._store.add_event(
            Event(rollout_id=rollout_id, attempt=attempt, event_type=late, data=data, timestamp_s=self._clock())
        )


def operator_key(folder: Path) -> str:
    """The key of a folder, made at first use in a file of mode 0600."""
    path = folder / "operator.key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".operator.key.{os.getpid()}"
        draft.touch(mode=0o600)
        draft.write_text(f"mo-{secrets.token_urlsafe(32)}\n")
        try:
            # Unlike a rename, a link never replaces the key of a process that was faster.
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    key = path.read_text().strip()
    if not key:
        raise ConfigError(f"{path} is empty; delete it to have a new operator key made")
    return key


def path_attempt(request: Request) -> int:
    """The attempt that a path names. Raises NotFoundError for what is no number, or one that no rollout has."""
    number = request.path_params["attempt"]
    if not number.isdecimal() or len(number) > MAX_ATTEMPT_DIGITS:
        raise NotFoundError(f"attempt {number!r:.40} does not exist; attempts are numbers from 0")
    return int(number)


def _given_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    candidates = (
        token.strip() if scheme.lower() == "bearer" else "",
        request.headers.get("x-api-key", ""),
        request.headers.get("x-goog-api-key", ""),
        request.query_params.get("key", ""),
    )
    key = next((key for key in candidates if key), None)
    if key is None:
        raise UnauthorizedError(
            "no key was given: send it as Authorization: Bearer, x-api-key or x-goog-api-key, or as ?key="
        )
    return key


def _named_by_path(request: Request, owner: tuple[RolloutId, int] | None) -> tuple[RolloutId, int]:
    named = request.path_params.get("rollout_id")
    if named is None:
        if owner is None:
            raise ForbiddenError(
                "the operator key does not say which attempt calls; use the path with the rollout's id"
            )
        return owner
    path = RolloutId(named), path_attempt(request)
    if owner is not None and owner != path:
        raise ForbiddenError(f"the key belongs to another attempt than the path, attempt {path[1]} of rollout {named}")
    return path
