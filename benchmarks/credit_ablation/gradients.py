"""The bias of each setting's gradient, at the warm model and later in training; one JSON line each.

    nice -n 10 python -m benchmarks.credit_ablation.gradients --out runs/credit_ablation/gradients.jsonl

All settings see the same rollouts. The truths are `per rollout`, where advantage and loss both count rollouts
(`rollout/rollout_mean`), and `expected success`: the same advantages without any length term (`constant`), which is the
gradient of the success rate itself, up to a factor.
"""

import argparse
import asyncio
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.credit_ablation.bias import measure
from benchmarks.credit_ablation.meter import Gradient, Meter
from benchmarks.credit_ablation.one_core import one_core
from benchmarks.credit_ablation.tasks import KINDS
from benchmarks.credit_ablation.trial import MODEL, SETTINGS, Trial, to_batch
from manege.config import CreditConfig
from manege.model.folder import open_folder

CHUNKS, STEPS_PER_CHUNK = 24, 8
LATER = {"retry": 5, "gather": 12}
"""Steps of `rollout/rollout_mean` after which about half of the rollouts succeed."""
PER_ROLLOUT, EXPECTED_SUCCESS = "rollout/rollout_mean", "rollout/constant"
FLOOR = "rollout/rollout_mean, other rollouts"
CREDITS = {**SETTINGS, EXPECTED_SUCCESS: CreditConfig(weighting="constant", constant_tokens=32)}


async def readings(trial: Trial, num_chunks: int) -> tuple[Mapping[str, Gradient], float]:
    """By setting (chunks, P), all of the same rollouts, and the success rate of those."""
    meter = Meter(trial.model, open_folder(str(MODEL)))
    found: dict[str, list[Gradient]] = {name: [] for name in CREDITS}
    successes: list[float] = []
    for _ in range(num_chunks):
        batches = await trial.collect(STEPS_PER_CHUNK)
        await trial.engine.pause()
        for name, credit in CREDITS.items():
            built = [to_batch(groups, credit) for groups in batches]
            found[name].append(meter.read([batch.samples for batch in built], credit))
            successes += [batch.metrics["success_rate"] for batch in built]
        await trial.engine.resume()
    return {name: np.stack(parts) for name, parts in found.items()}, float(np.mean(successes))


async def study(kind: str, steps: int, num_chunks: int) -> Sequence[Mapping[str, Any]]:
    """Rows for the policy after so many steps."""
    started = time.process_time()
    async with Trial(kind, seed=1000) as trial:
        credit = SETTINGS[PER_ROLLOUT]
        for _ in range(steps):
            [groups] = await trial.collect()
            await trial.update(to_batch(groups, credit), credit)
        gradients, success = await readings(trial, num_chunks)
    key = {"kind": kind, "after_steps": steps, "success": success, "num_steps": num_chunks * STEPS_PER_CHUNK}
    return [{**key, **row, "cpu_s": time.process_time() - started} for row in distances(gradients)]


def distances(gradients: Mapping[str, Gradient]) -> Sequence[Mapping[str, Any]]:
    """Of every setting from both truths; last, of the per-rollout truth from itself as other rollouts tell it."""
    of_truth = gradients[PER_ROLLOUT]
    pairs = [
        (setting, truth, gradients[setting], gradients[truth])
        for setting in SETTINGS
        for truth in (PER_ROLLOUT, EXPECTED_SUCCESS)
    ]
    pairs.append((FLOOR, PER_ROLLOUT, of_truth[0::2], of_truth[1::2]))
    return [
        {
            "setting": setting,
            "truth": truth,
            **dataclasses.asdict(measure(own, true, steps_per_chunk=STEPS_PER_CHUNK)),
        }
        for setting, truth, own, true in pairs
    ]


def main() -> None:
    """Run and append to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with one_core(), asked.out.open("a") as out:
        for kind in asked.kinds:
            for steps in (0, LATER[kind]):
                rows = asyncio.run(study(kind, steps, asked.chunks))
                out.writelines(json.dumps(row) + "\n" for row in rows)
                out.flush()
                print(f"{kind} after {steps} steps, success {rows[0]['success']:.2f}, {rows[0]['cpu_s']:.0f} s")


if __name__ == "__main__":
    main()
