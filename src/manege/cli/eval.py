"""Success on held-out tasks at the run's temperatures, with intervals; trains nothing.

With --rescore, RUN_FILE is the folder of a run that is over or stopped: its stored rollouts are scored anew, by its
scorer or by that of the overrides, and have the new rewards from then on, also for a training that goes on. What was
before stays in their logs.
"""

import argparse
import json

from rich.console import Console

from manege.cli.arguments import add_run_arguments, read_run, scratch_folder
from manege.cli.parts import check_agents, serving
from manege.cli.rescoring import execute_rescore
from manege.errors import ConfigError
from manege.trainer.collect import GroupFeed, new_nonce
from manege.trainer.evaluate import evaluate, wilson
from manege.trainer.tasks import load_tasks
from manege.types import RunId

EXAMPLES = """examples:
  manege eval src/manege/recipes/finder/run.toml
  manege eval src/manege/recipes/finder/run.toml model.path=runs/finder/model --json
  manege eval src/manege/recipes/finder/run.toml tasks.num_heldout=32 evaluation.temperatures=[0.0]
  manege eval --rescore runs/finder --answers
  manege eval --rescore runs/coder 'scorer.run=["python", "judge.py"]'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add_run_arguments(parser)
    parser.add_argument("--rescore", action="store_true", help="score the stored rollouts of a run folder anew")
    parser.add_argument(
        "--answers",
        action="store_true",
        help="with --rescore: the scorer reads only calls and output, so score what has no workspace any more, too",
    )
    parser.add_argument(
        "--json", action="store_true", help="data on stdout, one JSON object per temperature, or per rollout"
    )


async def execute(arguments: argparse.Namespace) -> int:
    """Evaluate the run's model."""
    console = Console(stderr=arguments.json)
    if arguments.rescore:
        await execute_rescore(arguments, console)
        return 0
    with scratch_folder(read_run(arguments)) as config:
        tasks = load_tasks(config.tasks, "heldout", seed=config.seed)
        if not tasks:
            raise ConfigError("tasks.heldout is not set: there is nothing to evaluate on")
        check_agents(config, tasks, console)
        async with serving(config, train=False) as parts:
            run = RunId(config.name)
            await parts.client.put_run(run, config.to_json())
            feed = GroupFeed(
                parts.client,
                run,
                cursor=0,
                reward_from=config.scorer.reward_from,
                max_attempts=config.controller.max_attempts,
            )
            for temperature in config.evaluation.temperatures:
                result = await evaluate(
                    feed,
                    tasks,
                    name=new_nonce(),
                    temperature=temperature,
                    success_reward=config.scorer.success_reward,
                )
                low, high = wilson(result.num_success, result.num_tasks)
                name = "greedy" if temperature == 0 else f"T = {temperature:g}"
                console.print(
                    f"{name:8} success {result.success_rate:.1%} ({low:.0%} to {high:.0%}, n = {result.num_tasks})  "
                    f"mean reward {result.reward_mean:.3f}",
                    highlight=False,
                )
                if arguments.json:
                    row = {"temperature": temperature, "num_tasks": result.num_tasks, "low": low, "high": high}
                    row |= {"success_rate": result.success_rate, "reward_mean": result.reward_mean}
                    print(json.dumps(row))
    return 0
