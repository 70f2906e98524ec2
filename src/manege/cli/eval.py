"""Success on held-out tasks at the run's temperatures, with intervals; trains nothing.

With --samples K there are K rollouts per task, and pass@1 to pass@K are estimated from them. With --benchmark the
tasks are a benchmark's, and what the agents changed is written as predictions for its own evaluation. With --gateway
the model is that gateway's, and the rollouts go to its controllers.

With --rescore, RUN_FILE is the folder of a run that is over or stopped: its stored rollouts are scored anew, by its
scorer or by that of the overrides, and have the new rewards from then on, also for a training that goes on. What was
before stays in their logs.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from manege.cli.arguments import add_gateway_arguments, add_run_arguments, connect, read_run, scratch_folder
from manege.cli.benchmark import execute_benchmark
from manege.cli.evaluating import evaluate, feeding, lines_of, row_of
from manege.cli.parts import check_agents
from manege.cli.rescoring import execute_rescore
from manege.cli.swebench import DATASETS
from manege.errors import ConfigError
from manege.trainer.tasks import load_tasks

EXAMPLES = """examples:
  manege eval src/manege/recipes/finder/run.toml
  manege eval src/manege/recipes/finder/run.toml model.path=runs/finder/model --json
  manege eval src/manege/recipes/finder/run.toml tasks.num_heldout=32 evaluation.temperatures=[0.0]
  manege eval src/manege/recipes/finder/run.toml --samples 8 evaluation.temperatures=[1.0]
  manege eval my/coder.toml --benchmark swebench-verified
  manege eval --rescore runs/finder --answers
  manege eval --rescore runs/coder 'scorer.run=["python", "judge.py"]'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this verb."""
    add_run_arguments(parser)
    add_gateway_arguments(parser)
    parser.add_argument("--samples", type=_positive, default=1, metavar="K", help="rollouts per task (default: 1)")
    parser.add_argument("--benchmark", choices=list(DATASETS), help="these tasks, and patches as predictions")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="with --benchmark: its rows (JSONL, Parquet), in place of the hub's"
    )
    parser.add_argument("--rescore", action="store_true", help="score the stored rollouts of a run folder anew")
    parser.add_argument(
        "--answers",
        action="store_true",
        help="with --rescore: the scorer reads only calls and output, so score what has no workspace any more, too",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="data on stdout, one JSON object per temperature, or per rollout with --rescore",
    )


async def execute(arguments: argparse.Namespace) -> int:
    """Evaluate the run's model."""
    console = Console(stderr=arguments.json)
    if arguments.rescore:
        await execute_rescore(arguments, console)
        return 0
    if arguments.benchmark:
        await execute_benchmark(arguments, console)
        return 0
    if arguments.rows is not None:
        raise ConfigError(f"--rows {arguments.rows} are a benchmark's: it needs --benchmark")
    elsewhere = connect(arguments) if arguments.gateway else None
    with scratch_folder(read_run(arguments)) as config:
        tasks = load_tasks(config.tasks, "heldout", seed=config.seed)
        if not tasks:
            raise ConfigError("tasks.heldout is not set: there is nothing to evaluate on")
        if elsewhere is None:
            check_agents(config, tasks, console)
        async with feeding(config, elsewhere) as (_, _, feed):
            for temperature in config.evaluation.temperatures:
                found = await evaluate(feed, tasks, config, size=arguments.samples, temperature=temperature)
                row = row_of(found, temperature=temperature)
                for line in lines_of(row):
                    console.print(line, highlight=False, soft_wrap=True)
                if arguments.json:
                    print(json.dumps(row))
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
