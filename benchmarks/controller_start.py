"""How fast agents start: over a bare spawn, from the warm parent, after their rollout's creation; and how many.

    python benchmarks/controller_start.py [--rollouts 64] [--starts 50]

The first figures are of the sandbox alone, with all layers of this machine: `true` as a command against `true` spawned
bare, in turns, and a function that does nothing, each until everything of it is dead and told; and when the function's
first line ran. The others are of gateway, store and controller in one process, as in `manege train`: the agent imports
the official `openai` client and makes one client, as every agent does. Prints JSON.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from controller_site import settle, site

from manege.sandbox.launcher import Launcher, search_path
from manege.sandbox.policy import Policy
from manege.sandbox.probe import probe
from manege.sandbox.spec import Limits, ProcessSpec

AGENT = """
import time
from openai import OpenAI

def main():
    print(time.time())
    OpenAI().chat.completions

def nothing():
    return time.time()
"""
SCORER = """
def score(task, attempt):
    return float(attempt.stdout)
"""
SLOTS = 16


async def measure_starts(folder, num_starts):
    """Medians in milliseconds."""
    (folder / "bench_start.py").write_text(AGENT)
    sys.path.append(str(folder))
    launcher = Launcher()
    seconds = {"bare_spawn": [], "command": [], "function": [], "function_first_line": []}
    try:
        for number in range(-1, num_starts):
            began_s = time.perf_counter()
            bare = await asyncio.create_subprocess_exec("true")
            await bare.wait()
            taken = {"bare_spawn": time.perf_counter() - began_s}
            for name, program in (("command", ["true"]), ("function", "bench_start:nothing")):
                request = spec(folder / f"{name}{number}", program)
                began_s, clock_s = time.perf_counter(), time.time()
                ended = await launcher.run(request, 60, on_listener=lambda listener: listener.close())
                taken[name] = time.perf_counter() - began_s
                assert ended.code == 0, Path(request.stderr).read_text()
            taken["function_first_line"] = float(ended.reply) - clock_s
            if number >= 0:  # the first one started the warm parents
                for name, value in taken.items():
                    seconds[name].append(value)
    finally:
        await launcher.close()
    medians = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    return medians | {"command_over_bare_spawn": medians["command"] - medians["bare_spawn"]}


def spec(folder, program):
    for name in ("workspace", "home", "scratch"):
        (folder / name).mkdir(parents=True)
    policy = Policy(
        layers=probe(),
        writable=[str(folder / name) for name in ("workspace", "home", "scratch")],
        readable=[],
        private=[],
        tcp_ports=[],
        protected_pids=[os.getpid()],
        listen_port=18080,
    )
    return ProcessSpec(
        program=program,
        role="agent",
        env={"PATH": search_path(), "HOME": str(folder / "home"), "TMPDIR": str(folder / "scratch")},
        cwd=str(folder / "workspace"),
        stdout=str(folder / "stdout"),
        stderr=str(folder / "stderr"),
        limits=Limits(memory_bytes=4 << 30, num_processes=256),
        policy=policy,
        replies=True,
    )


async def measure_rollouts(folder, num_rollouts):
    async with site(folder, agent=AGENT, scorer=SCORER, slots=SLOTS) as client:
        first = await settle(client, ["warm"])
        alone = [(await settle(client, [f"alone{index}"]))[0] for index in range(10)]
        began_s = time.perf_counter()
        crowd = await settle(client, [f"crowd{index}" for index in range(num_rollouts)])
        seconds = time.perf_counter() - began_s
    delays_ms = [1000 * (rollout.reward - rollout.created_s) for rollout in alone]
    return {
        "first_ms": 1000 * (first[0].reward - first[0].created_s),
        "created_to_agent_ms": {"median": statistics.median(delays_ms), "max": max(delays_ms)},
        "cpu_per_agent_ms": 1000 * statistics.mean(rollout.evidence["cpu_s"] for rollout in crowd),
        "rollouts_per_s": num_rollouts / seconds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--starts", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        starts_ms = asyncio.run(measure_starts(Path(name), arguments.starts))
    with tempfile.TemporaryDirectory() as name:
        rollouts = asyncio.run(measure_rollouts(Path(name), arguments.rollouts))
    sandbox = list(probe().names())
    print(json.dumps({"starts_ms": starts_ms, **rollouts, "sandbox": sandbox, "load": os.getloadavg()[0]}, indent=2))


if __name__ == "__main__":
    main()
