"""The funnel of a curation as SVG or PNG: a bar per step, as long as rows went on, and beside it what was dropped."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from manege.curation.pipeline import Report
from manege.errors import ConfigError

__all__ = ["draw_funnel"]

_KEPT, _DROPPED = "#2a6f97", "#dedede"


def draw_funnel(report: Report, target: Path, *, names: Mapping[str, str]) -> None:
    """Write `target`, whose ending says how. `names`: of kinds of steps, for people. Raises ConfigError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a funnel needs matplotlib: pip install 'manege[train]'") from error

    bars = _bars(report, names)
    figure = Figure(figsize=(9, 0.55 * len(bars) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(bars))
    axes.barh(places, [before for _, before, _, _ in bars], color=_DROPPED, height=0.72)
    axes.barh(places, [after for _, _, after, _ in bars], color=_KEPT, height=0.72)
    longest = bars[0][1] or 1
    for place, (_, before, after, reasons) in zip(places, bars, strict=True):
        label = f"{after:,}" + (f"   {reasons}" if reasons else "")
        axes.text(before + 0.01 * longest, place, label, va="center", fontsize=8, parse_math=False)
    axes.set_yticks(places, [name for name, *_ in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.75 * longest), xticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_title(f"{report.name}: rows after each step", loc="left", fontsize=11, parse_math=False)
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error


def _bars(report: Report, names: Mapping[str, str]) -> Sequence[tuple[str, int, int, str]]:
    """Name, rows before and after, and why the others are gone."""
    first = report.steps[0].num_in if report.steps else sum(output.num_rows for output in report.outputs)
    bars = [("rows", first, first, "")]
    for step in report.steps:
        reasons = ", ".join(f"-{count:,} {reason}" for reason, count in step.dropped.items())
        bars.append((names[step.kind], step.num_in, step.num_out, reasons))
    return bars
