"""Learning curves: every setting, kind of task and seed, one JSON line per step and one per trial.

    nice -n 10 python -m benchmarks.credit_ablation.curves --out runs/credit_ablation/curves.jsonl

Equal seeds see equal tasks under every setting.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.credit_ablation.one_core import one_core
from benchmarks.credit_ablation.tasks import KINDS
from benchmarks.credit_ablation.trial import SETTINGS, TRAIN, Trial, to_batch
from manege.trainer.algo.forest import build_forest
from manege.trainer.algo.samples import build_samples
from manege.trainer.collect import Group

STEPS = {"retry": 24, "gather": 40}
"""Enough for every setting to come to rest."""


def num_samples(groups: Sequence[Group], *, success: bool) -> float | None:
    """Samples per rollout of those that succeeded or failed; None: there were none."""
    counts = [
        len(build_samples(build_forest(calls))[0])
        for group in groups
        for rollout, calls in zip(group.rollouts, group.calls, strict=True)
        if (rollout.reward == 1.0) is success
    ]
    return float(np.mean(counts)) if counts else None


async def train(kind: str, setting: str, seed: int, *, steps: int, learning_rate: float) -> Sequence[Mapping[str, Any]]:
    """All rows of one trial."""
    started, rows = time.process_time(), list[Mapping[str, Any]]()
    key = {"kind": kind, "setting": setting, "seed": seed, "learning_rate": learning_rate}
    credit = SETTINGS[setting]
    async with Trial(kind, seed=seed, train=TRAIN.model_copy(update={"learning_rate": learning_rate})) as trial:
        before = {f"before_{name}": await trial.evaluate(greedy=name == "greedy") for name in ("sampled", "greedy")}
        for step in range(1, steps + 1):
            [groups] = await trial.collect()
            batch = to_batch(groups, credit)
            await trial.update(batch, credit)
            rows.append(
                {
                    "row": "step",
                    **key,
                    "step": step,
                    "success": batch.metrics["success_rate"],
                    "samples_of_successes": num_samples(groups, success=True),
                    "samples_of_failures": num_samples(groups, success=False),
                    "informative_groups": batch.metrics["informative_groups"],
                }
            )
        after = {f"after_{name}": await trial.evaluate(greedy=name == "greedy") for name in ("sampled", "greedy")}
    rows.append({"row": "trial", **key, **before, **after, "cpu_s": time.process_time() - started})
    return rows


def main() -> None:
    """Run and append to the file, trial by trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=TRAIN.learning_rate)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with one_core(), asked.out.open("a") as out:
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            for kind in asked.kinds:
                for setting in asked.settings:
                    rows = asyncio.run(train(kind, setting, seed, steps=STEPS[kind], learning_rate=asked.learning_rate))
                    out.writelines(json.dumps(row) + "\n" for row in rows)
                    out.flush()
                    last = [row["success"] for row in rows[:-1][-5:]]
                    print(f"{kind} {setting} seed {seed}: {np.mean(last):.2f}, {rows[-1]['cpu_s']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
