"""The hack report of an attempt: what its agent tried that an honest one has no need of, as events of its rollout.

In: what the sandbox saw of agent and scorer, what the agent changed that the scorer restores, what the scorer tells,
how scoring failed, how many processes were left, and rewards that the agent posted though nobody takes its word.
Out: an event `hack.<kind>` per kind, and `hacks` for the attempt's evidence: which kinds there are, and which of them
flag the rollout, by which the trainer goes (`credit.flagged`). What flags is an attempt to cheat, as far as can be
told; the rest is for people, since honest agents do it too (docs/concepts/sandbox.md).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from manege.client import Client
from manege.sandbox.spec import Seen
from manege.types import JsonObject, Rollout

__all__ = ["hack_events", "hacks_of", "report_hacks"]

_HOOKS = frozenset({"sitecustomize.py", "usercustomize.py"})
"""An interpreter runs them unasked; no project has them among its tests."""
_MAX_ITEMS = 100
"""Of an event."""


def hack_events(
    *,
    agent: Sequence[Seen],
    changed: Sequence[str] = (),
    scorer: Sequence[Seen] = (),
    told: Sequence[str] = (),
    failure: str | None = None,
    num_left: int = 0,
    num_posted: int = 0,
) -> Sequence[tuple[str, JsonObject]]:
    """Type and data of each event. `changed`: paths under `scorer.restore`; `scorer`: seen of its process tree, in
    which the agent's code may run; `told`: the verdict's `hacks`; `failure`: why there is no verdict on this workspace,
    though there is one on a pristine one; `num_left`: processes that outlived the agent's first one, and were killed;
    `num_posted`: rewards."""
    found = list(agent)
    # Agents that are asked for code are asked for tests, too: to change some is reported, and undone, no more.
    found += [_item("tests", path, flags=os.path.basename(path) in _HOOKS) for path in changed]
    # What else a scorer asks in vain may be its own doing.
    found += [replace(seen, kind="scorer") for seen in scorer if seen.kind == "file" and seen.flags]
    found += [_item("scorer", line, flags=True) for line in told]
    # Code that hangs is a mistake more often than a trick, and gets no reward anyway.
    found += [_item("scorer", failure, flags=False)] if failure else []
    # Servers that were started for a test are left, too.
    found += [_item("processes", f"{num_left} left at its end", flags=False)] if num_left else []
    found += [_item("reward", "post a reward", flags=True, count=num_posted)] if num_posted else []
    kinds = dict.fromkeys(seen.kind for seen in found)
    return [(f"hack.{kind}", _data([seen for seen in found if seen.kind == kind])) for kind in kinds]


def hacks_of(events: Sequence[tuple[str, JsonObject]]) -> Mapping[str, bool]:
    """For the attempt's evidence: kinds, and whether each flags the rollout."""
    return {event_type.removeprefix("hack."): data["flags"] for event_type, data in events}


async def report_hacks(client: Client, rollout: Rollout, events: Sequence[tuple[str, JsonObject]]) -> JsonObject:
    """Post the events of the current attempt; returns what belongs into its evidence."""
    for event_type, data in events:
        await client.add_event(rollout.spec.id, rollout.attempt, event_type, data)
    return {"hacks": hacks_of(events)} if events else {}


def _item(kind: str, detail: str, *, flags: bool, count: int = 1) -> Seen:
    return Seen(kind=kind, detail=detail, count=count, flags=flags)


def _data(found: Sequence[Seen]) -> JsonObject:
    items = [{name: value for name, value in asdict(seen).items() if name != "kind"} for seen in found]
    return {"flags": any(seen.flags for seen in found), "items": items[:_MAX_ITEMS]}
