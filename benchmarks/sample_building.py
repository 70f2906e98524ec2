"""Seconds and memory to build what a step trains on, from the calls of 256 rollouts x 30 turns x up to 16k tokens.

    python benchmarks/sample_building.py [--quick] [--reference PYTHON]

PYTHON: an interpreter that has Agent Lightning 1.0.2 and verl; its adapter then gets the same rollouts, in turns with
ours, each in a process of its own. Reading and decoding are not timed. Medians over repeats. Memory is the highest
above what the input takes; a token is unique once per rollout and prefix, so that bytes per unique token must not
depend on how a rollout falls apart.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from sample_building_rollouts import KINDS, make_rollouts, unique_tokens, write_rollouts

HERE = Path(__file__).parent


@contextlib.contextmanager
def side(python, script, *arguments):
    """Measures once per call of what it yields."""
    command = [python, str(HERE / script), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def measure():
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{' '.join(command)} ended; what it said is above")
            return json.loads(line)

        yield measure


def measure_kind(pythons, rollouts, repeats, folder):
    """Per side, what each repeat measured."""
    file = Path(folder) / "rollouts.npz"
    write_rollouts(file, rollouts)
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(side(python, f"sample_building_{name}.py", file))
            for name, python in pythons.items()
        }
        results = {name: [] for name in sides}
        for _ in range(repeats):
            for name, measure in sides.items():
                results[name].append(measure())
    return results


def summary(repeated, sampled):
    """Medians of one side; every sampled token must be trained."""
    medians = {key: statistics.median(each[key] for each in repeated) for key in repeated[0]}
    assert medians["trained"] == sampled, f"{sampled} tokens were sampled, {medians} are in the batch"
    return medians


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 rollouts of 10 turns and up to 4k tokens, one repeat")
    parser.add_argument("--reference", metavar="PYTHON", help="an interpreter that has Agent Lightning and verl")
    arguments = parser.parse_args()
    sizes = {"num_rollouts": 256, "num_calls": 30, "max_tokens": 16_384}
    repeats = 3
    if arguments.quick:
        sizes, repeats = {"num_rollouts": 16, "num_calls": 10, "max_tokens": 4096}, 1
    pythons = {"ours": sys.executable}
    if arguments.reference:
        pythons["reference"] = arguments.reference
    print(f"{sizes}, medians of {repeats}, load {os.getloadavg()[0]:.1f}")
    print(
        "| rollouts | unique tokens | side | samples | seconds | times ours | CPU s | times ours | peak MB "
        "| bytes per unique token |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for seed, kind in enumerate(KINDS):
            rollouts = make_rollouts(kind, **sizes, seed=seed)
            unique = unique_tokens(rollouts)
            sampled = sum(len(call.response) for rollout in rollouts for call in rollout)
            results = measure_kind(pythons, rollouts, repeats, folder)
            medians = {name: summary(repeated, sampled) for name, repeated in results.items()}
            for name, median in medians.items():
                ratios = [median[key] / medians["ours"][key] for key in ("seconds", "cpu_seconds")]
                print(
                    f"| {kind} | {unique} | {name} | {median['samples']} | {median['seconds']:.3f} | {ratios[0]:.1f} | "
                    f"{median['cpu_seconds']:.3f} | {ratios[1]:.1f} | {median['peak_bytes'] / 1e6:.1f} | "
                    f"{median['peak_bytes'] / unique:.1f} |",
                    flush=True,
                )
    print(f"load after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
