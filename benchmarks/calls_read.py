"""Seconds, bytes and memory to read the calls of 64 rollouts x 30 calls from a server, as a trainer does for its step.

    python benchmarks/calls_read.py [--quick] [--reference PYTHON]

PYTHON: an interpreter that has Agent Lightning 1.0.2 and numpy. Its server then holds the same rollouts, and its
rollout manager reads them as JSON triplets, in turns with our client. Servers and readers are processes of their own
that talk over sockets; memory is the reader's highest above what it had before. Medians over repeats. Ours brings
requests and answers along, which triplets lack. `reference, whole` is all that its trainer fetches and makes of a
rollout that has ended: the events as they are, too.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
from calls_read_ours import fill
from calls_read_rollouts import KINDS
from gateway_latency import KEY, free_port, process
from sample_building import side
from sample_building_rollouts import write_rollouts


async def measure_kind(reference, rollouts, repeats, folder):
    """Per side, the medians of what its repeats measured."""
    file = folder / "rollouts.npz"
    write_rollouts(file, rollouts)
    await fill(folder / "manege.db", rollouts)
    async with contextlib.AsyncExitStack() as stack:
        port, program = free_port(), Path(sys.executable).with_name("manege")
        url, bare = f"http://127.0.0.1:{port}", ("--model", "m", "--engine", "none")
        arguments = ("gateway", *bare, f"--port={port}", f"--operator-key={KEY}", f"--folder={folder}")
        await stack.enter_async_context(process(str(program), *arguments, health=f"{url}/healthz"))
        readers = {"ours": (sys.executable, "calls_read_ours.py", file, url)}
        if reference:
            port, program = free_port(), Path(reference).with_name("agl-server")
            url, arguments = f"http://127.0.0.1:{port}", ("host=127.0.0.1", f"port={port}", f"key={KEY}")
            await stack.enter_async_context(process(str(program), *arguments, health=f"{url}/healthz"))
            for name, what in (("reference", "triplets"), ("reference, whole", "whole")):
                readers[name] = (reference, "calls_read_reference.py", file, url, what)
        sides = {name: stack.enter_context(side(*command)) for name, command in readers.items()}
        results = {name: [] for name in sides}
        for _ in range(repeats):
            for name, measure in sides.items():
                results[name].append(measure())
    return {
        name: {key: statistics.median(each[key] for each in repeated) for key in repeated[0]}
        for name, repeated in results.items()
    }


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 rollouts of 10 calls and up to 4k tokens, one repeat")
    parser.add_argument("--reference", metavar="PYTHON", help="an interpreter that has Agent Lightning and numpy")
    asked = parser.parse_args()
    num_rollouts, num_calls, num_tokens, repeats = (8, 10, 4096, 1) if asked.quick else (64, 30, 8192, 3)
    print(
        f"{num_rollouts} rollouts x {num_calls} calls, prompts up to {num_tokens} tokens, medians of {repeats}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(
        "| prompts | side | seconds | times ours | its CPU s | MB read | peak MB |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for seed, (kind, make) in enumerate(KINDS.items()):
        rng = np.random.default_rng(seed)
        rollouts = [make(rng, num_calls, num_tokens) for _ in range(num_rollouts)]
        num_prompt_tokens = sum(len(call.prompt) for rollout in rollouts for call in rollout)
        with tempfile.TemporaryDirectory() as folder:
            medians = await measure_kind(asked.reference, rollouts, repeats, Path(folder))
        for name, median in medians.items():
            assert (median["calls"], median["tokens"]) == (num_rollouts * num_calls, num_prompt_tokens), median
            print(
                f"| {kind} | {name} | {median['seconds']:.3f} | {median['seconds'] / medians['ours']['seconds']:.1f} | "
                f"{median['cpu_seconds']:.3f} | {median['bytes'] / 1e6:.1f} | {median['peak_bytes'] / 1e6:.1f} |",
                flush=True,
            )
    print(f"load after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    asyncio.run(main())
