"""A timeline as SVG or PNG: time from left to right, a bar per rollout, a band per update.

All boxes that look alike are one path, so that thousands of rollouts are a small file that opens at once. Matplotlib is
imported when something is drawn.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from manege.cli.timeline import Bar, Timeline, Update
from manege.errors import ConfigError
from manege.types import PolicyVersion, RolloutState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = ["draw_timeline"]

_Box = tuple[float, float, float, float]
"""Left, right, bottom, top."""
_TOOLS, _UNKNOWN, _UPDATE = "#dedede", "#8d99ae", "#000000"
_MARKS = {RolloutState.FAILED: "#e3120b", RolloutState.CANCELLED: "#000000"}
_UNITS = ((5400, 3600, "hours"), (180, 60, "minutes"), (0, 1, "seconds"))
"""From how many seconds on; seconds of one; its name."""
_LETTER_INCHES = 0.08
"""Of an update's label."""


def draw_timeline(timeline: Timeline, target: Path, *, title: str) -> None:
    """Write `target`, whose ending says how. Raises ConfigError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a timeline needs matplotlib: pip install 'manege[train]'") from error

    # A bar is a third of an inch long on average and a lane a fifth high, within what a screen can show.
    width = min(max(len(timeline.bars) / timeline.num_lanes / 3, 9), 18)
    height = min(max(timeline.num_lanes / 5, 1.2), 8)
    figure = Figure(figsize=(width, height + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    duration_s = timeline.end_s - timeline.start_s
    unit_s, unit = next((seconds, name) for least_s, seconds, name in _UNITS if duration_s >= least_s)
    scale, colours = _Scale(timeline.start_s, unit_s), _Colours(timeline)
    axes = _axes(figure, scale(timeline.end_s), timeline.num_lanes)
    axes.set_xlabel(f"{unit} since the start")
    axes.set_title(title.encode("unicode_escape").decode(), loc="left", pad=18, fontsize=11, parse_math=False)
    _draw(axes, "rollouts", [scale.box(bar.start_s, bar.end_s, bar) for bar in timeline.bars], facecolor=_TOOLS)
    _draw_updates(axes, timeline.updates, scale, width)
    _draw_calls(axes, timeline.bars, scale, colours)  # over the updates, or their colours would not be the legend's
    _draw_ends(axes, timeline.bars, scale)
    _draw_legend(figure, timeline, colours)
    _draw_versions(figure, axes, colours, height)
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error


def _axes(figure: "Figure", right: float, num_lanes: int) -> "Axes":
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    right = right or 1.0
    axes.set(xlim=(-0.005 * right, 1.005 * right), ylim=(-0.3, num_lanes + 0.3), ylabel="rollouts at once")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    return axes


class _Scale:
    """Seconds since the epoch to places on the axis."""

    def __init__(self, start_s: float, unit_s: float) -> None:
        self._start_s, self._unit_s = start_s, unit_s

    def __call__(self, time_s: float) -> float:
        return (time_s - self._start_s) / self._unit_s

    def box(self, start_s: float, end_s: float, bar: Bar) -> _Box:
        """A part of a bar; those of evaluations are thin."""
        margin = 0.1 if bar.is_train else 0.3
        return self(start_s), self(end_s), bar.lane + margin, bar.lane + 1 - margin

    def line(self, time_s: float, bar: Bar) -> _Box:
        """Over the whole lane."""
        return self(time_s), self(time_s), bar.lane, bar.lane + 1


class _Colours:
    """From dark to light by version."""

    def __init__(self, timeline: Timeline) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import ListedColormap

        seen = {piece.version for bar in timeline.bars for piece in bar.pieces}
        known = [version for version in seen if version is not None] or [PolicyVersion(0)]
        self.has_unknown = None in seen
        self.first, self.last = min(known), max(known)
        num = self.last - self.first + 1
        self.map: Colormap = ListedColormap(colormaps["viridis"](np.linspace(0.1, 0.97, num)))

    def of(self, version: PolicyVersion | None) -> Any:
        return _UNKNOWN if version is None else self.map(version - self.first)


def _draw_calls(axes: "Axes", bars: Sequence[Bar], scale: _Scale, colours: _Colours) -> None:
    boxes: dict[PolicyVersion | None, list[_Box]] = defaultdict(list)
    for bar in bars:
        for piece in bar.pieces:
            boxes[piece.version].append(scale.box(piece.start_s, piece.end_s, bar))
    for version, some in boxes.items():
        name = "unknown" if version is None else f"version-{version}"
        _draw(axes, name, some, facecolor=colours.of(version))


def _draw_ends(axes: "Axes", bars: Sequence[Bar], scale: _Scale) -> None:
    """Lines, as wide on paper whatever the time is: between bars of a lane, and at the end of what did not succeed."""
    _draw(axes, "starts", [scale.box(bar.start_s, bar.start_s, bar) for bar in bars], edgecolor="white", linewidth=1)
    for state, colour in _MARKS.items():
        ends = [scale.line(bar.end_s, bar) for bar in bars if bar.state is state]
        _draw(axes, state.value, ends, edgecolor=colour, linewidth=2)


def _draw_updates(axes: "Axes", updates: Sequence[Update], scale: _Scale, width: float) -> None:
    from matplotlib.transforms import blended_transform_factory

    transform = blended_transform_factory(axes.transData, axes.transAxes)
    boxes = [(scale(each.start_s), scale(each.end_s), 0.0, 1.0) for each in updates]
    _draw(axes, "updates", boxes, facecolor=_UPDATE, alpha=0.25, transform=transform)
    left, right = axes.get_xlim()
    free = left
    for update, box in zip(updates, boxes, strict=True):
        middle, label = (box[0] + box[1]) / 2, f"v{update.version}"
        if middle >= free:
            axes.text(middle, 1.01, label, transform=transform, ha="center", va="bottom", fontsize=8)
            free = middle + (len(label) + 1) * _LETTER_INCHES / width * (right - left)


def _draw(axes: "Axes", name: str, boxes: Sequence[_Box], **look: Any) -> None:
    """As one path, named in an SVG."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if not boxes:
        return
    corners_N52 = np.asarray([((x0, y0), (x0, y1), (x1, y1), (x1, y0), (x0, y0)) for x0, x1, y0, y1 in boxes])
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY] * len(boxes)
    outline = Outline(corners_N52.reshape(-1, 2), codes)
    patch = PathPatch(outline, gid=name, **{"linewidth": 0, **look})
    patch.set_in_layout(False)  # it lies within the axes, and to measure it takes seconds
    axes.add_artist(patch)


def _draw_legend(figure: "Figure", timeline: Timeline, colours: _Colours) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    states = {bar.state for bar in timeline.bars}
    some = colours.of(colours.first)
    keys = [
        (Patch(color=some, label="model call, by policy version"), True),
        (Patch(color=_UNKNOWN, label="version not known"), colours.has_unknown),
        (Patch(color=_TOOLS, label="between calls: tools"), True),
        (Line2D([], [], color=some, linewidth=3, label="evaluation"), not all(bar.is_train for bar in timeline.bars)),
        *(
            (Line2D([], [], color=_MARKS[state], ls="", marker="|", mew=2, ms=9, label=state.value), state in states)
            for state in _MARKS
        ),
        (
            Patch(color=_UPDATE, alpha=0.25, linewidth=0, label="update"),
            bool(timeline.updates),
        ),
    ]
    handles = [handle for handle, is_there in keys if is_there]
    figure.legend(handles=handles, loc="outside lower left", ncols=7, frameon=False, fontsize=8, columnspacing=1.5)


def _draw_versions(figure: "Figure", axes: "Axes", colours: _Colours, height: float) -> None:
    """What colour is which."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm
    from matplotlib.ticker import MaxNLocator

    norm = BoundaryNorm(np.arange(colours.first, colours.last + 2) - 0.5, colours.map.N)
    bar = figure.colorbar(ScalarMappable(norm, colours.map), ax=axes, aspect=height / 0.12, pad=0.01)
    bar.set_label("policy version", fontsize=8)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    bar.ax.tick_params(labelsize=8, length=0)
    bar.ax.minorticks_off()
