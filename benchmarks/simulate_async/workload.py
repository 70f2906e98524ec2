"""What rollouts do: how long they start up, what they ask, how long their tools and their scorer take.

A workload is a function of a group's index and a member, so that every schedule meets the same rollouts.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Amount", "Plan", "Turn", "Workload", "synthetic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A call, and what the agent does with the answer."""

    prompt_tokens: int
    """All of them."""
    answer_tokens: int
    tool_s: float
    """Until the next call, or until the agent ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One rollout."""

    start_s: float
    """Until the first call."""
    turns: Sequence[Turn]
    score_s: float
    """From the agent's end to the reward."""


Workload = Callable[[int, int], Plan]
"""Of a group's index and a member; a negative index: an evaluation's rollout, which no group has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A distribution by its mean; `sigma` is that of the logarithm of a lognormal one."""

    kind: str
    mean: float
    sigma: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "Amount":
        """`3`, `constant:3`, `exponential:3` or `lognormal:3:1`. Raises ValueError."""
        kind, *numbers = text.split(":") if ":" in text else ("constant", text)
        if kind not in ("constant", "exponential", "lognormal") or len(numbers) > 1 + (kind == "lognormal"):
            raise ValueError(f"{text!r} is none of 3, constant:3, exponential:3, lognormal:3:1")
        return cls(kind=kind, mean=float(numbers[0]), sigma=float(numbers[1]) if len(numbers) > 1 else 1.0)

    def draw(self, rng: random.Random) -> float:
        """One value."""
        if self.kind == "constant" or self.mean <= 0:
            return self.mean
        if self.kind == "exponential":
            return rng.expovariate(1 / self.mean)
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        return rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)


def synthetic(
    *,
    seed: int,
    turns: Amount,
    first_prompt: Amount,
    observation: Amount,
    answer: Amount,
    tool_s: Amount,
    start_s: float,
    score_s: float,
) -> Workload:
    """A prompt that grows turn by turn by the answer and an observation; `tool_s` is of a rollout, in equal parts."""

    def plan(index: int, member: int) -> Plan:
        rng = random.Random(f"{seed}:{index}:{member}")
        num_turns = max(1, round(turns.draw(rng)))
        total_s, prompt, made = tool_s.draw(rng), max(1, round(first_prompt.draw(rng))), list[Turn]()
        for _ in range(num_turns):
            num_tokens = max(1, round(answer.draw(rng)))
            made.append(Turn(prompt_tokens=prompt, answer_tokens=num_tokens, tool_s=total_s / num_turns))
            prompt += num_tokens + round(observation.draw(rng))
        return Plan(start_s=start_s, turns=made, score_s=score_s)

    return plan
