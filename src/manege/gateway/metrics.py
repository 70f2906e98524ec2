"""Counters of the gateway and `/metrics` in Prometheus' text form. Names are declared in one table."""

from collections.abc import Mapping
from types import MappingProxyType

from manege.types import Call

__all__ = ["METRICS", "Counters", "render"]

METRICS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "manege_calls_total": ("counter", "Model calls answered."),
        "manege_call_errors_total": ("counter", "Model calls that ended in an error."),
        "manege_calls_without_ids_total": ("counter", "Answered calls whose engine told no usable ids: never trained."),
        "manege_prompt_tokens_total": ("counter", "Prompt tokens of answered calls."),
        "manege_sampled_tokens_total": ("counter", "Tokens sampled for answered calls."),
        "manege_continued_calls_total": ("counter", "Answered calls that continued a stored conversation."),
        "manege_rollouts": ("gauge", "Rollouts in the store, by state."),
        "manege_calls_in_flight": ("gauge", "Model calls being answered."),
        "manege_calls_held": ("gauge", "Model calls that wait for the end of a pause."),
        "manege_calls_held_total": ("counter", "Model calls that ever waited for the end of a pause."),
        "manege_calls_held_seconds_total": ("counter", "How long they waited, those that still do included."),
        "manege_calls_retried": ("gauge", "Model calls that were tried on a second engine, since the start."),
        "manege_engines_unhealthy": ("gauge", "Engines that failed and have not passed a check since."),
        "manege_engine_running": ("gauge", "Sequences that the engines decode."),
        "manege_engine_waiting": ("gauge", "Sequences in the engines' own queues."),
        "manege_engine_cache_usage": ("gauge", "Share of an engine's cache that sequences hold, 0 to 1; the largest."),
        "manege_engine_idle_seconds_total": ("counter", "Time in which an engine had no call, but for pauses; mean."),
        "manege_policy_version": ("gauge", "The last published policy version."),
    }
)


class Counters:
    """Numbers that only grow, since the gateway's start."""

    def __init__(self) -> None:
        self.values = {name: 0 for name, (kind, _) in METRICS.items() if kind == "counter"}

    def add(self, name: str, amount: int = 1) -> None:
        """Count up; the name must stand in METRICS."""
        self.values[name] += amount

    def count_call(self, call: Call) -> None:
        """An answered call."""
        self.add("manege_calls_total")
        self.add("manege_prompt_tokens_total", len(call.prompt_ids_P))
        self.add("manege_sampled_tokens_total", len(call.response_ids_R))
        if call.parent is not None:
            self.add("manege_continued_calls_total")


def render(values: Mapping[str, float | Mapping[str, float]]) -> str:
    """Prometheus' text form; a mapping is one metric with the label `state`."""
    lines: list[str] = []
    for name, value in values.items():
        kind, meaning = METRICS[name]
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        if isinstance(value, Mapping):
            lines += [f'{name}{{state="{state}"}} {number}' for state, number in value.items()]
        else:
            lines.append(f"{name} {value}")
    return "\n".join(lines) + "\n"
