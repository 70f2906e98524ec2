"""How busy an engine is, in Prometheus text under vLLM's names: written by our server, read by its client; pure.

https://docs.vllm.ai/en/stable/usage/metrics/ has the names. vLLM gives one line for each of its engine processes, with
labels; ours has one line without.
"""

import re

from manege.engine.base import EngineInfo

__all__ = ["num_waiting_and_usage", "write_metrics"]

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"


def write_metrics(info: EngineInfo) -> str:
    """The body of `/metrics`."""
    values = {_RUNNING: info.num_running, _WAITING: info.num_waiting, _USAGE: info.cache_usage}
    return "".join(f"# TYPE {name} gauge\n{name} {value}\n" for name, value in values.items())


def num_waiting_and_usage(text: str) -> tuple[int, float]:
    """Requests that wait in all, and the share of the fullest cache, 0 to 1; 0 for what is not there."""
    return int(sum(_values(text, _WAITING))), max(_values(text, _USAGE), default=0.0)


def _values(text: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)", text, re.MULTILINE)]
