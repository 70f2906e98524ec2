"""How old what a step trains is: versions between sampling and training. Pure.

The staleness of a group is the version that it trains less the version of the oldest token of any member; a call says
which version sampled which of its tokens.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from manege.trainer.collect import Group
from manege.types import Call, Outcome, Rollout

__all__ = ["group_versions", "staleness_metrics"]


def group_versions(group: Group) -> tuple[int, int] | None:
    """The oldest and the newest version that sampled a token of the group; None: there is no token."""
    versions = [span.version for call in _all_calls(group) for span in call.spans]
    return (min(versions), max(versions)) if versions else None


def staleness_metrics(groups: Sequence[Group], left_out: Sequence[Group], version: int) -> Mapping[str, Any]:
    """Of the groups of a step that trains `version`. `left_out`: groups that were cut off or became too old since the
    last step. Rollouts that were cut off would have been long ones: their seconds beside those of the others show how
    far what is trained leans towards short ones."""
    ages = [version - versions[0] for group in groups if (versions := group_versions(group)) is not None]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    cut = [each for group in [*groups, *left_out] for each in group.rollouts if each.outcome is Outcome.CANCELLED]
    return {
        "staleness_mean": _mean(ages),
        "staleness_max": max(ages, default=0),
        "staleness_histogram": {str(age): number for age, number in sorted(Counter(ages).items())},
        "rollout_s_mean": _mean(_seconds(each for each in rollouts if each.outcome is not Outcome.CANCELLED)),
        "dropped_rollouts": len(cut),
        "dropped_groups": len(left_out),
        "dropped_s_mean": _mean(_seconds(cut)),
    }


def _all_calls(group: Group) -> Iterable[Call]:
    return (call for calls in group.calls for call in calls)


def _seconds(rollouts: Iterable[Rollout]) -> list[float]:
    return [each.ended_s - each.started_s for each in rollouts if each.started_s is not None and each.ended_s]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
