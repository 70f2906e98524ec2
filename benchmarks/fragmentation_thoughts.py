"""Thoughts that SmolLM2-135M really sampled at temperature 1, as token ids: what an agent's model says before it acts.

Text written by a script is canonical: the tokenizer gives back the ids that it was encoded to. Sampled text is not
always: a model may spell a word with other tokens than the tokenizer would. So the ids are kept as they were sampled,
and how many are not canonical is the model's own, natural rate.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from manege.cli.parts import local_engine
from manege.config import EngineConfig, ModelConfig
from manege.engine.base import Engine, Sampling, collect
from manege.model.folder import open_folder
from manege.rendering.select import renderer_for

MODEL = "smollm2"
_NUM_TOKENS = (20, 40)
_AT_ONCE = 8
_CACHE_TOKENS = 8192
_SYSTEM = "You are a coding agent. Before each command you think aloud about what you do next, in one or two sentences."
_GOALS = (
    "write the second word of words.txt in upper case",
    "find out why the tests of the parser fail",
    "add a --verbose option to the command line tool",
    "rename the function loadData to load_data everywhere",
    "make the web server close its connections when it stops",
    "translate the error messages into French",
    "speed up the query that lists all invoices of a customer",
    "upgrade the project from Python 3.9 to 3.12",
)
_SEEN = (
    "words.txt  count.py  README.md",
    "Traceback (most recent call last):\n  File \"main.py\", line 12, in <module>\nKeyError: 'naïve'",
    "3 passed, 1 failed in 0.42s",
    "secret-abdhgcfeabgh\nsecret-hgfedcbaabcd",
    "grep: build: No such file or directory",
    "On branch fix/utf-8\nnothing to commit, working tree clean",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """What was sampled, up to its end or a limit."""

    ids: Sequence[int]
    is_canonical: bool
    """Whether the tokenizer gives these ids for their text."""


async def sample_thoughts(number: int, *, seed: int) -> list[Thought]:
    """Takes minutes for three hundred."""
    config = EngineConfig(max_batch=_AT_ONCE, cache_tokens=_CACHE_TOKENS)
    _, engine = await asyncio.to_thread(local_engine, ModelConfig(path=MODEL), config, seed=seed)
    free = asyncio.Semaphore(_AT_ONCE)
    try:
        return await asyncio.gather(*(_sample(engine, free, random.Random(f"{seed}/{n}")) for n in range(number)))
    finally:
        await engine.close()


async def _sample(engine: Engine, free: asyncio.Semaphore, rng: random.Random) -> Thought:
    folder = open_folder(MODEL)
    renderer = renderer_for(folder)
    prompt = renderer.render(
        [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"Task: {rng.choice(_GOALS)}.\nThe last command printed:\n{rng.choice(_SEEN)}"},
        ],
        (),
    )
    while True:
        limit, seed = rng.randint(*_NUM_TOKENS), rng.getrandbits(31)
        async with free:
            answer = await collect(
                engine.generate(prompt, Sampling(max_new_tokens=limit, stop_ids=renderer.stop_ids, seed=seed))
            )
        ids = answer.ids_R.tolist()
        # The call that follows begins with a new line of its own, and at the limit a character may be cut in two.
        while ids and (ids[-1] in renderer.stop_ids or _is_open(folder.tokenizer.decode(ids))):
            ids.pop()
        if ids:
            text = folder.tokenizer.decode(ids)
            return Thought(ids=ids, is_canonical=renderer.encode(text) == ids)


def _is_open(text: str) -> bool:
    return text != text.rstrip() or text.endswith("\ufffd")


async def kept_thoughts(number: int, path: Path, *, seed: int) -> list[Thought]:
    """Sampled once and kept in a file."""
    if not path.exists():
        sampled = await sample_thoughts(number, seed=seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([[thought.ids, thought.is_canonical] for thought in sampled]))
    return [Thought(ids=ids, is_canonical=is_canonical) for ids, is_canonical in json.loads(path.read_text())]
