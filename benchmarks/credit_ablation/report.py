"""Tables (Markdown, on stdout) and the figure of the study, from the JSON lines of `curves` and `gradients`.

    python -m benchmarks.credit_ablation.report --curves runs/credit_ablation/curves.jsonl \\
        --gradients runs/credit_ablation/gradients.jsonl --figure docs/study/credit-ablation.png

Intervals of learning are 95 % bootstrap intervals over seeds; differences are between equal seeds.

Shape legend: R seeds, S steps.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from benchmarks.credit_ablation.gradients import EXPECTED_SUCCESS, FLOOR, PER_ROLLOUT
from benchmarks.credit_ablation.tasks import KINDS
from benchmarks.credit_ablation.trial import SETTINGS

matplotlib.use("Agg")
from matplotlib import pyplot

Rows = Sequence[Mapping[str, Any]]
FloatMatrix = npt.NDArray[np.float64]

GOAL, WINDOW = 0.8, 3
"""Steps to a success rate of 80 %, averaged over three steps."""
LAST = 5
COLOURS = dict(zip(SETTINGS, ("#c0392b", "#e59866", "#8e44ad", "#2980b9", "#1e8449"), strict=True))


def read_lines(path: Path) -> Rows:
    """One JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_seed(rows: Rows, kind: str, setting: str, field: str) -> FloatMatrix:
    """(R, S) of a field of the steps; nan where it is absent."""
    steps = [row for row in rows if row["row"] == "step" and row["kind"] == kind and row["setting"] == setting]
    seeds = sorted({row["seed"] for row in steps})
    values = [[row[field] for row in steps if row["seed"] == seed] for seed in seeds]
    return np.array(values, np.float64)


def bootstrap(values_R: FloatMatrix, statistic: Callable[..., FloatMatrix] = np.mean) -> tuple[float, float, float]:
    """The statistic and its 95 % interval."""
    picks = np.random.default_rng(0).integers(0, len(values_R), (2000, len(values_R)))
    low, high = np.quantile(statistic(values_R[picks], axis=1), [0.025, 0.975])
    return float(statistic(values_R, axis=0)), float(low), float(high)


def steps_to_goal(success_RS: FloatMatrix) -> FloatMatrix:
    """(R,) The first step whose window reaches the goal; one more than there are, where none does."""
    smooth = np.apply_along_axis(lambda row: np.convolve(row, np.ones(WINDOW) / WINDOW, "valid"), 1, success_RS)
    reached = smooth >= GOAL
    return np.where(reached.any(1), reached.argmax(1) + WINDOW, success_RS.shape[1] + 1).astype(np.float64)


def interval(values: tuple[float, float, float], form: str = ".2f") -> str:
    """Value and interval as text."""
    value, low, high = (format(number, form) for number in values)
    return f"{value} [{low}, {high}]"


def learning_table(rows: Rows, kind: str) -> Sequence[str]:
    """How each setting learns."""
    reference_R = by_seed(rows, kind, PER_ROLLOUT, "success").mean(1)
    lines = [
        f"| {kind} | mean success over training | less `{PER_ROLLOUT}` | steps to {GOAL:.0%} | last {LAST} steps "
        "| held out, sampled | held out, greedy |",
        "|---|---|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        success_RS = by_seed(rows, kind, setting, "success")
        mean_R = success_RS.mean(1)
        trials = [row for row in rows if row["row"] == "trial" and (row["kind"], row["setting"]) == (kind, setting)]
        sampled_R, greedy_R = (np.array([row[f"after_{name}"] for row in trials]) for name in ("sampled", "greedy"))
        less = "" if setting == PER_ROLLOUT else interval(bootstrap(mean_R - reference_R), "+.3f")
        cells = [
            interval(bootstrap(mean_R), ".3f"),
            less,
            interval(bootstrap(steps_to_goal(success_RS)), ".1f"),
            interval(bootstrap(success_RS[:, -LAST:].mean(1))),
            interval(bootstrap(sampled_R)),
            interval(bootstrap(greedy_R)),
        ]
        lines.append(f"| `{setting}` | " + " | ".join(cells) + " |")
    return lines


def gradient_table(rows: Rows, kind: str, after_steps: int) -> Sequence[str]:
    """How far each setting's gradient is from both truths."""
    here = [row for row in rows if row["kind"] == kind and row["after_steps"] == after_steps]
    lines = [
        f"| {kind}, after {after_steps} steps (success {here[0]['success']:.0%}) | cosine, per rollout "
        "| bias, per rollout | length | cosine, expected success | noise of one step |",
        "|---|---|---|---|---|---|",
    ]
    found = {(row["setting"], row["truth"]): row for row in here}
    for setting in (*SETTINGS, FLOOR):
        rollout, success = found[setting, PER_ROLLOUT], found.get((setting, EXPECTED_SUCCESS))
        shown = [rollout["cosine"], rollout["bias"], rollout["length"], success and success["cosine"], rollout["noise"]]
        cells = ["" if item is None else interval((item["value"], item["low"], item["high"])) for item in shown]
        lines.append(f"| `{setting}` | " + " | ".join(cells) + " |")
    return lines


def draw_curves(axes: Axes, rows: Rows, kind: str) -> None:
    """Success per step."""
    for setting, colour in COLOURS.items():
        success_RS = by_seed(rows, kind, setting, "success")
        mean, low, high = np.array([bootstrap(column_R) for column_R in success_RS.T]).T
        steps = np.arange(1, len(mean) + 1)
        axes.plot(steps, mean, color=colour, label=setting, linewidth=1.4)
        axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set(title=f"{kind}: success per step", xlabel="step", ylim=(0, 1))


def draw_samples(axes: Axes, rows: Rows) -> None:
    """Samples per rollout of successes and failures, over all settings."""
    for kind, style in zip(KINDS, ("-", "--"), strict=True):
        for field, colour in (("samples_of_successes", "#1e8449"), ("samples_of_failures", "#c0392b")):
            values = np.concatenate([by_seed(rows, kind, setting, field) for setting in SETTINGS])
            mean = np.nanmean(values, axis=0)
            label = f"{kind}, {field.rpartition('_')[2]}"
            axes.plot(np.arange(1, len(mean) + 1), mean, style, color=colour, label=label, linewidth=1.4)
    axes.set(title="samples per rollout", xlabel="step")
    axes.legend(fontsize=7)


def draw_cosines(axes: Axes, rows: Rows) -> None:
    """Of each setting's mean gradient: filled with the per-rollout one, open with that of the success rate."""
    places = sorted({(list(KINDS).index(row["kind"]), row["after_steps"], row["kind"]) for row in rows})
    found = {(row["kind"], row["after_steps"], row["setting"], row["truth"]): row["cosine"] for row in rows}
    for truth, face, shift in ((PER_ROLLOUT, None, -0.03), (EXPECTED_SUCCESS, "white", 0.03)):
        for offset, (setting, colour) in enumerate(COLOURS.items()):
            for place, (_, steps, kind) in enumerate(places):
                cosine = found[kind, steps, setting, truth]
                x = place + (offset - 2) * 0.15 + shift
                axes.plot([x, x], [cosine["low"], cosine["high"]], color=colour, linewidth=1)
                axes.plot(x, cosine["value"], "o", color=colour, markerfacecolor=face or colour, markersize=4)
    axes.set_xticks(range(len(places)), [f"{kind},\nstep {steps}" for _, steps, kind in places], fontsize=8)
    axes.axhline(1, color="grey", linewidth=0.6)
    axes.set(title="cosine: per rollout (filled), success (open)", ylim=(0, 1.05))


def draw(curves: Rows, gradients: Rows, path: Path) -> None:
    """The figure."""
    figure, grid = pyplot.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    for axes, kind in zip(grid[0], KINDS, strict=True):
        draw_curves(axes, curves, kind)
    grid[0][0].legend(fontsize=7, title="advantage / loss", title_fontsize=7, loc="lower right")
    draw_samples(grid[1][0], curves)
    draw_cosines(grid[1][1], gradients)
    for axes in grid.flat:
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.25, linewidth=0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Print the tables and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("curves", "gradients", "figure"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    asked = parser.parse_args()
    curves, gradients = read_lines(asked.curves), read_lines(asked.gradients)
    for kind in KINDS:
        print("\n".join(learning_table(curves, kind)) + "\n")
    places = {(row["kind"], row["after_steps"]) for row in gradients}
    for kind, steps in sorted(places, key=lambda place: (list(KINDS).index(place[0]), place[1])):
        print("\n".join(gradient_table(gradients, kind, steps)) + "\n")
    draw(curves, gradients, asked.figure)


if __name__ == "__main__":
    main()
