"""What so many GPUs of rollouts need from the gateway, by arithmetic: workers, PostgreSQL, connections, disk.

    python benchmarks/gateway_workers.py --plan gpus=64 prompt=16000 answer=500 decode=4000

Every input can be given. Its default was measured, published by somebody, or assumed: docs/guides/gateway-scale.md says
which. Nothing is simulated: rates and times are means, so leave room for what varies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import ceil

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Of the rollouts, and of one call."""

    gpus: float = 64
    """That sample; those that train alone do not count."""
    decode: float = 4000
    """Tokens per second that a GPU samples, over all its sequences: 3,902 by an H200 with Llama 3.1 8B in FP8 and
    prompts / answers of 5,000 / 500 tokens (TensorRT-LLM's performance overview)."""
    stream: float = 40
    """Tokens per second of one sequence."""
    prompt: float = 16000
    """Tokens of a mean prompt, the history included, and ..."""
    answer: float = 500
    """... of a mean answer."""
    tool_s: float = 2.0
    """Between an answer and the next call."""
    turns: float = 30
    """Calls of a rollout."""
    worker_ms: float = 4.0
    """CPU of a worker per call, whatever its length, ..."""
    worker_ms_prompt: float = 0.07
    """... per 1,000 tokens of its prompt, ..."""
    event_us: float = 50
    """... and per event of the engine's stream, each of which has ..."""
    event_tokens: float = 1
    """... so many tokens: vLLM's --stream-interval."""
    postgres_ms: float = 1.0
    """CPU of the database server per call."""
    turn_ms: float = 1.0
    """How long a call keeps other writers out, who take turns; assumed."""
    kib: float = 11.0
    """That a call adds to the database, and ..."""
    log_kib: float = 11.5
    """... to its write-ahead log."""
    connections: float = 1
    """Of an agent, at once."""
    busy: float = 0.6
    """Share of a core that is used in the mean: the rest is for bursts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What follows."""

    calls_per_s: float
    rollouts: float
    """At work at once."""
    rollouts_per_hour: float
    in_flight: float
    """Calls."""
    connections: float
    worker_ms: float
    """CPU per call."""
    workers: int
    postgres_cores: float
    turns_share: float
    """Of the time in which some writer has its turn: near 1 no worker more helps."""
    body_mb_per_s: float
    """Requests that come in, 4 bytes a token."""
    gb_per_day: float
    log_mb_per_s: float


def needs(given: Inputs) -> Needs:
    """By Little's law: what is inside is what comes per second times how long it stays."""
    calls_per_s = given.gpus * given.decode / given.answer
    call_s = given.answer / given.stream
    rollouts = calls_per_s * (call_s + given.tool_s)
    events = given.answer / given.event_tokens
    worker_ms = given.worker_ms + given.worker_ms_prompt * given.prompt / 1000 + given.event_us * events / 1000
    return Needs(
        calls_per_s=calls_per_s,
        rollouts=rollouts,
        rollouts_per_hour=calls_per_s / given.turns * 3600,
        in_flight=calls_per_s * call_s,
        connections=rollouts * given.connections,
        worker_ms=worker_ms,
        workers=ceil(calls_per_s * worker_ms / 1000 / given.busy),
        postgres_cores=calls_per_s * given.postgres_ms / 1000 / given.busy,
        turns_share=calls_per_s * given.turn_ms / 1000,
        body_mb_per_s=calls_per_s * given.prompt * 4 / 1e6,
        gb_per_day=calls_per_s * given.kib * 1024 * 86400 / 1e9,
        log_mb_per_s=calls_per_s * given.log_kib * 1024 / 1e6,
    )


CASES = (
    ("8 GPUs", {"gpus": 8}),
    ("64 GPUs", {}),
    ("64, 20 tokens an event", {"event_tokens": 20}),
    ("64 GPUs, short calls", {"prompt": 2000, "answer": 200, "tool_s": 1, "event_tokens": 20}),
    ("64 GPUs, thoughts", {"prompt": 8000, "answer": 4000, "decode": 10000, "event_tokens": 20}),
)
"""For whoever gives no input."""


def main(words: Sequence[str]) -> None:
    """Prints the inputs' cases as a table. `words`: `input=number` each."""
    known = {field.name for field in fields(Inputs)}
    changes = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in known:
            raise SystemExit(f"{word!r} is no input; inputs are {', '.join(sorted(known))}")
        changes[name] = float(number)
    cases = [("as given", changes)] if changes else CASES
    table = Table(title="What the gateway needs; write inputs as name=number")
    for name in ("", "calls/s", "rollouts at once", "in flight", "rollouts/h", "ms per call", "workers"):
        table.add_column(name)
    for name in ("PostgreSQL cores", "writers' turns", "MB/s in", "GB a day", "MB/s log"):
        table.add_column(name)
    for name, case in cases:
        need = needs(replace(Inputs(), **case))
        table.add_row(
            *(name, f"{need.calls_per_s:.0f}", f"{need.rollouts:.0f}", f"{need.in_flight:.0f}"),
            *(f"{need.rollouts_per_hour:.0f}", f"{need.worker_ms:.1f}", f"{need.workers}"),
            *(f"{need.postgres_cores:.1f}", f"{need.turns_share:.0%}", f"{need.body_mb_per_s:.0f}"),
            *(f"{need.gb_per_day:.0f}", f"{need.log_mb_per_s:.1f}"),
        )
    Console(width=170).print(table)
