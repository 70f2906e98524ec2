"""The ledger: what became of every sampled token, and why. It adds up exactly, or the step fails."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from manege.errors import TrainerError

__all__ = ["Fate", "Ledger", "Reason", "sum_ledgers"]


class Fate(StrEnum):
    """What becomes of a sampled token."""

    TRAINED = "trained"
    DEAD = "dead"
    TRUNCATED = "truncated"
    EXCLUDED = "excluded"


class Reason(StrEnum):
    """Why; each reason belongs to one fate."""

    TRAINED = "trained"
    """In the loss, in exactly one sample; in others it is context."""
    NOT_DELIVERED = "not_delivered"
    """The agent never got the answer, and nothing continued it."""
    RETRIED = "retried"
    """Whether the agent got it is unknown, and another answer to the same request was used."""
    CUT_SHORT = "cut_short"
    """The answer hit the token limit, and the run masks such answers."""
    OVER_LIMIT = "over_limit"
    """Beyond the longest sample that the run or the train engine takes."""
    CONSTRAINED = "constrained"
    """Sampled under a grammar: not what the policy would have said."""
    SIDE_CALL = "side_call"
    """A title, a summary ..., and the run leaves those out."""
    NO_IDS = "no_ids"
    """The engine told no usable token ids (0 tokens, a call)."""
    NO_LOGPROBS = "no_logprobs"
    """A log-probability of the answer is missing or not finite."""
    UNEQUAL_LENGTHS = "unequal_lengths"
    """Not one log-probability per token: nothing says which belongs to which."""
    EMPTY = "empty"
    """Nothing was sampled (0 tokens, a call)."""
    NO_VERDICT = "no_verdict"
    """The rollout has no reward that counts."""
    FLAGGED = "flagged"
    """The rollout tried to cheat, and the run masks those."""
    REPLACED = "replaced"
    """Its group taught nothing, and another one stands for it."""

    @property
    def fate(self) -> Fate:
        """The class of tokens that this reason belongs to."""
        return _FATES.get(self, Fate.EXCLUDED)


_FATES: Mapping[Reason, Fate] = {
    Reason.TRAINED: Fate.TRAINED,
    Reason.NOT_DELIVERED: Fate.DEAD,
    Reason.RETRIED: Fate.DEAD,
    Reason.CUT_SHORT: Fate.TRUNCATED,
    Reason.OVER_LIMIT: Fate.TRUNCATED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Every sampled token of a rollout, or of a step, by reason."""

    sampled: int
    """Tokens that the engine sampled, counted over the calls."""
    tokens: Mapping[Reason, int]
    """Counted where they went; adds up to `sampled`."""
    calls: Mapping[Reason, int]
    """Calls by the reason of their first token; a call without tokens by its own."""
    context: int
    """Sampled tokens that are read, not trained, in a sample; not part of the sum."""

    def __post_init__(self) -> None:
        if self.sampled != sum(self.tokens.values()):
            raise TrainerError(f"the ledger does not add up: {self}; this is a bug in sample building")

    def of(self, fate: Fate) -> int:
        """Tokens of one fate."""
        return sum(count for reason, count in self.tokens.items() if reason.fate is fate)

    @property
    def trained(self) -> int:
        """Tokens in the loss."""
        return self.of(Fate.TRAINED)

    def left_out(self, reason: Reason) -> "Ledger":
        """The same rollout where nothing of it is trained: what would be is excluded, and nothing is read."""
        tokens, calls = Counter(self.tokens), Counter(self.calls)
        for counter in (tokens, calls):
            counter[reason] += counter.pop(Reason.TRAINED, 0)
        return Ledger(sampled=self.sampled, tokens=tokens, calls=calls, context=0)


def sum_ledgers(ledgers: Sequence[Ledger]) -> Ledger:
    """Of a step."""
    return Ledger(
        sampled=sum(ledger.sampled for ledger in ledgers),
        tokens=sum((Counter(ledger.tokens) for ledger in ledgers), Counter[Reason]()),
        calls=sum((Counter(ledger.calls) for ledger in ledgers), Counter[Reason]()),
        context=sum(ledger.context for ledger in ledgers),
    )
