"""One stored rollout as the trainer sees it: its forest, samples and ledger, and its advantage within its group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

from manege.cli.stored import StoredRun
from manege.cli.tree_view import CallRow, call_rows
from manege.config import CreditConfig
from manege.trainer.algo.fates import SampleRules, reasons
from manege.trainer.algo.ledger import Reason
from manege.trainer.credit import CreditedRollout, credit_group, is_flagged, sample_rules, shaped_rewards, why_lost
from manege.types import TERMINAL, CallId, JsonObject, Rollout, RolloutId

__all__ = ["SeenRollout", "header", "look_at", "to_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRollout:
    """What there is to say."""

    credited: CreditedRollout
    members: Sequence[Rollout]
    """Of its group, itself included."""
    credit: CreditConfig
    advantages: Mapping[CallId, float] | None
    """Of its trained calls; None: nothing to compare it with (yet)."""
    rows: Sequence[CallRow]
    past: Sequence[JsonObject]
    """Outcomes and rewards that it had before it was scored anew, the first one first."""

    @property
    def rollout(self) -> Rollout:
        """As it is stored."""
        return self.credited.rollout


async def look_at(stored: StoredRun, rollout_id: RolloutId) -> SeenRollout:
    """A rollout among the others of its group, under the run's own settings."""
    [rollout] = [each for each in stored.rollouts if each.spec.id == rollout_id]
    config = stored.config()
    members = [
        each for each in stored.rollouts if each.spec.group is not None and each.spec.group == rollout.spec.group
    ]
    group = await stored.group(members or [rollout], call_rewards=config.credit.advantage == "returns")
    rules = sample_rules(config.credit, config.train.max_sample_tokens)
    rollouts = credit_group(group, shaped_rewards(group, config.credit), config.credit, rules)
    [credited] = [each for each in rollouts if each.rollout.spec.id == rollout_id]
    rescored = await stored.source.events(rollout_id, event_type="rescored")
    is_lost = rollout.state in TERMINAL and credited.reward is None
    is_comparable = rollout.spec.is_train and all(each.state in TERMINAL for each in members)
    return SeenRollout(
        credited=credited,
        members=group.rollouts,
        credit=config.credit,
        advantages=_by_call(credited) if is_comparable and credited.reward is not None else None,
        rows=call_rows(
            credited.forest, [] if is_lost else credited.samples, _reasons(credited, rules, is_lost=is_lost)
        ),
        past=[event.data["before"] for event in rescored],
    )


def _reasons(credited: CreditedRollout, rules: SampleRules, *, is_lost: bool) -> Sequence[Reason]:
    """As the ledger has them."""
    why = reasons(credited.forest, rules)
    return [why_lost(credited.rollout) if is_lost and reason is Reason.TRAINED else reason for reason in why]


def _by_call(credited: CreditedRollout) -> Mapping[CallId, float]:
    found: dict[CallId, float] = {}
    for sample, advantages_M in zip(credited.samples, credited.advantages, strict=True):
        starts = np.cumsum([0, *(span.stop - span.start for span in sample.spans)])
        found |= {span.call_id: float(advantages_M[start]) for span, start in zip(sample.spans, starts, strict=False)}
    return found


def header(seen: SeenRollout) -> Sequence[Text]:
    """Some lines: what was asked, how it ended, what it is worth, and what became of its tokens."""
    rollout, ledger = seen.rollout, seen.credited.ledger
    protocols = ", ".join(sorted({row.protocol for row in seen.rows}))
    kind = "" if rollout.spec.is_train else " (validation: never trained)"
    trained = "trained" if rollout.spec.is_train else "could be trained"
    tokens = [f"{ledger.trained} of {ledger.sampled} sampled tokens {trained}"]
    tokens += [f"{count} {reason}" for reason, count in ledger.tokens.items() if count and reason is not Reason.TRAINED]
    if ledger.context:
        tokens.append(f"{ledger.context} read again as context")
    lines = [
        Text.assemble("rollout ", (rollout.spec.id, "bold"), f" of task {rollout.spec.task.id}{kind}"),
        Text(f"{ending(rollout)}; {_worth(seen)}"),
        Text(
            f"{_count(len(seen.rows), 'call')} ({protocols or 'none'}), {_count(len(seen.credited.samples), 'sample')}"
        ),
        Text(", ".join(tokens)),
    ]
    return [*lines, Text(rollout.message, style="yellow")] if rollout.message else lines


def ending(rollout: Rollout) -> str:
    """State, outcome where it says more, and the attempt if it is not the first."""
    outcome = "" if rollout.outcome in (None, "ok", rollout.state) else f", {rollout.outcome}"
    return f"{rollout.state}{outcome}" + (f", attempt {rollout.attempt + 1}" if rollout.attempt else "")


def reward_text(rollout: Rollout) -> str:
    """A number, or `-`: no verdict (yet)."""
    return "-" if rollout.reward is None else f"{rollout.reward:.4g}"


def _worth(seen: SeenRollout) -> str:
    worth = f"reward {reward_text(seen.rollout)}"
    if seen.past:
        before = (f"{each['outcome']} {'-' if each['reward'] is None else each['reward']}" for each in seen.past)
        worth += f" (scored anew; before: {', '.join(before)})"
    if is_flagged(seen.rollout):
        kinds = ", ".join(kind for kind, flags in seen.rollout.evidence["hacks"].items() if flags)
        worth += f", flagged for {kinds} (credit.flagged = {seen.credit.flagged})"
    if seen.advantages is None:
        open_ = sum(each.state not in TERMINAL for each in seen.members)
        return worth + (f", no advantage yet: {open_} of its group have not ended" if open_ else ", no advantage")
    if not seen.advantages:
        return worth + ", no advantage: nothing of it is trained"
    low, high = min(seen.advantages.values()), max(seen.advantages.values())
    value = f"{low:+.4g}" if low == high else f"{low:+.4g} to {high:+.4g}"
    rewards = " ".join(reward_text(each) for each in seen.members)
    shuffled = "; the run shuffles rewards" if seen.credit.shuffle_rewards else ""
    return f"{worth}, advantage {value} ({seen.credit.advantage}, of rewards {rewards}{shuffled})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def to_json(seen: SeenRollout) -> Mapping[str, Any]:
    """For `--json`."""
    ledger = seen.credited.ledger
    tokens = {reason.value: count for reason, count in ledger.tokens.items()}
    return {
        "rollout": seen.rollout,
        "past": seen.past,
        "group_rewards": {each.spec.id: each.reward for each in seen.members},
        "advantages": seen.advantages,
        "num_samples": len(seen.credited.samples),
        "ledger": {"sampled": ledger.sampled, "tokens": tokens, "context": ledger.context},
        "calls": seen.rows,
    }
