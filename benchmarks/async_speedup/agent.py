"""The finder's agent, whose tools take long.

Unchanged but for waiting, before a command runs and before the agent ends: as long as the environment variable
TOOL_TIME says (mean, sigma and seed of a ToolTime) for the place of this rollout.
"""

import os
import time

from benchmarks.async_speedup.waits import ToolTime, place_of
from manege.recipes.finder import agent

__all__ = ["main"]


def main() -> None:
    """Do as the finder's agent, slowly."""
    tool_time = ToolTime.parse(os.environ["TOOL_TIME"])
    place = place_of(os.environ["MANEGE_ROLLOUT_ID"])
    if place is None or not tool_time.mean_s:
        agent.main()
        return
    waits, run = tool_time.waits(*place), agent.run
    left_s = tool_time.seconds(*place)

    def wait_and_run(command: str) -> tuple[int, str]:
        nonlocal left_s
        wait_s = next(waits)
        left_s -= wait_s
        time.sleep(wait_s)
        return run(command)

    agent.run = wait_and_run
    agent.main()
    time.sleep(left_s)
