"""What a run's rollouts would have taught under other settings.

Its steps are built again from the store by the trainer's own code, without an engine or agents. Shown are samples, the
ledger, advantages and the loss at the policy that sampled (pi = mu). Steps are `train.groups` complete groups in the
order of completion; after a resume, those that were trained again count again.
"""

import argparse
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from manege.cli.console import narrow_console
from manege.cli.rebuild import Rebuild, Sums
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
        rebuilds = {name: Rebuild(stored, config) for name, config in configs.items()}
        for rebuild in rebuilds.values():
            await rebuild.run()
    for name, rebuild in rebuilds.items():
        is_refilled = configs[name].credit.zero_variance == "refill"
        if not rebuild.steps:
            raise ConfigError(
                f"run {stored.id}, {name}: its complete groups make no step yet, which takes train.groups = "
                f"{configs[name].train.groups}" + (" whose rewards differ" if is_refilled else "")
            )
    if arguments.json:
        print(dumps({name: each.to_json() for name, each in rebuilds.items()}))
        return 0
    console = narrow_console()
    console.print(_table(f"run {stored.id}", {name: each.sums for name, each in rebuilds.items()}))
    for line in _remarks(arguments.settings, configs):
        console.print(Text(line, style="dim"))
    return 0


def _check(settings: Sequence[str]) -> None:
    for setting in settings:
        if not setting.startswith(_SETTABLE):
            raise ConfigError(f"--set {setting}: a replay reads only credit.* and {', '.join(_SETTABLE[1:])}")


def _table(title: str, columns: Mapping[str, Sums]) -> Table:
    table = Table(box=None, padding=(0, 4, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(title)
    for name in columns:
        table.add_column(name, justify="right")
    reasons = [reason for reason in Reason if any(sums.tokens[reason] for sums in columns.values())]
    is_refilled = any(sums.refilled for sums in columns.values())
    rows = [_cells(sums, reasons, is_refilled) for sums in columns.values()]
    for name in rows[0]:
        values = [row[name] for row in rows]
        table.add_row(name, *values, style="bold" if len(set(values)) > 1 else "")
    return table


def _cells(sums: Sums, reasons: Sequence[Reason], is_refilled: bool) -> Mapping[str, str]:
    sampled, mass = sum(sums.tokens.values()), sums.mass_success + sums.mass_failure

    def share(part: float, whole: float) -> str:
        return f"{part / whole:.1%}" if whole else "-"

    return {
        "steps": f"{sums.steps}",
        "groups": f"{sums.groups}",
        **({"  replaced by others": f"{sums.refilled}"} if is_refilled else {}),
        "  whose rewards differ": f"{sums.informative}",
        "rollouts": f"{sums.rollouts}",
        "  with a verdict": f"{sums.judged}",
        "samples": f"{sums.samples}",
        "  per rollout": f"{sums.samples / max(1, sums.with_samples):.3f}",
        "  rollouts with one": share(sums.with_one_sample, sums.with_samples),
        "sampled tokens": f"{sampled}",
        **{f"  {reason}": f"{sums.tokens[reason]} ({share(sums.tokens[reason], sampled)})" for reason in reasons},
        "  read again as context": f"{sums.context}",
        "unique tokens of all calls": share(sums.unique_tokens, sums.call_tokens),
        "mean |advantage|": f"{sums.advantage / max(1, sums.judged):.4f}",
        "loss at pi = mu": f"{round(sums.loss / max(1, sums.steps), 6) + 0.0:.6f}",
        "gradient mass, success": share(sums.mass_success, mass),
        "gradient mass, failure": share(sums.mass_failure, mass),
    }


def _remarks(settings: Sequence[str], configs: Mapping[str, RunConfig]) -> Sequence[str]:
    """What a reader of the table should know."""
    lines: list[str] = []
    if settings:
        lines.append(f"replayed: {' '.join(settings)}")
    unseen = [setting for setting in settings if setting.removeprefix("credit.").partition("=")[0] in _UNSEEN]
    if unseen:
        lines.append(f"{', '.join(unseen)}: changes nothing where the policy is still the one that sampled")
    if any(config.credit.shuffle_rewards for config in configs.values()):
        lines.append("rewards are shuffled as in a run that was never resumed")
    return lines
