"""The scripted rollouts of tests/golden as calls."""

import gzip
import json
from pathlib import Path

from manege.types import Delivered
from tests.calls import make_call

_FILE = Path(__file__).parent / "golden" / "rollouts.json.gz"
SCENARIOS = {each["name"]: each["calls"] for each in json.loads(gzip.decompress(_FILE.read_bytes()))["scenarios"]}


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
