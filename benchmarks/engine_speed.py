"""Tokens per second of the local engine against `transformers.generate`, same weights, same machine, same threads.

    python benchmarks/engine_speed.py [--quick] [--model smollm2] [--threads N]

Prefill and decode at batch 1, 8 and 32 (prompts of 128 random tokens that share nothing, so that no cache helps), and
agents that pause between their calls, as harnesses do: 16 agents of 3 turns over one system prompt, where
`transformers` has no continuous batching and serves one call after the other. Medians over repeats, the two sides in
turns; the load of the machine is printed, since it decides how far the absolute numbers can be trusted.
"""

from manege.engine.threads import ThreadChoice, calm_threads

calm_threads()

import argparse  # noqa: E402 - OpenMP reads its environment when torch is imported
import asyncio  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402

from manege.config import EngineConfig  # noqa: E402
from manege.engine.base import Sampling, collect  # noqa: E402
from manege.engine.local import LocalEngine  # noqa: E402
from manege.model.folder import open_folder  # noqa: E402
from manege.model.load import load_model  # noqa: E402

PROMPT_TOKENS, NEW_TOKENS = 128, 16
AGENTS, TURNS, TURN_TOKENS, OBSERVATION_TOKENS, SYSTEM_TOKENS = 16, 3, 8, 20, 120


class Ours:
    """The local engine."""

    def __init__(self, folder, num_threads):
        config = EngineConfig(threads=num_threads, prefill_chunk=4096)
        self.engine = LocalEngine(load_model(folder), folder, config=config, seed=0)

    async def batch(self, prompts, num_tokens):
        """The times at which each token of the last sequence came."""
        return (await asyncio.gather(*(self.times(ids, num_tokens) for ids in prompts)))[-1]

    async def times(self, ids, num_tokens):
        chunks = self.engine.generate(ids, Sampling(max_new_tokens=num_tokens))
        return [time.perf_counter() async for _ in chunks]

    async def call(self, ids, num_tokens):
        generation = await collect(self.engine.generate(ids, Sampling(max_new_tokens=num_tokens)))
        return generation.ids_R.tolist()


class Theirs:
    """`generate` of transformers, which blocks until the whole batch is done."""

    def __init__(self, folder, num_threads):
        torch.set_num_threads(num_threads)
        self.module = transformers.AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32).eval()
        self.lock = asyncio.Lock()

    def generate(self, prompts, num_tokens, times):
        def note_time(ids, scores):
            times.append(time.perf_counter())
            return scores

        ids = torch.tensor(prompts)
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        settings["logits_processor"] = transformers.LogitsProcessorList([note_time])
        with torch.inference_mode():
            out = self.module.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        times[:] = [*times[1:], time.perf_counter()]  # from "about to be sampled" to "sampled"
        return out[:, ids.shape[1] :].tolist()

    async def batch(self, prompts, num_tokens):
        times = []
        self.generate(prompts, num_tokens, times)
        return times

    async def call(self, ids, num_tokens):
        async with self.lock:
            return (await asyncio.to_thread(self.generate, [ids], num_tokens, []))[0]


def random_ids(rng, count):
    return rng.choices(range(100, 40000), k=count)


async def batch_speed(side, size, rng):
    """Prefill and decode tokens per second: until the first token, and from there to the last."""
    prompts = [random_ids(rng, PROMPT_TOKENS) for _ in range(size)]
    started = time.perf_counter()
    times = await side.batch(prompts, NEW_TOKENS + 1)
    return size * PROMPT_TOKENS / (times[0] - started), size * NEW_TOKENS / (times[-1] - times[0])


async def agents_speed(side, rng):
    """Sampled tokens per second of agents that work 50 to 150 ms between their calls."""
    system = random_ids(rng, SYSTEM_TOKENS)

    async def agent(ids, pauses):
        for pause_s in pauses:
            answer = await side.call(ids, TURN_TOKENS)
            await asyncio.sleep(pause_s)
            ids = [*ids, *answer, *random_ids(rng, OBSERVATION_TOKENS)]

    agents = [
        agent(system + random_ids(rng, OBSERVATION_TOKENS), [rng.uniform(0.05, 0.15) for _ in range(TURNS)])
        for _ in range(AGENTS)
    ]
    started = time.perf_counter()
    await asyncio.gather(*agents)
    return AGENTS * TURNS * TURN_TOKENS / (time.perf_counter() - started)


async def measure(sides, sizes, repeats):
    results = {}
    rng = random.Random(0)
    for repeat in range(-1, repeats):  # the first round warms up
        for size in sizes:
            for name, side in sides.items():
                prefill, decode = await batch_speed(side, size, rng)
                if repeat >= 0:
                    results.setdefault(f"prefill, batch {size}", {}).setdefault(name, []).append(prefill)
                    results.setdefault(f"decode, batch {size}", {}).setdefault(name, []).append(decode)
        for name, side in sides.items():
            speed = await agents_speed(side, rng)
            if repeat >= 0:
                results.setdefault(f"{AGENTS} agents that pause", {}).setdefault(name, []).append(speed)
    return results


async def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="batch 1 and 8, one repeat")
    arguments = parser.parse_args()
    folder = open_folder(arguments.model)
    num_threads = ThreadChoice(arguments.threads).num_threads()
    sides = {"ours": Ours(folder, num_threads), "transformers": Theirs(folder, num_threads)}
    print(f"model {folder.name}, {num_threads} threads, load before {os.getloadavg()[0]:.1f}")
    results = await measure(sides, *(([1, 8], 1) if arguments.quick else ([1, 8, 32], 3)))
    await sides["ours"].engine.close()
    print(f"{'tokens/s':<24}{'ours':>10}{'transformers':>14}{'ratio':>8}")
    for what, by_side in sorted(results.items(), key=lambda item: item[0], reverse=True):
        ours, theirs = (statistics.median(by_side[name]) for name in ("ours", "transformers"))
        print(f"{what:<24}{ours:>10.1f}{theirs:>14.1f}{ours / theirs:>8.2f}")
    print(f"load after {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    asyncio.run(main())
