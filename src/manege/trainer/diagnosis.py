"""Stop instead of training on nothing: what most of a step lacks, and what to do about it."""

from collections.abc import Mapping, Sequence

from manege.errors import TrainerError
from manege.trainer.algo.ledger import Ledger, Reason
from manege.trainer.collect import Group
from manege.trainer.credit import verdict
from manege.types import Outcome, Rollout

__all__ = ["REMEDIES", "check_infrastructure", "check_trained", "diagnose"]

_NUM_SHOWN = 3
_MAX_LOST = 8
"""Rollouts of an evaluation that may be lost to the infrastructure before the first that is not."""

REMEDIES: Mapping[Reason, str] = {
    Reason.NOT_DELIVERED: "agents gave up waiting: raise their request timeout, or lower controller.slots",
    Reason.RETRIED: "agents asked again before they were answered: raise their request timeout or lower their retries",
    Reason.CUT_SHORT: 'raise sampling.max_new_tokens, or set credit.cut_short = "train"',
    Reason.OVER_LIMIT: "raise train.max_sample_tokens, as far as the train engine goes, or lower model.max_context",
    Reason.CONSTRAINED: "let the agent ask without forced tools or response formats",
    Reason.SIDE_CALL: 'set credit.side_calls = "train"',
    Reason.NO_IDS: "use an engine that returns token ids; events `call.without_ids` say what this one did",
    Reason.NO_LOGPROBS: "use an engine that returns the log-probability of every sampled token",
    Reason.UNEQUAL_LENGTHS: "use an engine that returns one log-probability per sampled token",
    Reason.EMPTY: "the engine sampled nothing: look at its log",
    Reason.FLAGGED: "rollouts tried to cheat: see `manege show RUN --hacks`, and credit.flagged",
    Reason.NO_VERDICT: "rollouts ended without a reward: see their messages, and what the scorer returns",
}
"""One line per reason for which a token is not trained."""


def diagnose(groups: Sequence[Group], max_failed_fraction: float) -> None:
    """Raises TrainerError that says what most rollouts of the step lack."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    with_calls = [pair for group in groups for pair in zip(group.rollouts, group.calls, strict=True)]
    silent = [rollout for rollout, calls in with_calls if not calls]
    # A call with a flaw has no token ids: nothing could ever be trained on it.
    flawed = [rollout for rollout, calls in with_calls if calls and all(call.flaw for call in calls)]
    unjudged = [rollout for rollout in rollouts if verdict(rollout) is None]
    for failed, lack, hint in (
        (_lost(rollouts), "failed for a reason that is not their agent's, in every attempt", "see the reason."),
        (
            silent,
            "made no model call",
            "does the agent take its base URL and key from the environment (OPENAI_BASE_URL, OPENAI_API_KEY)?",
        ),
        (flawed, "have no call with token ids", REMEDIES[Reason.NO_IDS] + "."),
        (unjudged, "have no reward", "does the scorer return a number, and do attempts end without infra_error?"),
    ):
        if len(failed) > max_failed_fraction * len(rollouts):
            raise TrainerError(
                f"{len(failed)} of {len(rollouts)} rollouts of this step {lack}: {hint} {_shown(failed[0])}"
            )


def check_infrastructure(rollouts: Sequence[Rollout], num_expected: int) -> None:
    """Raises TrainerError with the reason when the first rollouts of an evaluation were all lost to it."""
    if len(_lost(rollouts)) == len(rollouts) >= min(_MAX_LOST, num_expected):
        raise TrainerError(
            f"the first {len(rollouts)} rollouts of the evaluation failed for a reason that is not their agent's, in "
            f"every attempt. {_shown(rollouts[0])}"
        )


def _lost(rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    return [rollout for rollout in rollouts if rollout.outcome is Outcome.INFRA_ERROR]


def _shown(rollout: Rollout) -> str:
    tail = str(rollout.evidence.get("stderr_tail") or rollout.evidence.get("stdout_tail") or "").strip()
    return f"For example rollout {rollout.spec.id}: outcome {rollout.outcome}, {rollout.message or 'no message'}" + (
        f"; it printed: {tail[-300:]!r}" if tail else ""
    )


def check_trained(ledger: Ledger, min_fraction: float) -> None:
    """Raises TrainerError with the largest reasons when less of a step's sampled tokens is trained; replaced groups,
    which were left out on purpose, apart."""
    sampled = ledger.sampled - ledger.tokens.get(Reason.REPLACED, 0)
    if ledger.trained >= min_fraction * sampled:
        return
    lost = sorted(((count, reason) for reason, count in ledger.tokens.items() if reason in REMEDIES), reverse=True)
    shown = [f"{count} {reason} ({REMEDIES[reason]})" for count, reason in lost[:_NUM_SHOWN] if count]
    raise TrainerError(
        f"{ledger.trained} of {sampled} sampled tokens of this step are trained, less than "
        f"credit.min_trained_fraction = {min_fraction:g}. The others: {'; '.join(shown)}"
    )
