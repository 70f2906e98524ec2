"""The scripted rollouts of tests/golden as calls."""

import gzip
import json
from pathlib import Path

from manege.types import Delivered
from tests.calls import make_call

_FILE = Path(__file__).parent / "golden" / "rollouts.json.gz"
SCENARIOS = {each["name"]: each["calls"] for each in json.loads(gzip.decompress(_FILE.read_bytes()))["scenarios"]}

NUM_SAMPLES = {
    "linear": 1,
    "drift at 2 of 8 turns": 3,
    "drift at every turn": 8,
    "reasoning stripped each turn": 8,
    "one answer rewritten by harness": 2,
    "2 interleaved conversations": 2,
    "parent + 3 parallel sub-agents": 4,
    "compaction once": 2,
    "4 equal prompts, all used": 4,
    "system nonce each call": 8,
    "3 shared turns, then 2 different continuations": 2,
}
"""By the prompt ids of the file, retries apart."""


def golden_calls(name, *, lost=Delivered.YES):
    """`lost`: what the gateway saw of answers that the harness did not keep."""
    return [
        make_call(
            str(number),
            call["prompt_token_ids"],
            call["response_token_ids"],
            delivered=Delivered.YES if call["kept_by_harness"] else lost,
            request={"messages": call["messages"]},
            reply={"role": "assistant", "content": call["response_text"]},
        )
        for number, call in enumerate(SCENARIOS[name])
    ]
