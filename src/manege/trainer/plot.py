"""The reward curve of a run as PNG and SVG, from its metrics alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_curve"]


def plot_curve(rows: Sequence[Mapping[str, Any]], target: Path, *, title: str) -> None:
    """Write `target`.png and `target`.svg; nothing when no step is recorded."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [row for row in rows if row["kind"] == "step"]
    if not steps:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    numbers = [row["step"] for row in steps]
    axes.plot(numbers, [row["reward_mean"] for row in steps], color="C0", marker="o", ms=3, label="mean reward")
    axes.plot(numbers, [row["success_rate"] for row in steps], color="C2", marker="s", ms=3, label="success rate")
    temperatures = sorted({row["temperature"] for row in rows if row["kind"] == "evaluation"}, reverse=True)
    for number, temperature in enumerate(temperatures):
        points = [row for row in rows if row["kind"] == "evaluation" and row["temperature"] == temperature]
        rates = [row["success_rate"] for row in points]
        errors = [
            [max(0.0, row["success_rate"] - row["low"]) for row in points],
            [max(0.0, row["high"] - row["success_rate"]) for row in points],
        ]
        name = "greedy" if temperature == 0 else f"T = {temperature:g}"
        # Beside each other: several temperatures are evaluated at the same step.
        x = [row["step"] + 0.12 * number for row in points]
        axes.errorbar(x, rates, errors, color=f"C{3 + number}", fmt="D", capsize=3, label=f"held-out success, {name}")
    axes.set(xlabel="optimiser step", ylim=(-0.03, 1.05), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(target.with_suffix(".png"), dpi=150)
    figure.savefig(target.with_suffix(".svg"))
