"""What a curation did, for people and for programs: report.md with a picture of the funnel, and report.json."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from manege.curation.funnel import draw_funnel
from manege.curation.pipeline import Report, StepReport
from manege.errors import ConfigError

__all__ = ["sentence", "write_report"]

_MEANING: Mapping[str, str] = {
    "not_empty": "has a statement",
    "has_ref": "its branch exists",
    "at_most": "not too many tests",
    "decontaminate": "not of the evaluation",
    "probe": "tried by an agent",
    "select": "can be learnt from",
    "split": "train and held-out",
}


def sentence(step: StepReport) -> str:
    """One line of a step."""
    counts = [f"{number:,} {reason}" for reason, number in step.dropped.items()]
    return f"{step.kind}: {step.num_in:,} -> {step.num_out:,}" + (f" (dropped: {', '.join(counts)})" if counts else "")


def write_report(report: Report, folder: Path) -> str | None:
    """Into the folder; returns why there is no picture, None: there is one. Raises ConfigError."""
    lack = None
    try:
        for ending in ("svg", "png"):
            draw_funnel(report, folder / f"funnel.{ending}", names=_MEANING)
    except ConfigError as error:
        lack = str(error)
    try:
        (folder / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(_page(report, has_picture=lack is None), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report in {folder} cannot be written: {error}") from error
    return lack


def _page(report: Report, *, has_picture: bool) -> str:
    lines = [f"# Curation {report.name}", ""]
    if has_picture:
        lines += ["![Rows after each step](funnel.svg)", ""]
    lines += ["| step | rows in | dropped | rows out |", "|---|---:|---|---:|"]
    for number, step in enumerate(report.steps, start=1):
        dropped = "<br>".join(f"{count:,} {reason}" for reason, count in step.dropped.items())
        name = f"{number}. {step.kind}: {_MEANING[step.kind]}"
        lines.append(f"| {name} | {step.num_in:,} | {dropped} | {step.num_out:,} |")
    for number, step in enumerate(report.steps, start=1):
        if step.kept:
            total = max(step.num_out, 1)
            lines += ["", f"## What step {number}, {step.kind}, kept", "", "| kind | rows | share |", "|---|---:|---:|"]
            lines += [f"| {kind} | {count:,} | {count / total:.1%} |" for kind, count in step.kept.items()]
    lines += ["", "## Files", "", "| file | rows |", "|---|---:|"]
    lines += [f"| {Path(output.path).name} | {output.num_rows:,} |" for output in report.outputs]
    return "\n".join(lines) + "\n"
