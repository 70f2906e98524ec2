"""What async_groups to choose, on paper: a row per value, from the real schedule on a virtual clock.

    python -m benchmarks.simulate_async --engines 8 --slots 512 --groups 32 --group-size 8 --async-groups 48,64,96,128
    python -m benchmarks.simulate_async --from-run runs/finder --async-groups 6,8,12
    python -m benchmarks.simulate_async --validate speedup.json      # of benchmarks.async_speedup

Amounts are a number, or a distribution by its mean: constant:3, exponential:3, lognormal:3:1 (sigma of the logarithm).
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.simulate_async.engine import Speed
from benchmarks.simulate_async.model import Hardware, simulate
from benchmarks.simulate_async.report import HEAD, row_of
from benchmarks.simulate_async.trace import read_trace
from benchmarks.simulate_async.validate import validation
from benchmarks.simulate_async.workload import Amount, Workload, synthetic
from manege.train_config import TrainConfig


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validate", type=Path, metavar="RAW.json", help="simulate the runs of a benchmark")
    parser.add_argument("--own-updates", action="store_true", help="there: updates take what they took in each run")
    parser.add_argument("--from-run", metavar="RUN", help="agents, engine and update as measured in a `sync` run")
    parser.add_argument("--seed", type=int, default=0)
    schedule = parser.add_argument_group("schedule (section train of a run file)")
    schedule.add_argument("--steps", type=int, default=30)
    schedule.add_argument("--groups", type=int, default=4)
    schedule.add_argument("--group-size", type=int, default=8)
    schedule.add_argument("--async-groups", default="", help="values to compare; default: 1.5, 2, 3 and 4 x groups")
    schedule.add_argument("--max-staleness", type=int, default=4)
    schedule.add_argument("--staleness-policy", choices=("wait", "drop"), default="wait")
    schedule.add_argument("--inflight", choices=("drain", "abort_continue", "keep"), default="drain")
    schedule.add_argument("--drain-s", type=float, default=10.0)
    hardware = parser.add_argument_group("hardware")
    hardware.add_argument("--engines", type=int, default=1)
    hardware.add_argument("--slots", type=int, help="attempts at once; default: all that are under way")
    hardware.add_argument("--base-s", type=float, default=0.02, help="decode step, whatever the batch")
    hardware.add_argument("--slope-s", type=float, default=0.0002, help="decode step, per sequence")
    hardware.add_argument("--prefill-s", type=float, default=0.0001, help="per new prompt token")
    hardware.add_argument("--max-batch", type=int, default=256)
    hardware.add_argument("--update-s", type=float, default=30.0, help="optimiser step and all around it")
    hardware.add_argument(
        "--update-token-s", type=float, default=0.0, help="in addition, per sampled token of the step"
    )
    hardware.add_argument("--publish-s", type=float, default=0.0)
    hardware.add_argument("--separate", action="store_true", help="the trainer has hardware of its own")
    agents = parser.add_argument_group("agents, where no run says it")
    agents.add_argument("--turns", type=Amount.parse, default=Amount.parse("exponential:10"))
    agents.add_argument("--first-prompt", type=Amount.parse, default=Amount.parse("3000"), help="tokens")
    agents.add_argument("--observation", type=Amount.parse, default=Amount.parse("lognormal:300:1"), help="tokens")
    agents.add_argument("--answer", type=Amount.parse, default=Amount.parse("lognormal:200:1"), help="tokens")
    agents.add_argument("--tool-s", type=Amount.parse, default=Amount.parse("lognormal:60:1"), help="per rollout")
    agents.add_argument("--shared-tokens", type=int, default=2000, help="that all prompts begin with")
    agents.add_argument("--start-s", type=float, default=1.0)
    agents.add_argument("--score-s", type=float, default=1.0)
    return parser.parse_args()


def schedules(asked: argparse.Namespace) -> Sequence[TrainConfig]:
    """`sync`, then a value of async_groups each."""
    common = {"steps": asked.steps, "groups": asked.groups, "group_size": asked.group_size, "inflight": asked.inflight}
    if asked.inflight == "drain":
        common["drain_s"] = asked.drain_s
    most = (asked.max_staleness + 1) * asked.groups
    values = [int(value) for value in asked.async_groups.split(",") if value]
    values = values or sorted({min(most, round(factor * asked.groups)) for factor in (1.5, 2, 3, 4)} - {asked.groups})
    how = {"schedule": "async", "max_staleness": asked.max_staleness, "staleness_policy": asked.staleness_policy}
    return [TrainConfig(**common), *(TrainConfig(**common, **how, async_groups=value) for value in values)]


def site(asked: argparse.Namespace) -> tuple[Hardware, Workload]:
    """As measured, or as given."""
    if asked.from_run:
        trace = asyncio.run(read_trace(asked.from_run))
        return replace(trace.hardware, num_engines=asked.engines, is_separate=asked.separate), trace.workload
    speed = Speed(base_s=asked.base_s, slope_s=asked.slope_s, prefill_s=asked.prefill_s, max_batch=asked.max_batch)
    hardware = Hardware(
        speed=speed,
        num_engines=asked.engines,
        update_s=(asked.update_s,),
        update_token_s=asked.update_token_s,
        publish_s=asked.publish_s,
        is_separate=asked.separate,
        shared_tokens=asked.shared_tokens,
    )
    workload = synthetic(
        seed=asked.seed,
        turns=asked.turns,
        first_prompt=asked.first_prompt,
        observation=asked.observation,
        answer=asked.answer,
        tool_s=asked.tool_s,
        start_s=asked.start_s,
        score_s=asked.score_s,
    )
    return hardware, workload


def main() -> None:
    """Print the table."""
    asked = parse()
    if asked.validate:
        raw = json.loads(asked.validate.read_text(encoding="utf-8"))
        print(validation(raw, own_updates=asked.own_updates))
        return
    hardware, workload = site(asked)
    print(HEAD)
    for config in schedules(asked):
        started = time.perf_counter()
        slots = asked.slots or config.active_groups * config.group_size
        result = simulate(config, replace(hardware, slots=slots), workload, seed=asked.seed)
        print(row_of(config, result, time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main()
