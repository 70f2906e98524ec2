"""`manege eval --rescore RUN`: stored rollouts scored anew by the run's scorer, or by that of the overrides."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manege.cli.arguments import with_files_of
from manege.cli.parts import FolderLock, gateway_serving
from manege.cli.places import choose, find_place, opened
from manege.cli.rollout_view import ending, reward_text
from manege.cli.stored import config_of, find_run
from manege.client import Client
from manege.controller.local import LocalRunner
from manege.controller.rescore import Rescored, rescore
from manege.errors import ConfigError
from manege.sandbox.launcher import Launcher
from manege.sandbox.probe import probe, require
from manege.types import Outcome, Rollout

__all__ = ["execute_rescore"]

_NUM_LISTED = 40


async def execute_rescore(arguments: argparse.Namespace, console: Console) -> None:
    """Rescore a run that nobody works on, and say what changed. Raises ConfigError."""
    place = find_place(str(arguments.run_file))
    if place.folder is None:
        raise ConfigError(f"{place.shown} is no run folder: --rescore needs the agents' output that is kept in it")
    folder = place.folder.absolute()
    with FolderLock(folder):
        async with opened(place) as reader:
            run_id = choose(place, await reader.run_ids())
            overrides = [*arguments.overrides, *(["sandbox.unsafe=true"] if arguments.unsafe else [])]
            config = with_files_of(Path.cwd(), config_of(run_id, await find_run(reader, run_id), overrides))
            rollouts = (await reader.list_rollouts(run=run_id, limit=None)).rollouts
        layers = require(config.sandbox, probe())
        gateway = config.gateway.model_copy(update={"host": "127.0.0.1", "port": 0, "store": str(place.store)})
        launcher = Launcher()
        async with (
            gateway_serving(gateway, run_id, {}, folder, max_context=None) as server,
            Client(server.url, server.key) as client,
        ):
            runner = LocalRunner(
                launcher=launcher,
                client=client,
                folder=folder,
                layers=layers,
                keep_workspaces=False,
            )
            try:
                await launcher.check(config.scorer.run, role="scorer", preload=("manege.controller.record",))
                at_once = min(config.controller.slots, os.cpu_count() or 1)
                found = await rescore(runner, client, config, rollouts, answers=arguments.answers, num_at_once=at_once)
            finally:
                await launcher.close()
    _say(found, console)
    if arguments.json:
        for each in found:
            print(json.dumps(_row(each)))


def _say(found: Sequence[Rescored], console: Console) -> None:
    changed = [each for each in found if _worth(each.before) != _worth(each.after)]
    table = Table("rollout", "task", "was", "reward", "is", "reward", box=None)
    for each in changed[:_NUM_LISTED]:
        before, after = each.before, each.after
        table.add_row(
            before.spec.id, before.spec.task.id, ending(before), reward_text(before), ending(after), reward_text(after)
        )
    if changed:
        console.print(table)
    if len(changed) > _NUM_LISTED:
        console.print(f"and {len(changed) - _NUM_LISTED} more; --json has all of them")
    scored = [each for each in found if each.skipped is None]
    before, after = _mean([each.before for each in scored]), _mean([each.after for each in scored])
    console.print(
        f"{len(scored)} of {len(found)} rollouts scored, {len(changed)} changed; "
        f"mean reward {before} before, {after} now",
        highlight=False,
    )
    for reason, number in Counter(each.skipped for each in found if each.skipped is not None).most_common():
        console.print(Text(f"{number} skipped: {reason}"), soft_wrap=True)


def _worth(rollout: Rollout) -> tuple[Outcome | None, float | None]:
    return rollout.outcome, rollout.reward


def _mean(rollouts: Sequence[Rollout]) -> str:
    known = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return f"{sum(known) / len(known):.3f}" if known else "-"


def _row(each: Rescored) -> dict[str, object]:
    def seen(rollout: Rollout) -> dict[str, object]:
        return {"outcome": rollout.outcome, "reward": rollout.reward, "message": rollout.message}

    spec = each.before.spec
    verdicts = {"before": seen(each.before), "after": seen(each.after), "skipped": each.skipped}
    return {"rollout": spec.id, "task": spec.task.id, **verdicts}
