"""What the handlers of one gateway share, made once by `create_app` and passed down.

Settings of a run are read from the store once and kept until the run is put again, since every model call needs them.
State that changes lives in the members (gate, feeds, counters), never in this record.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from manege.config import SamplingConfig, ServiceConfig
from manege.errors import HarnessError, NotFoundError, UnavailableError
from manege.gateway.auth import Auth
from manege.gateway.continuation import Conversation
from manege.gateway.feed import Feed
from manege.gateway.flights import Flights
from manege.gateway.handed import Handed
from manege.gateway.hold import Gate
from manege.gateway.memory import AttemptMemory
from manege.gateway.metrics import Counters
from manege.gateway.pauses import Pauses
from manege.gateway.pool import EnginePool
from manege.gateway.prefixes import PrefixIndex
from manege.gateway.presence import Presence
from manege.gateway.totals import Totals
from manege.gateway.watchdog import Progress
from manege.harnesses.harness import Harness
from manege.rendering.base import Renderer
from manege.store.sql import SqlStore
from manege.types import RunId

__all__ = ["RunSetting", "RunSettings", "Services"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """What a call must know of its run."""

    sampling: SamplingConfig
    """Temperature of training calls and the upper bound on new tokens."""
    harness: Harness | None
    """Whose noise is filtered; None: recognised by its headers."""
    common_prompts: bool
    """Whether what differs between rollouts only is filtered too."""
    tools: Mapping[str, ServiceConfig] = field(default_factory=dict)
    """What its agents reach through the gateway, by name (`tools.py`)."""


class RunSettings:
    """Settings per run; the defaults for a run without any (`default`, Agent Lightning's)."""

    def __init__(self, store: SqlStore, load_harness: Callable[[str], Harness]) -> None:
        """`load_harness`: from the name in a run's config; raises HarnessError."""
        self._store = store
        self._load_harness = load_harness
        self._known: dict[RunId, RunSetting] = {}
        self._num_changes = 0

    async def of(self, run: RunId) -> RunSetting:
        """Read once."""
        found, num_changes = self._known.get(run), self._num_changes
        if found is None:
            found = await self._read(run)
            # What was read before a change that we have learnt of is old.
            if num_changes == self._num_changes:
                self._known[run] = found
        return found

    def forget(self, runs: Collection[RunId]) -> None:
        """Called when their configs are put."""
        self._num_changes += 1
        for run in runs:
            self._known.pop(run, None)

    def forget_all(self) -> None:
        """Called when it is not known which were put."""
        self.forget(list(self._known))

    async def _read(self, run: RunId) -> RunSetting:
        try:
            config = (await self._store.get_run(run)).config
            sampling = SamplingConfig.model_validate(config.get("sampling", {}))
            agent = config.get("agent", {})
            harness, common_prompts = agent.get("harness"), bool(agent.get("common_prompts"))
            known = self._load_harness(harness) if harness else None
            tools = {name: ServiceConfig.model_validate(each) for name, each in config.get("services", {}).items()}
            return RunSetting(sampling=sampling, harness=known, common_prompts=common_prompts, tools=tools)
        except (NotFoundError, HarnessError, ValidationError, AttributeError, TypeError):
            # A run of a foreign trainer keeps whatever config it likes.
            return RunSetting(sampling=SamplingConfig(), harness=None, common_prompts=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of one gateway."""

    store: SqlStore
    engine: EnginePool
    own_renderer: Renderer | None
    """None: there is no model folder here, so that only engines that take messages can serve."""
    auth: Auth
    handed: Handed
    """Sockets inside sandboxes."""
    gate: Gate
    """Model calls run inside `async with gate.enter()`."""
    pauses: Pauses
    presence: Presence
    progress: Progress
    feed: Feed
    """Wakes long polls after writes."""
    counters: Counters
    """Of this process."""
    totals: Totals
    """Of all workers of this gateway."""
    conversations: AttemptMemory[Conversation]
    prefixes: AttemptMemory[PrefixIndex]
    """What `conversations` is for engines that take messages."""
    flights: Flights
    """Answers under way."""
    settings: RunSettings
    model_name: str
    """Answered as `model`, whatever the caller asked for."""
    context_limit: int
    """Tokens of prompt + answer."""
    max_body_bytes: int
    """Of a request, unpacked."""
    clock: Callable[[], float]
    """Seconds since the epoch."""

    @property
    def renderer(self) -> Renderer:
        """Raises UnavailableError without a model folder."""
        if self.own_renderer is None:
            raise UnavailableError(
                f"there is no tokenizer here: the gateway was started with the model name {self.model_name!r} alone; "
                "register an engine that takes messages (POST /api/models), or start with --model FOLDER"
            )
        return self.own_renderer
