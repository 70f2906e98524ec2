"""Decode, prefill and training on a GPU, by model size: ours, `transformers`, and what the hardware could do at most.

    python -m benchmarks.gpu [--sizes 0.5B 1.5B 3B 8B] [--device cuda] [--dtype bfloat16] [--parts decode train]
    python -m benchmarks.gpu --device cpu --sizes trial --dtype float32     # that it runs

Weights are random, shapes those of published models. The limit of decoding is reading all weights, keys and values once
per step at the speed of a copy; that of prefill and training is their products at the speed of one large product. Both
speeds are measured on the device itself. Training is one optimiser step over samples that share nothing; the last
quarter of each is trained. `transformers` trains by its own loss over the same tokens with AdamW over the weights in
their precision, without float32 copies: less memory, and small steps that are lost.
"""

import argparse
import asyncio
import gc
import os
import time

import numpy as np
import torch
import transformers

from benchmarks.gpu_models import SIZES, Limits, fastest, make_model, synchronize, theirs_over
from manege.config import CreditConfig, EngineConfig, TrainConfig
from manege.engine.base import Sampling
from manege.engine.local import LocalEngine
from manege.trainer.algo.samples import Sample, Span
from manege.trainer.engines.base import WeightedSample
from manege.trainer.engines.torch import TorchEngine
from manege.trainer.objective import objective_of
from manege.types import CallId, RolloutId

OBJECTIVE = objective_of(CreditConfig())
TRAINED = 0.25


def random_ids(rng, size, count):
    return rng.integers(2, SIZES[size]["vocab_size"], count).astype(np.int32)


async def ours_decode(size, batch, prompt, new, device, dtype, rng):
    """(prefill, decode) tokens/s of the local engine: until all have their first token, then until one ends."""
    model, folder = make_model(size, device, dtype)
    config = EngineConfig(max_batch=batch, cache_tokens=batch * 2 * (prompt + new), prefill_chunk=8192)
    engine = LocalEngine(model, folder, config=config, seed=0)

    async def times(ids):
        chunks = engine.generate(ids, Sampling(max_new_tokens=new))
        return [time.perf_counter() async for _ in chunks]

    try:
        for _ in range(2):  # the first warms up
            prompts = [random_ids(rng, size, prompt).tolist() for _ in range(batch)]
            started = time.perf_counter()
            found = await asyncio.gather(*(times(ids) for ids in prompts))
        first, last = max(each[0] for each in found), min(each[-1] for each in found)
        between = sum(first < when <= last for each in found for when in each)
        return batch * prompt / (first - started), between / max(last - first, 1e-9)
    finally:
        await engine.close()


def theirs_decode(size, batch, prompt, new, device, dtype, rng):
    """The same by `generate`; what comes with the first token is prefill."""
    model, _ = make_model(size, device, dtype)
    module = theirs_over(model, size).eval()
    ids = torch.from_numpy(np.stack([random_ids(rng, size, prompt) for _ in range(batch)])).long().to(device)
    settings = {"do_sample": True, "top_k": 0, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}

    def generate(count):
        with torch.inference_mode():
            module.generate(ids, max_new_tokens=count, min_new_tokens=count, **settings)

    one_s = fastest(lambda: generate(1), device, repeats=1)
    all_s = fastest(lambda: generate(new), device, repeats=1)
    return batch * prompt / one_s, batch * (new - 1) / (all_s - one_s)


def make_batch(rng, size, num_samples, length):
    trained = int(length * TRAINED)
    return [
        WeightedSample(
            sample=Sample(
                rollout_id=RolloutId(str(index)),
                prompt_ids_P=random_ids(rng, size, length),
                response_ids_R=np.empty(0, np.int32),
                spans=[Span(call_id=CallId("c"), start=length - trained, stop=length)],
                logprobs_M=np.full(trained, -10.0, np.float32),
                versions_M=np.ones(trained, np.int32),
                temperature=1.0,
                call_ids=[CallId("c")],
            ),
            advantages_M=np.full(trained, 0.5 - index % 2, np.float32),
            weight=1 / (num_samples * trained),
        )
        for index in range(num_samples)
    ]


def ours_train(size, batch, device, dtype, **settings):
    model, folder = make_model(size, device, dtype)
    engine = TorchEngine(model, folder, TrainConfig(micro_batch_tokens=batch[0].sample.num_tokens, **settings))
    return measured(lambda: engine.step(batch, OBJECTIVE), batch, device)


def theirs_train(size, batch, device, dtype):
    model, _ = make_model(size, device, dtype)
    module = theirs_over(model, size)
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)

    def step():
        for item in batch:
            ids = torch.from_numpy(item.sample.ids_T).long().to(device)[None]
            trained = item.sample.num_trained
            logits = module(ids, logits_to_keep=trained + 1, use_cache=False).logits[0, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[0, -trained:], reduction="sum") * item.weight
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return measured(step, batch, device)


def measured(step, batch, device):
    """(tokens/s, peak GiB) of the second step; NaN GiB where the device does not count."""
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = fastest(step, device, repeats=1)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else float("nan")
    return sum(item.sample.num_tokens for item in batch) / seconds, peak


def attempt(function, *arguments, **settings):
    """The result, or None where it does not fit."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        result = function(*arguments, **settings)
        return asyncio.run(result) if asyncio.iscoroutine(result) else result
    except torch.OutOfMemoryError:
        return None


def shown(value, form=",.0f"):
    return "does not fit" if value is None else format(value, form)


def share(value, limit):
    return "" if value is None else f"{value / limit:.0%}"


def decode_part(arguments, limits, rng):
    print("\n| model | batch | prompt | | ours, tokens/s | transformers | limit | ours of it |\n|---|" + "---|" * 7)
    device, dtype, new = arguments.device, arguments.torch_dtype, arguments.new_tokens
    for size in arguments.sizes:
        for batch in arguments.batches:
            common = (size, batch, arguments.prompt_tokens, new, device, dtype, rng)
            ours, theirs = (attempt(function, *common) or (None, None) for function in (ours_decode, theirs_decode))
            context = arguments.prompt_tokens + new // 2
            most = (limits.prefill(size, arguments.prompt_tokens), limits.decode(size, dtype, batch, context))
            for what, mine, other, limit in zip(("prefill", "decode"), ours, theirs, most, strict=True):
                cells = [size, str(batch), str(arguments.prompt_tokens), what, shown(mine), shown(other)]
                print(f"| {' | '.join([*cells, shown(limit), share(mine, limit)])} |", flush=True)


def train_part(arguments, limits, rng):
    ways = {
        "all weights": {},
        "all weights, checkpointing": {"gradient_checkpointing": True},
        "adapters of rank 32": {"lora_rank": 32},
        "adapters of rank 32, checkpointing": {"lora_rank": 32, "gradient_checkpointing": True},
    }
    print("\n| model | tokens | what | tokens/s | limit | of it | peak GiB |\n|---|" + "---|" * 6)
    device, dtype, length = arguments.device, arguments.torch_dtype, arguments.sample_tokens
    for size in arguments.sizes:
        batch = make_batch(rng, size, arguments.samples, length)
        for way, settings in ways.items():
            found = attempt(ours_train, size, batch, device, dtype, **settings) or (None, None)
            again = settings.get("gradient_checkpointing", False)
            print_training(size, batch, way, found, limits.train(size, length, trained=TRAINED, again=again))
        found = attempt(theirs_train, size, batch, device, dtype) or (None, None)
        limit = limits.train(size, length, trained=TRAINED, again=False)
        print_training(size, batch, "all weights, transformers", found, limit)


def print_training(size, batch, way, found, limit):
    speed, peak = found
    tokens = f"{len(batch)} x {batch[0].sample.num_tokens}"
    cells = [size, tokens, way, shown(speed), shown(limit), share(speed, limit), shown(peak, ".1f")]
    print(f"| {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.5B", "1.5B", "3B", "8B"])
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--parts", nargs="+", choices=["decode", "train"], default=["decode", "train"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sample-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    arguments.torch_dtype = getattr(torch, arguments.dtype)
    name = torch.cuda.get_device_name(arguments.device) if arguments.device.startswith("cuda") else "CPU"
    limits = Limits(arguments.device, arguments.torch_dtype)
    print(f"{name}, {arguments.dtype}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"copies move {limits.bytes_per_s / 1e9:,.0f} GB/s, products {limits.flops_per_s / 1e12:,.2f} TFLOP/s")
    print(f"load {os.getloadavg()[0]:.1f}")
    rng = np.random.default_rng(0)
    if "decode" in arguments.parts:
        decode_part(arguments, limits, rng)
    if "train" in arguments.parts:
        train_part(arguments, limits, rng)
    synchronize(arguments.device)


if __name__ == "__main__":
    main()
