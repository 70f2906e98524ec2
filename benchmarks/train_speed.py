"""Tokens per second of one optimiser step on SmolLM2, with and without the prefix tree, on the same samples.

The samples have the shape of a step of the finder recipe: 4 groups of 8 rollouts, one shared prompt of 120 tokens, a
question per group, 2 to 4 turns per rollout.

    python benchmarks/train_speed.py [--quick]
"""

import argparse
import random
import statistics
import time

import numpy as np
import torch

from manege.config import CreditConfig, TrainConfig
from manege.model.folder import open_folder
from manege.model.load import load_model
from manege.trainer.algo.samples import Sample, Span
from manege.trainer.engines.base import WeightedSample
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from manege.types import CallId, RolloutId

OBJECTIVE = objective_of(CreditConfig(clip_high=0.28))


def make_batch(rng):
    """Random tokens; siblings that make the same first move share it, as sampled agents do."""
    shared = [rng.randrange(1000, 40000) for _ in range(120)]
    batch = []
    for _ in range(4):
        question = [rng.randrange(1000, 40000) for _ in range(20)]
        moves = [[rng.randrange(1000, 40000) for _ in range(7)] for _ in range(3)]
        for member in range(8):
            ids, spans = shared + question, []
            for _ in range(rng.randint(2, 4)):
                move, observation = rng.choice(moves), [rng.randrange(1000, 40000) for _ in range(12)]
                spans.append(Span(call_id=CallId("c"), start=len(ids), stop=len(ids) + len(move)))
                ids = ids + move + observation
            num_trained = sum(span.stop - span.start for span in spans)
            sample = Sample(
                rollout_id=RolloutId(str(member)),
                prompt_ids_P=np.array(ids, np.int32),
                response_ids_R=np.empty(0, np.int32),
                spans=spans,
                logprobs_M=np.full(num_trained, -5.0, np.float32),
                versions_M=np.ones(num_trained, np.int32),
                temperature=1.0,
                call_ids=[CallId("c")],
            )
            advantages = np.full(num_trained, rng.choice([-0.5, 0.5]), np.float32)
            batch.append(WeightedSample(sample=sample, advantages_M=advantages, weight=1 / (32 * num_trained)))
    return batch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    repeats = 1 if parser.parse_args().quick else 3
    folder = open_folder("smollm2")
    batch = make_batch(random.Random(0))
    total = sum(item.sample.num_tokens for item in batch)
    times = {True: [], False: []}
    unique = {}
    for _ in range(repeats):
        for tree in (True, False):
            config = TrainConfig(prefix_tree=tree, frozen=["embed_tokens"], learning_rate=1e-9)
            engine = TorchEngine(load_model(folder), folder, config)
            started = time.perf_counter()
            unique[tree] = engine.step(batch, OBJECTIVE).metrics["unique_tokens"]
            times[tree].append(time.perf_counter() - started)
            del engine
    print(f"{len(batch)} samples, {total} tokens; {torch.get_num_threads()} threads; medians of {repeats}")
    print("| prefix tree | tokens computed | seconds | sample tokens/s |\n|---|---|---|---|")
    for tree in (False, True):
        seconds = statistics.median(times[tree])
        print(f"| {'with' if tree else 'without'} | {unique[tree]:.0f} | {seconds:.2f} | {total / seconds:.0f} |")
    print(f"ratio {statistics.median(times[False]) / statistics.median(times[True]):.1f}x")


if __name__ == "__main__":
    main()
