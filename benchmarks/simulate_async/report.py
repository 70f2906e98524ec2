"""A simulated training as a row of a table."""

import statistics
from collections import Counter

from benchmarks.simulate_async.model import Result
from manege.train_config import TrainConfig

__all__ = ["HEAD", "row_of"]

_COLUMNS = (
    "groups under way",
    "s/step",
    "updates/h",
    "rollouts/s",
    "tokens/s",
    "staleness mean",
    "max",
    "groups by staleness",
    "engine idle",
    "trainer idle",
    "carried over",
    "dropped rollouts",
    "(computed in)",
)
HEAD = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"


def row_of(config: TrainConfig, result: Result, computed_s: float) -> str:
    """In the order of HEAD. Shares are of all seconds of training."""
    num_steps, seconds, ages = len(result.rows), result.seconds, result.staleness
    cells = (
        str(config.active_groups) if config.schedule == "async" else f"{config.active_groups} (sync)",
        f"{seconds / num_steps:.1f}",
        f"{3600 * num_steps / seconds:.1f}",
        f"{num_steps * result.num_rollouts / seconds:.2f}",
        f"{result.num_tokens / seconds:.0f}",
        f"{statistics.fmean(ages):.2f}",
        str(max(ages)),
        " ".join(f"{age}:{number}" for age, number in sorted(Counter(ages).items())),
        f"{result.engine_idle_s / seconds:.0%}",
        f"{result.trainer_idle_s / seconds:.0%}",
        f"{statistics.fmean(row.carried_over for row in result.rows):.1f}",
        str(result.dropped_rollouts),
        f"{computed_s:.1f} s",
    )
    return f"| {' | '.join(cells)} |"
