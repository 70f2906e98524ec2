"""The search agent's reward: 1 for the right answer; for a wrong one up to 0.3 for the facts that it was shown.

Who gives no answer gets nothing, whatever was read, and no wrong answer gets what a right one does. What was read is
taken from the model calls that the gateway recorded: only what came after the question counts, and nothing that the
model wrote itself. Exact match and F1 are those of SQuAD (https://arxiv.org/abs/1606.05250), the best of several golden
answers.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from manege.controller.record import AttemptRecord
from manege.types import Call, Task

__all__ = ["exact_match", "f1", "normalised", "score"]

PART = 0.3
"""For a wrong answer after all facts of the chain."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(task: Task, attempt: AttemptRecord) -> dict[str, Any]:
    """The verdict. `task.hidden` has `answers`, perhaps a `chain` of facts; the last line on stdout is the answer."""
    answers, chain = task.hidden["answers"], task.hidden.get("chain", [])
    lines = attempt.stdout.strip().splitlines()
    answer = lines[-1].strip() if lines else ""
    shown = "\n".join(_shown(attempt.calls))
    num_read = sum(step["fact"] in shown for step in chain)
    if not normalised(answer):
        return {"reward": 0.0, "message": f"no answer, {num_read} of {len(chain)} facts read"}
    is_right = exact_match(answer, answers)
    reward = 1.0 if is_right else PART * num_read / max(1, len(chain))
    told = f"exact match {is_right:d}, F1 {f1(answer, answers):.2f}, {num_read} of {len(chain)} facts read"
    return {"reward": reward, "message": told}


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous blanks."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golden: Iterable[str]) -> bool:
    """Whether it is one of the golden answers, both normalised."""
    return normalised(answer) in {normalised(each) for each in golden}


def f1(answer: str, golden: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of words, with the golden answer for which it is highest."""
    return max((_f1(normalised(answer).split(), normalised(each).split()) for each in golden), default=0.0)


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    num_same = sum((Counter(said) & Counter(wanted)).values())
    return 2 * num_same / (len(said) + len(wanted)) if num_same else float(said == wanted)


def _shown(calls: Sequence[Call]) -> Iterable[str]:
    """What the agent's messages hold beyond those of its first call; a continued call has only what is new."""
    given = {str(message.get("content")) for call in calls[:1] for message in call.request.get("messages", [])}
    for call in calls[1:]:
        for message in call.request.get("messages", []):
            text = str(message.get("content"))
            if message.get("role") in ("user", "tool") and text not in given:
                yield text
