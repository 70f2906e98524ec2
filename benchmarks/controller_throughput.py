"""Rollouts per second of a trivial agent: it imports `openai`, makes a client and no call, or one.

    python benchmarks/controller_throughput.py [--reference PYTHON] [--rollouts 64] [--poll 0.2]

Ours: gateway, store and controller in one process, each agent in the full sandbox. PYTHON: an interpreter that has
Agent Lightning 1.0.2 and openai; its server and its local controller then carry out the same agent, in turns with ours,
and the ratio is printed. It neither isolates nor scores, so ours is measured with a scorer, in a sandbox of its own, as
well as without. `--poll` is the seconds between two of its looks (its default is 10). Sixteen agents at once on both
sides. Prints JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from controller_site import KEY, settle, site

from manege.sandbox.probe import probe

HERE = Path(__file__).parent
SLOTS = 16
ROUNDS = 3
CASES = {"no call": (0, False), "one call": (1, False), "one call, ours scored": (1, True)}
"""Number of calls, and whether ours is scored."""

OURS = """
import os
from openai import OpenAI

def main():
    client = OpenAI()
    client.chat.completions
    if {num_calls}:
        client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "say something"}}])
"""
SCORER = """
def score(task, attempt):
    return 1.0 if attempt.exit_code == 0 else None
"""
REFERENCE = """
import os
from openai import OpenAI

class Agent:
    def run(self):
        client = OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"])
        client.chat.completions
        if {num_calls}:
            client.chat.completions.create(model="m", messages=[{{"role": "user", "content": "say something"}}])
"""


@contextlib.contextmanager
def reference_site(python, folder, num_calls, poll_s):
    """A function that has it carry out so many rollouts."""
    module = f"reference_agent_{num_calls}"
    (folder / f"{module}.py").write_text(REFERENCE.format(num_calls=num_calls))
    port, engine_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    programs = [
        [sys.executable, HERE / "stand_in.py", "--port", engine_port, "--first", 20, "--added", 10, "--sampled", 4],
        [python.parent / "agl-server", "host=127.0.0.1", f"port={port}", f"key={KEY}", "default_proxy.model_name=m"],
        [
            *(python.parent / "agl-controller", "runner_type=local", f"agl_server.url={url}", f"agl_server.key={KEY}"),
            *(f"local_runner.poll_interval={poll_s}", f"local_runner.maximum_size={SLOTS}"),
        ],
    ]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    with contextlib.ExitStack() as stack, open(folder / "reference.log", "a") as log:
        for program in programs:
            command = [str(part) for part in program]
            process = stack.enter_context(subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log))
            stack.callback(process.terminate)
        http = stack.enter_context(httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=30))
        wait_for(http)
        model = {"model": "m", "endpoint": f"http://127.0.0.1:{engine_port}/v1"}
        http.post("/api/models", json=[model]).raise_for_status()

        def carry_out(num_rollouts):
            body = {"input": {}, "config": {"local": {"agent_class": f"{module}:Agent"}}}
            made = http.post("/api/rollouts", json=[body] * num_rollouts).raise_for_status().json()
            waiting = {each["rollout_id"] for each in made}
            while waiting:
                page = http.get("/api/rollouts/terminal", params={"after": 0}).json()
                for item in page["items"]:
                    if item["rollout_id"] in waiting and item["state"] != "succeeded":
                        raise SystemExit(f"the reference failed: {(folder / 'reference.log').read_text()[-2000:]}")
                    waiting.discard(item["rollout_id"])
                time.sleep(0.05)

        yield carry_out


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_for(http):
    for _ in range(600):
        with contextlib.suppress(httpx.TransportError):
            http.get("/api/rollouts")
            return
        time.sleep(0.1)
    raise SystemExit("the reference's server does not answer")


async def measure(arguments, num_calls, scored, folder):
    """Seconds and rollouts of both sides."""
    seconds = {"ours": 0.0, "reference": 0.0}
    numbers = {"ours": 0, "reference": 0}
    async with contextlib.AsyncExitStack() as stack:
        agent = OURS.format(num_calls=num_calls)
        client = await stack.enter_async_context(site(folder, agent=agent, scorer=SCORER, slots=SLOTS))
        await settle(client, ["warm"], scored=scored)
        carry_out = None
        if arguments.reference:
            carry_out = stack.enter_context(reference_site(arguments.reference, folder, num_calls, arguments.poll))
            await asyncio.to_thread(carry_out, 1)
        for number in range(ROUNDS):
            began_s = time.perf_counter()
            await settle(client, [f"{number}-{each}" for each in range(arguments.rollouts)], scored=scored)
            seconds["ours"] += time.perf_counter() - began_s
            numbers["ours"] += arguments.rollouts
            if carry_out is not None:
                began_s = time.perf_counter()
                await asyncio.to_thread(carry_out, SLOTS)
                seconds["reference"] += time.perf_counter() - began_s
                numbers["reference"] += SLOTS
    return {side: numbers[side] / seconds[side] for side in seconds if numbers[side]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, metavar="PYTHON", help="has Agent Lightning 1.0.2 and openai")
    parser.add_argument("--rollouts", type=int, default=64, help="of ours in each of three rounds")
    parser.add_argument("--poll", type=float, default=0.2)
    arguments = parser.parse_args()
    results = {}
    for case, (num_calls, scored) in CASES.items():
        with tempfile.TemporaryDirectory() as name:
            rates = asyncio.run(measure(arguments, num_calls, scored, Path(name)))
        results[case] = {f"{side}_rollouts_per_s": rate for side, rate in rates.items()}
        if "reference" in rates:
            results[case]["ratio"] = rates["ours"] / rates["reference"]
    print(json.dumps(results | {"sandbox": list(probe().names()), "load": os.getloadavg()[0]}, indent=2))


if __name__ == "__main__":
    main()
