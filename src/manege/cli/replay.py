"""What a run's rollouts would have taught under other settings.

Its steps are built again from the store by the trainer's own code, without an engine or agents. Shown are samples, the
ledger, advantages and the loss at the policy that sampled (pi = mu). Steps are `train.groups` complete groups in the
order of completion; those that were asked for again under another config count again.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from manege.cli.console import narrow_console
from manege.cli.rebuild import rebuild
from manege.cli.stored import add_stored_arguments, stored_run
from manege.config import RunConfig
from manege.errors import ConfigError
from manege.store.codec import dumps
from manege.trainer.algo.ledger import Reason

EXAMPLES = """examples:
  manege replay runs/finder
  manege replay runs/finder --set credit.advantage=grpo --set credit.weighting=token_mean
  manege replay runs/finder --set credit.level=sample --set credit.weighting=sample_mean --json
"""
_SETTABLE = ("credit.", "scorer.success_reward", "train.groups", "train.mini_batches", "train.max_sample_tokens")
Steps = Sequence[Mapping[str, Any]]
_UNSEEN = ("clip_low", "clip_high", "dual_clip", "ratio", "mismatch_level", "mismatch_cap", "mismatch_band", "kl")
"""Keys of `credit` that change nothing at pi = mu."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add_stored_arguments(parser)
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of the replay, for example credit.advantage=rloo; all of them together are one replay",
    )
    parser.add_argument("--json", action="store_true", help="data on stdout, with the metrics of every step")


async def execute(arguments: argparse.Namespace) -> int:
    """Build the steps as they were and, with settings, as they would have been."""
    async with stored_run(arguments) as stored:
        configs = {"as run": stored.config()}
        if arguments.settings:
            _check(arguments.settings)
            configs["replayed"] = stored.config(arguments.settings)
        columns = {name: await rebuild(stored, config) for name, config in configs.items()}
    for name, steps in columns.items():
        if not steps:
            raise ConfigError(
                f"run {stored.id}, {name}: its complete groups make no step yet, which takes train.groups = "
                f"{configs[name].train.groups}"
                + " whose rewards differ"
                * (configs[name].credit.zero_variance == "refill")
            )
    if arguments.json:
        print(dumps(columns))
        return 0
    console = narrow_console()
    console.print(_table(f"run {stored.id}", columns))
    for line in _remarks(arguments.settings, configs):
        console.print(Text(line, style="dim"))
    return 0


def _check(settings: Sequence[str]) -> None:
    for setting in settings:
        if not setting.startswith(_SETTABLE):
            raise ConfigError(f"--set {setting}: a replay reads only credit.* and {', '.join(_SETTABLE[1:])}")


def _table(title: str, columns: Mapping[str, Steps]) -> Table:
    table = Table(box=None, padding=(0, 4, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(title)
    for name in columns:
        table.add_column(name, justify="right")
    reasons = [reason for reason in Reason if any(_tokens(steps, reason) for steps in columns.values())]
    rows = [_cells(steps, reasons) for steps in columns.values()]
    for name in rows[0]:
        values = [row[name] for row in rows]
        table.add_row(name, *values, style="bold" if len(set(values)) > 1 else "")
    return table


def _tokens(steps: Steps, reason: Reason) -> int:
    return sum(step["tokens_by_reason"].get(reason.value, 0) for step in steps)


def _cells(steps: Steps, reasons: Sequence[Reason]) -> Mapping[str, str]:
    """Counts are sums over the steps, the others means."""

    def total(*names: str) -> Any:
        return sum(step[name] for step in steps for name in names)

    def mean(name: str, form: str) -> str:
        return format(round(total(name) / len(steps), 6) + 0.0, form)

    sampled, mass = total("sampled_tokens"), total("mass_success", "mass_failure")
    return {
        "steps": f"{len(steps)}",
        "groups": f"{total('informative_groups', 'constant_groups')}",
        "  whose rewards differ": f"{total('informative_groups')}",
        "  replaced by others": f"{total('refilled_groups')}",
        "rollouts": f"{total('num_rollouts')}",
        "  with a verdict": f"{total('num_verdicts')}",
        **({"  flagged": f"{total('flagged')}"} if total("flagged") else {}),
        "samples": f"{total('num_samples')}",
        "  per rollout": mean("samples_per_rollout", ".3f"),
        "  rollouts with one": mean("one_sample_fraction", ".1%"),
        "sampled tokens": f"{sampled}",
        **{f"  {name}": f"{(n := _tokens(steps, name))} ({n / max(1, sampled):.1%})" for name in reasons},
        "  read again as context": f"{total('context_tokens')}",
        "unique tokens of all calls": mean("call_unique_fraction", ".1%"),
        "mean |advantage|": mean("advantage_size", ".4f"),
        "loss at pi = mu": mean("loss", ".6f"),
        "gradient mass, success": f"{total('mass_success') / (mass or 1):.1%}",
        "gradient mass, failure": f"{total('mass_failure') / (mass or 1):.1%}",
    }


def _remarks(settings: Sequence[str], configs: Mapping[str, RunConfig]) -> Sequence[str]:
    """What a reader of the table should know."""
    lines: list[str] = []
    if settings:
        lines.append(f"replayed: {' '.join(settings)}")
    unseen = [setting for setting in settings if setting.removeprefix("credit.").partition("=")[0] in _UNSEEN]
    if unseen:
        lines.append(f"{', '.join(unseen)}: changes nothing where the policy is still the one that sampled")
    return lines
