"""One training of the benchmark, as a user would start it, and what its metrics say.

A run that is complete in its folder is not made again. Weights are removed after a run: they are gigabytes, and nothing
here reads them.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.async_speedup.waits import ToolTime
from benchmarks.simulate_async.trace import update_seconds
from manege.trainer.metrics import read_metrics

__all__ = ["Arm", "measured", "train"]

_ROOT = Path(__file__).parents[2]
_RUN_FILE = Path(__file__).with_name("run.toml")
_DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A schedule with tools that take their time."""

    tools: str
    """`none`, `lognormal` or `constant`."""
    schedule: str
    tool_time: ToolTime
    """Its seed is the run's, too."""
    overrides: Sequence[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return f"{self.tools}-{self.schedule}-{self.tool_time.seed}"


def train(arm: Arm, folder: Path) -> Mapping[str, Any]:
    """Train in a process of its own; raises CalledProcessError. Its output is beside the run's files."""
    if not (folder / _DONE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        log = folder.with_suffix(".log")
        command = [
            str(Path(sys.executable).with_name("manege")),
            "train",
            str(_RUN_FILE),
            f"folder={folder}",
            f"seed={arm.tool_time.seed}",
            f"agent.env.TOOL_TIME={arm.tool_time}",
            f"train.schedule={arm.schedule}",
            *arm.overrides,
        ]
        with log.open("w") as output:
            subprocess.run(
                command,
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
                stdout=output,
                stderr=output,
                check=True,
            )
        for name in ("checkpoints", "model"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / _DONE).touch()
    return measured(arm, folder)


def measured(arm: Arm, folder: Path) -> Mapping[str, Any]:
    """Plain JSON."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    ages = [int(age) for row in steps for age, number in row["staleness_histogram"].items() for _ in range(number)]
    curve = _curve(rows)
    return {
        "tools": arm.tools,
        "schedule": arm.schedule,
        "seed": arm.tool_time.seed,
        "tool_time": str(arm.tool_time),
        "train": config["train"],
        "slots": config["controller"]["slots"],
        "evaluate_every": config["evaluation"]["every"],
        "num_interim": config["evaluation"]["num_interim"],
        "train_s": steps[-1]["train_s"],
        "wall_s": steps[-1]["time_s"] - max(row["time_s"] for row in rows if _is_before(row)),
        "trainer_idle_s": sum(row["trainer_idle_s"] for row in steps),
        "engine_idle_s": sum(row.get("engine_idle_s", 0.0) for row in steps),
        "update_s": update_seconds(rows),
        "num_rollouts": sum(row["num_rollouts"] for row in steps),
        "num_tokens": sum(row["sampled_tokens"] for row in steps),
        "staleness_mean": sum(ages) / len(ages),
        "staleness_max": max(ages),
        "dropped_rollouts": sum(row["dropped_rollouts"] for row in steps),
        "curve": curve,
        "final_success": curve[-1][1],
    }


def _is_before(row: Mapping[str, Any]) -> bool:
    """An evaluation before training."""
    return row["kind"] == "evaluation" and row["step"] == 0


def _curve(rows: Sequence[Mapping[str, Any]]) -> Sequence[tuple[float, float]]:
    """Seconds of training until the newest policy that an evaluation saw, and the held-out success; by time."""
    known = [(row["policy_version"], row["train_s"]) for row in rows if row["kind"] == "step"]
    evaluations = sorted((row for row in rows if row["kind"] == "evaluation"), key=lambda row: row["step"])
    return [
        (
            max((seconds for version, seconds in known if version <= row["policy_version_last"]), default=0.0)
            if row["step"] < len(known)
            else known[-1][1],
            row["success_rate"],
        )
        for row in evaluations
    ]
