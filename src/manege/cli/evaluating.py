"""What `manege eval` does at each temperature: rollouts of all tasks, what they came to, and how that is said."""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from typing import Any

from manege.cli.parts import serving
from manege.client import Client
from manege.config import RunConfig
from manege.trainer.collect import GroupFeed, new_nonce
from manege.trainer.passing import pass_rates
from manege.trainer.repeated import Tried, repeated, tried
from manege.types import RunId, Task

__all__ = ["evaluate", "feeding", "lines_of", "row_of"]


@asynccontextmanager
async def feeding(config: RunConfig, elsewhere: Client | None = None) -> AsyncIterator[tuple[Client, RunId, GroupFeed]]:
    """A feed of a run's rollouts, from all parts in this process, or from a gateway elsewhere: there under a name of
    its own, so that the config of a training run is not replaced."""
    async with _client(config, elsewhere) as client:
        run = RunId(config.name if elsewhere is None else f"{config.name}-eval")
        await client.put_run(run, config.to_json())
        feed = GroupFeed(
            client,
            run,
            cursor=0,
            reward_from=config.scorer.reward_from,
            max_attempts=config.controller.max_attempts,
        )
        yield client, run, feed


def _client(config: RunConfig, elsewhere: Client | None) -> AbstractAsyncContextManager[Client]:
    return _own(config) if elsewhere is None else elsewhere


@asynccontextmanager
async def _own(config: RunConfig) -> AsyncIterator[Client]:
    async with serving(config, train=False) as parts:
        yield parts.client


async def evaluate(
    feed: GroupFeed, tasks: Sequence[Task], config: RunConfig, *, size: int, temperature: float
) -> Sequence[Tried]:
    """All tasks, `size` rollouts each."""
    groups = repeated(feed, tasks, name=new_nonce(), size=size, temperature=temperature, slots=config.controller.slots)
    return [tried(group, success_reward=config.scorer.success_reward) async for group in groups]


def row_of(found: Sequence[Tried], *, temperature: float) -> Mapping[str, Any]:
    """The object of `--json`."""
    size = found[0].num_rollouts
    num_rollouts = size * len(found)
    rates = pass_rates([each.num_success for each in found], size)
    rewards = [reward or 0.0 for each in found for reward in each.rewards]
    sums = {
        name: sum(getattr(each, name) for each in found)
        for name in ("num_calls", "num_prompt_tokens", "num_sampled_tokens", "seconds")
    }
    return {
        "temperature": temperature,
        "num_tasks": len(found),
        "rollouts_per_task": size,
        "success_rate": rates[0].rate,
        "low": rates[0].low,
        "high": rates[0].high,
        "reward_mean": math.fsum(rewards) / num_rollouts,
        "pass_at": [asdict(rate) for rate in rates],
        "turns_per_rollout": sums["num_calls"] / num_rollouts,
        "prompt_tokens_per_rollout": sums["num_prompt_tokens"] / num_rollouts,
        "sampled_tokens_per_rollout": sums["num_sampled_tokens"] / num_rollouts,
        "seconds_per_rollout": sums["seconds"] / num_rollouts,
        "num_lost": sum(each.num_lost for each in found),
        "successes": {each.task.id: each.num_success for each in sorted(found, key=lambda each: each.task.id)},
    }


def lines_of(row: Mapping[str, Any]) -> Sequence[str]:
    """For people."""
    name = "greedy" if row["temperature"] == 0 else f"T = {row['temperature']:g}"
    lines = [
        f"{name:8} success {row['success_rate']:.1%} ({row['low']:.0%} to {row['high']:.0%}, n = {row['num_tasks']})  "
        f"mean reward {row['reward_mean']:.3f}",
        *(
            f"{'':8} pass@{rate['k']} {rate['rate']:.1%} ({rate['low']:.0%} to {rate['high']:.0%}, {rate['method']})"
            for rate in row["pass_at"][1:]
        ),
        f"{'':8} a rollout: {row['turns_per_rollout']:.1f} turns, {row['prompt_tokens_per_rollout']:.0f} tokens in, "
        f"{row['sampled_tokens_per_rollout']:.0f} out, {row['seconds_per_rollout']:.1f} s",
    ]
    if row["num_lost"]:
        lines.append(f"{'':8} {row['num_lost']} rollouts were lost to the infrastructure, and count as failures")
    return lines
