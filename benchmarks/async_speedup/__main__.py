"""The same recipe with the same seeds, `sync` against `async`, where the tools of agents take long.

    python -m benchmarks.async_speedup [--quick] [--folder FOLDER]

A rollout's tools take twice its engine time in the mean: lognormal with sigma 1, where `sync` waits for the slowest, or
constant, where there is no slowest one. The engine time is measured first, by a `sync` run whose tools take no time.
All runs are `manege train` on this machine, one after the other, and meet the same tool times. Prints the table of the
benchmark and leaves speedup.json in the folder, which `python -m benchmarks.simulate_async --validate` reads.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.async_speedup.report import table
from benchmarks.async_speedup.runs import Arm, train
from benchmarks.async_speedup.waits import ToolTime
from benchmarks.simulate_async.trace import read_trace

_FACTOR = 2.0
"""Tool time over engine time."""
_SIGMA = {"lognormal": 1.0, "constant": 0.0}


def arms(asked: argparse.Namespace, mean_s: float, common: Sequence[str]) -> Iterator[Arm]:
    """Sync and async one after the other, so that whatever the machine does meets both."""
    how = [f"train.async_groups={asked.async_groups}", f"train.max_staleness={asked.max_staleness}"]
    for tools, num_seeds in (("lognormal", asked.seeds), ("constant", asked.constant_seeds)):
        for seed in range(num_seeds):
            for schedule, overrides in (("sync", []), ("async", how)):
                tool_time = ToolTime(mean_s=round(mean_s, 3), sigma=_SIGMA[tools], seed=seed)
                yield Arm(tools=tools, schedule=schedule, tool_time=tool_time, overrides=[*common, *overrides])


def parse() -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of all runs; complete ones are not made again; default: temporary")
    parser.add_argument("--json", type=Path, help="default: speedup.json in the folder")
    parser.add_argument("--seeds", type=int, default=5, help="of lognormal tools")
    parser.add_argument("--constant-seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--async-groups", type=int, default=12)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--target", type=float, default=0.7, help="held-out success whose time is compared")
    parser.add_argument("--quick", action="store_true", help="a seed each, 3 steps, few held-out tasks")
    asked = parser.parse_args()
    if asked.quick:
        asked.seeds = asked.constant_seeds = 1
        asked.steps = 3
    return asked


def benchmark(asked: argparse.Namespace, folder: Path) -> None:
    """Measure, and print after each run what is known so far."""
    folder.mkdir(parents=True, exist_ok=True)
    common = [f"train.steps={asked.steps}"]
    if asked.quick:
        common += ["tasks.num_heldout=16", "evaluation.num_interim=8"]
    alone = Arm(tools="none", schedule="sync", tool_time=ToolTime(mean_s=0, sigma=0, seed=0), overrides=common)
    runs = [train(alone, folder / alone.name)]
    trace = asyncio.run(read_trace(str(folder / alone.name)))
    mean_s = _FACTOR * trace.engine_s
    print(f"engine time of a rollout {trace.engine_s:.2f} s, so its tools take {mean_s:.2f} s in the mean", flush=True)
    file = asked.json or folder / "speedup.json"
    for arm in arms(asked, mean_s, common):
        runs.append(train(arm, folder / arm.name))
        file.write_text(json.dumps({"trace": trace.to_json(), "runs": runs}), encoding="utf-8")
        print(f"{arm.name}: {runs[-1]['train_s']:.0f} s, success {runs[-1]['final_success']:.0%}", flush=True)
    print(f"\n{table(runs, target=asked.target)}\n\nraw: {file}")


def main() -> None:
    """In a folder."""
    asked = parse()
    if asked.folder:
        benchmark(asked, asked.folder.absolute())
        return
    asked.json = asked.json or Path("speedup.json")
    with tempfile.TemporaryDirectory(prefix="manege-speedup-") as folder:
        benchmark(asked, Path(folder))


if __name__ == "__main__":
    main()
