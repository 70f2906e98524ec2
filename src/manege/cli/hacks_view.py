"""The hack reports of a run, by kind: how often, in how many rollouts, and whether it paid; and which rewarded rollouts
are the least like the others (`hack_ranking`).

In: a stored run. Out: a report. Of each rollout its last attempt counts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from manege.cli.hack_ranking import Ranked, Rewarded, rank
from manege.cli.stored import StoredRun
from manege.trainer.credit import is_flagged, verdict
from manege.types import JsonObject, Rollout, RolloutId

__all__ = ["HackReport", "hacks_table", "read_hacks"]

_NUM_EXAMPLES = 3
_NUM_RANKED = 20
_PAGE = 64
"""Rollouts whose calls are read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One thing that an agent tried."""

    rollout: RolloutId
    detail: str
    count: int
    flags: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What was tried of one kind."""

    kind: str
    num_events: int
    """Single attempts: what was tried ten times counts ten."""
    num_rollouts: int
    num_flagged: int
    """Of these rollouts: flagged for this kind."""
    rewarded: float | None
    """Share of the flagged ones with a reward that reaches scorer.success_reward; None: none of them has a reward."""
    examples: Sequence[Example]
    """What flags first, then the most frequent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HackReport:
    """Of a run."""

    num_rollouts: int
    num_flagged: int
    flagged_rewarded: float | None
    others_rewarded: float | None
    kinds: Sequence[Kind]
    ranked: Sequence[Ranked]
    """Rewarded rollouts, the least like honest ones first."""


async def read_hacks(stored: StoredRun) -> HackReport:
    """Raises ConfigError."""
    success_reward = stored.config().scorer.success_reward
    told: dict[str, list[tuple[Rollout, JsonObject]]] = {}
    for rollout in stored.rollouts:
        for kind in rollout.evidence.get("hacks", {}):
            events = await stored.source.events(rollout.spec.id, event_type=f"hack.{kind}")
            told.setdefault(kind, []).extend((rollout, e.data) for e in events if e.attempt == rollout.attempt)
    flagged = [rollout for rollout in stored.rollouts if is_flagged(rollout)]
    return HackReport(
        num_rollouts=len(stored.rollouts),
        num_flagged=len(flagged),
        flagged_rewarded=_rewarded(flagged, success_reward),
        others_rewarded=_rewarded([each for each in stored.rollouts if not is_flagged(each)], success_reward),
        kinds=[_kind(kind, events, success_reward) for kind, events in sorted(told.items())],
        ranked=rank(await _rewarded_ones(stored, told, success_reward))[:_NUM_RANKED],
    )


def hacks_table(report: HackReport) -> Group:
    """For people."""
    if not report.kinds:
        return Group(
            Text(f"{report.num_rollouts} rollouts, none of which tried anything that is reported"), *_ranking(report)
        )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("kind", "attempts", "rollouts", "flagged", "rewarded", "for example"):
        right = name in ("attempts", "rollouts", "flagged", "rewarded")
        table.add_column(name, no_wrap=name != "for example", justify="right" if right else "left")
    for kind in report.kinds:
        numbers = [str(number) for number in (kind.num_events, kind.num_rollouts, kind.num_flagged)]
        examples = Text("\n").join(_line(example) for example in kind.examples)
        table.add_row(Text(kind.kind), *numbers, _share(kind.rewarded), examples)
    head = (
        f"{report.num_flagged} of {report.num_rollouts} rollouts are flagged; rewarded: "
        f"{_share(report.flagged_rewarded)} of them, {_share(report.others_rewarded)} of the others"
    )
    return Group(Text(head), Text(), table, *_ranking(report))


async def _rewarded_ones(
    stored: StoredRun, told: Mapping[str, Sequence[tuple[Rollout, JsonObject]]], success_reward: float
) -> Sequence[Rewarded]:
    flagged = Counter[RolloutId]()
    for events in told.values():
        for rollout, data in events:
            flagged[rollout.spec.id] += sum(item["count"] for item in data["items"] if item["flags"])
    rewarded = [each for each in stored.rollouts if (given := verdict(each)) is not None and given >= success_reward]
    found: list[Rewarded] = []
    for start in range(0, len(rewarded), _PAGE):
        page = rewarded[start : start + _PAGE]
        calls = await stored.source.calls([each.spec.id for each in page])
        for each in page:
            own = [call for call in calls.get(each.spec.id, ()) if call.attempt == each.attempt]
            found.append(Rewarded(rollout=each, calls=own, num_flagged=flagged[each.spec.id]))
    return found


def _ranking(report: HackReport) -> Sequence[Table | Text]:
    if not report.ranked:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("rewarded", "unlike", "told", "because", "rare words"):
        table.add_column(name, no_wrap=name in ("rewarded", "unlike"), justify="right" if name == "unlike" else "left")
    for ranked in report.ranked:
        because = "; ".join(
            f"{reason.feature} {reason.value:.3g} (usual {reason.usual:.3g})" for reason in ranked.reasons
        )
        table.add_row(
            Text(ranked.rollout), f"{ranked.unlike:.1f}", ", ".join(ranked.hacks), because, Text(" ".join(ranked.words))
        )
    return [Text(), Text("rewarded rollouts, the least like honest ones first (`manege show RUN ROLLOUT`):"), table]


def _kind(kind: str, events: Sequence[tuple[Rollout, JsonObject]], success_reward: float) -> Kind:
    flagged = [rollout for rollout, data in events if data["flags"]]
    examples = [example for rollout, data in events for example in _examples(rollout, data)]
    distinct = {example.detail: example for example in sorted(examples, key=lambda each: (each.flags, each.count))}
    return Kind(
        kind=kind,
        num_events=sum(example.count for example in examples),
        num_rollouts=len(events),
        num_flagged=len(flagged),
        rewarded=_rewarded(flagged, success_reward),
        examples=sorted(distinct.values(), key=lambda each: (not each.flags, -each.count))[:_NUM_EXAMPLES],
    )


def _examples(rollout: Rollout, data: JsonObject) -> Iterator[Example]:
    for item in data["items"]:
        yield Example(rollout=rollout.spec.id, detail=item["detail"], count=item["count"], flags=item["flags"])


def _rewarded(rollouts: Sequence[Rollout], success_reward: float) -> float | None:
    given = [reward for rollout in rollouts if (reward := verdict(rollout)) is not None]
    return sum(reward >= success_reward for reward in given) / len(given) if given else None


def _line(example: Example) -> Text:
    times = f" ({example.count} times)" if example.count > 1 else ""
    return Text.assemble((example.rollout, "dim"), f" {example.detail}{times}", style="" if example.flags else "dim")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
