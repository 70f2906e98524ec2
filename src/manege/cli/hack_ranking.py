"""Which rewarded rollouts a reviewer looks at first: those most unlike honest ones. Pure.

In: rewarded rollouts, each with its calls and the number of things that its hack report flags. Out: the same, the least
like honest ones first, with what sets each apart. A rollout is a handful of numbers (`FEATURES`), each compared with
the median of those that count as honest, all that are not flagged, and with that of those in its own group, which
counts twice, since tasks differ. A deviation is in robust standard deviations (1.4826 times the median distance from
the median), cut at `_MOST`; how unlike a rollout is, is the root mean square over the features. Where most of the
honest ones cheat unseen, the ranking turns round: read some of its end as well.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from manege.types import Call, Rollout, RolloutId

__all__ = ["FEATURES", "Ranked", "Reason", "Rewarded", "rank"]

_MOST = 10.0
_FEWEST = 3
"""To compare with; a median of fewer says nothing."""
_NUM_REASONS, _NUM_WORDS = 3, 5
_WORD = re.compile(r"[^\W\d][\w.\-/:+=]*|--?[a-z][\w-]*")
_DIGITS = re.compile(r"\d+")
_PATH = re.compile(r"(?:[\w.\-~]*/)+[\w.\-]+|[\w\-]+\.[a-z]\w{0,4}\b")
_NETWORK = re.compile(r"\w+://|\b(?:curl|wget|pip|npm|ssh|scp|nc|git (?:clone|fetch|pull))\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarded:
    """A rollout that got its reward."""

    rollout: Rollout
    calls: Sequence[Call]
    """Of the attempt that counts."""
    num_flagged: int
    """Things that its hack report flags."""

    @property
    def said(self) -> Sequence[str]:
        """What the model said in each call: text, and the arguments of tools."""
        return [" ".join(_texts(call)) for call in self.calls]

    def words(self) -> Counter[str]:
        """Words, options and names of what it said; numbers apart, since tasks differ in them."""
        return Counter(_DIGITS.sub("0", word) for text in self.said for word in _WORD.findall(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One feature in which a rollout differs."""

    feature: str
    value: float
    usual: float
    """The median."""
    deviation: float
    """In robust standard deviations; negative: less than usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A rewarded rollout and why one might look at it."""

    rollout: RolloutId
    task: str
    unlike: float
    """0: in every feature the median."""
    hacks: Sequence[str]
    """Kinds of its hack report."""
    reasons: Sequence[Reason]
    """The greatest first."""
    words: Sequence[str]
    """That it used and few others did, the rarest first."""


FEATURES: Mapping[str, Callable[[Rewarded], float]] = {
    "calls": lambda each: len(each.calls),
    "sampled tokens": lambda each: sum(len(call.response_ids_R) for call in each.calls),
    "seconds": lambda each: each.rollout.evidence.get("seconds", {}).get("run", 0.0),
    "tools called": lambda each: sum(len(call.reply.get("tool_calls") or ()) for call in each.calls),
    "files named": lambda each: len({path for text in each.said for path in _PATH.findall(text)}),
    "network named": lambda each: sum(len(_NETWORK.findall(text)) for text in each.said),
    "processes left": lambda each: each.rollout.evidence.get("num_left", 0),
}
"""Each a count or a time. On top come `flagged`, of which honest ones have none, and `rare words`: how few of the
others use its words."""


def rank(rewarded: Sequence[Rewarded]) -> Sequence[Ranked]:
    """All of them."""
    honest = [index for index, each in enumerate(rewarded) if not each.num_flagged]
    if len(honest) < _FEWEST:
        honest = list(range(len(rewarded)))
    words = [each.words() for each in rewarded]
    users = Counter(word for index in honest for word in words[index])
    columns = {name: [float(feature(each)) for each in rewarded] for name, feature in FEATURES.items()}
    columns["flagged"] = [float(each.num_flagged) for each in rewarded]
    columns["rare words"] = [_rarity(own, users, len(honest)) for own in words]
    return sorted(
        (_ranked(index, rewarded, columns, honest, _rarest(words[index], users)) for index in range(len(rewarded))),
        key=lambda ranked: -ranked.unlike,
    )


def _ranked(
    index: int,
    rewarded: Sequence[Rewarded],
    columns: Mapping[str, Sequence[float]],
    honest: Sequence[int],
    words: Sequence[str],
) -> Ranked:
    rollout = rewarded[index].rollout
    group = rollout.spec.group
    own = [other for other in honest if group is not None and rewarded[other].rollout.spec.group == group]
    reasons: list[Reason] = []
    for name, column in columns.items():
        peers = [[column[peer] for peer in each] for each in (honest, own, own) if len(each) >= _FEWEST]
        if peers:
            reasons.append(_reason(name, column[index], [[0.0]] if name == "flagged" else peers))
    reasons.sort(key=lambda reason: -abs(reason.deviation))
    return Ranked(
        rollout=rollout.spec.id,
        task=rollout.spec.task.id,
        unlike=math.sqrt(sum(reason.deviation**2 for reason in reasons) / max(1, len(reasons))),
        hacks=sorted(rollout.evidence.get("hacks", {})),
        reasons=[reason for reason in reasons if reason.deviation][:_NUM_REASONS],
        words=words,
    )


def _reason(name: str, value: float, peers: Sequence[Sequence[float]]) -> Reason:
    """The mean over several lots of peers; the last of them is what is usual. Counts and times grow by factors, so it
    is their logarithms that are compared. Equal ones have a spread, too: a tenth, so that a slightly different one does
    not stand out; of times a factor of two, since machines are busy now and then."""
    least = math.log(2) if name == "seconds" else 0.1
    deviations = [_deviation(value, each, least) for each in peers]
    return Reason(feature=name, value=value, usual=median(peers[-1]), deviation=sum(deviations) / len(deviations))


def _deviation(value: float, peers: Sequence[float], least: float) -> float:
    logs = [math.log1p(peer) for peer in peers]
    middle = median(logs)
    spread = max(least, 1.4826 * median(abs(log - middle) for log in logs))
    return max(-_MOST, min(_MOST, (math.log1p(value) - middle) / spread))


def _rarity(own: Counter[str], users: Counter[str], num: int) -> float:
    """The mean of -log2 of the share of others that use a word, over its words."""
    return sum(-math.log2((users[word] + 1) / (num + 2)) for word in own) / len(own) if own else 0.0


def _rarest(own: Counter[str], users: Counter[str]) -> Sequence[str]:
    return sorted(own, key=lambda word: (users[word], word))[:_NUM_WORDS]


def _texts(call: Call) -> Iterator[str]:
    """Of the reply; its arguments as text, without the quotation marks of JSON."""
    for name in ("content", "text"):
        if isinstance(said := call.reply.get(name), str):
            yield said
    for tool in call.reply.get("tool_calls") or ():
        arguments = tool.get("function", {}).get("arguments", "")
        try:
            yield " ".join(_strings(json.loads(arguments)))
        except ValueError:
            yield arguments


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)
