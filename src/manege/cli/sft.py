"""Rollouts as chat examples for supervised training: `{"messages": [...], "tools": [...]}` per line, as TRL reads it.

A line is a sample, as the run's own settings cut them: a path of the forest, in text. Only what the agent got is in it,
and nothing of the task but what the agent told the model.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import orjson

from manege.store.exports.base import ExportedRollout
from manege.trainer.algo.fates import SampleRules
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.history import messages_before
from manege.trainer.algo.samples import build_samples
from manege.types import Delivered, JsonObject

__all__ = ["SftWriter", "chat_examples"]


class SftWriter:
    """Writes a line per sample."""

    def __init__(self, path: Path, rules: SampleRules) -> None:
        self._file = path.open("wb")
        self._rules = rules
        self.num_samples = 0

    def add(self, exported: ExportedRollout) -> None:
        """Its samples."""
        for example in chat_examples(exported, self._rules):
            self._file.write(orjson.dumps(example, option=orjson.OPT_APPEND_NEWLINE))
            self.num_samples += 1

    def close(self) -> None:
        """The file is whole."""
        self._file.close()


def chat_examples(exported: ExportedRollout, rules: SampleRules) -> Iterator[JsonObject]:
    """Text completions have no messages, and are left out."""
    by_id = {call.id: call for call in exported.calls}
    # Where nobody knows whether the agent got an answer, only what continued it tells.
    calls = [
        dataclasses.replace(call, delivered=Delivered.NO) if call.delivered is Delivered.UNKNOWN else call
        for call in exported.calls
    ]
    for sample in build_samples(build_forest(calls), rules)[0]:
        root = last = by_id[sample.call_ids[-1]]
        while root.parent is not None and root.parent in by_id:
            root = by_id[root.parent]
        if messages := messages_before(last, by_id):
            example = {"messages": [*messages, {"role": "assistant", **last.reply}]}
            yield example | ({"tools": tools} if (tools := root.request.get("tools")) else {})
