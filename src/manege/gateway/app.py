"""The gateway as one Starlette application: our own API here, the agents' protocols in `endpoints.py`.

The application owns nothing that it is given: whoever opened the store and the engine closes them, after the server.
"""

import time
from collections.abc import Callable, Mapping

from starlette.applications import Starlette

from manege.engine.base import Engine
from manege.gateway.auth import Auth
from manege.gateway.continuation import Conversation
from manege.gateway.endpoints import agent_routes
from manege.gateway.events import event_routes
from manege.gateway.feed import Feed
from manege.gateway.flights import Flights
from manege.gateway.following import Following
from manege.gateway.given import Post
from manege.gateway.handed import Handed
from manege.gateway.hold import Gate
from manege.gateway.leases import lease_routes
from manege.gateway.memory import AttemptMemory
from manege.gateway.metrics import Counters
from manege.gateway.models import model_routes
from manege.gateway.openapi import description_routes
from manege.gateway.pauses import Pauses
from manege.gateway.pool import EnginePool
from manege.gateway.prefixes import PrefixIndex
from manege.gateway.presence import Presence
from manege.gateway.proxy import proxy_routes
from manege.gateway.rollouts import rollout_routes
from manege.gateway.runs import run_routes
from manege.gateway.services import RunSettings, Services
from manege.gateway.tools import tool_routes
from manege.gateway.totals import Totals
from manege.gateway.watchdog import Progress
from manege.harnesses.harness import Harness, load
from manege.http import MAX_BODY_BYTES, error_handlers
from manege.rendering.base import Renderer
from manege.store.sql import SqlStore

__all__ = ["create_app"]


def create_app(
    *,
    store: SqlStore,
    engine: Engine | Mapping[str, Engine] | None,
    renderer: Renderer | None,
    operator_key: str,
    model_name: str,
    context_limit: int,
    max_body_bytes: int = MAX_BODY_BYTES,
    load_harness: Callable[[str], Harness] = load,
    clock: Callable[[], float] = time.time,
    post: Post | None = None,
) -> Starlette:
    """Called inside the event loop that will serve it. `engine`: one, several by name, or none. `post`: of a worker.
    `app.state.services` holds the parts, `app.state.following` what keeps them as the store says."""
    engines = engine if isinstance(engine, Mapping) else {} if engine is None else {"": engine}
    gate, progress = Gate(clock), Progress(clock)
    pool = EnginePool(engines, store, gate.open_s)
    counters = Counters()
    totals = Totals(counters, gate, post and post.group)
    presence = Presence(store, gate, progress, totals, clock, post and post.name)
    auth = Auth(operator_key=operator_key, store=store, clock=clock)
    services = Services(
        store=store,
        engine=pool,
        own_renderer=renderer,
        auth=auth,
        handed=Handed(auth),
        gate=gate,
        pauses=Pauses(store, pool, gate, presence, clock),
        presence=presence,
        progress=progress,
        feed=Feed(),
        counters=counters,
        totals=totals,
        conversations=AttemptMemory(store, Conversation),
        prefixes=AttemptMemory(store, PrefixIndex),
        flights=Flights(clock()),
        settings=RunSettings(store, load_harness),
        model_name=model_name,
        context_limit=context_limit,
        max_body_bytes=max_body_bytes,
        clock=clock,
    )
    routes = [
        # First, since routes are tried in order and these are what is asked for.
        *agent_routes(services),
        *rollout_routes(services),
        *event_routes(services),
        *lease_routes(services),
        *run_routes(services),
        *model_routes(services),
        *tool_routes(services),
        *proxy_routes(services),
        *description_routes(),
    ]
    app = Starlette(routes=routes, exception_handlers=error_handlers)
    app.state.services, app.state.following = services, Following(services)
    return app
