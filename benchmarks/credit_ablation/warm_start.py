"""Makes `model/`: a byte-level Llama, warm-started on demonstrations of a teacher that often errs.

    python -m benchmarks.credit_ablation.warm_start

The teacher plays the agent of `agent.py`. It asks in vain, answers too early and gives up looking, but never spoils the
copying of a value; so the model knows the moves but plays them badly when sampled. Its errors differ by the kind of
task, see `tasks.py`. Takes a minute on one core.
"""

import json
import random
import string
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from benchmarks.credit_ablation.agent import NOTHING, Messages, lead
from benchmarks.credit_ablation.tasks import KINDS, generate, read
from manege.model.attend import causal_attend
from manege.model.llama import Llama
from tests.tiny.make_model import TEMPLATE, make_tokenizer

FOLDER = Path(__file__).parent / "model"
STEPS, BATCH, RATE, CONTEXT_WEIGHT = 1500, 48, 3e-3, 0.05
VAIN = 0.85
"""How often a lead of one letter asks for a letter at random."""
EARLY = 0.6
"""How often a lead of several answers before it has everything, per turn."""
GIVES_UP = 0.3
"""How often a sub-agent does not do the next right thing."""


def teach(rng: random.Random, messages: Messages) -> str:
    """The next move, seldom the best one."""
    first, shown = messages[0][1], [content for role, content in messages[1:] if role == "user"]
    if first.startswith("?"):
        if rng.random() < GIVES_UP:
            return rng.choice([f"={NOTHING}", f"<{rng.choice(string.ascii_lowercase)}"])
        return f"={shown[-1]}" if shown and shown[-1] != NOTHING else f"<{first[1]}"
    found = {report[0]: report[1] for report in shown if report[1] != NOTHING}
    missing = [letter for letter in first if letter not in found]
    if len(first) == 1 and missing and rng.random() < VAIN:
        return f"?{rng.choice(string.ascii_lowercase)}"
    if missing and not (found and rng.random() < EARLY):
        return f"?{missing[0]}"
    return "=" + "".join(letter + found[letter] for letter in first if letter in found)


def play(rng: random.Random, num_letters: int) -> list[Messages]:
    """All conversations of one rollout, whole."""
    [task] = generate(split="train", num=1, seed=rng.randrange(2**32), num_letters=num_letters)
    agent, talks = lead(task.input["letters"], partial(read, task)), list[Messages]()
    try:
        messages = next(agent)
        while True:
            talks = [talk for talk in talks if messages[: len(talk)] != talk]
            reply = teach(rng, messages)
            talks.append((*messages, ("assistant", reply)))
            messages = agent.send(reply)
    except StopIteration:
        return talks


def encode(tokenizer: Tokenizer, talk: Messages) -> tuple[list[int], list[float]]:
    """Ids and their weights in the loss: what the assistant says counts fully."""
    ids: list[int] = []
    weights: list[float] = []
    for role, text in talk:
        head, body = tokenizer.encode(f"<|{role}|>").ids, tokenizer.encode(f"{text}<|end|>").ids
        ids += head + body
        weights += [CONTEXT_WEIGHT] * len(head)
        weights += [1.0 if role == "assistant" else CONTEXT_WEIGHT] * len(body)
    return ids, weights


def describe(tokenizer: Tokenizer) -> dict[str, object]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "pad_token_id": 0,
        "torch_dtype": "float16",
    }


def fit(model: Llama, make_talk: Callable[[], Messages], tokenizer: Tokenizer) -> None:
    """Next-token prediction with AdamW; the rate falls to a tenth."""
    for parameter in model.module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(STEPS):
        rows = [encode(tokenizer, make_talk()) for _ in range(BATCH)]
        lengths = [len(ids) for ids, _ in rows]
        ids_N = torch.tensor([id for ids, _ in rows for id in ids])
        weights_N = torch.tensor([weight for _, weights in rows for weight in weights])
        positions_N = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
        last_N = torch.zeros(len(ids_N), dtype=torch.bool)
        last_N[torch.tensor(lengths).cumsum(0) - 1] = True
        logits_NV = model.logits(model.hidden(ids_N, positions_N, causal_attend(lengths)))
        losses_N = cross_entropy(logits_NV[~last_N], ids_N.roll(-1)[~last_N], reduction="none")
        loss = (losses_N * weights_N.roll(-1)[~last_N]).sum() / weights_N.sum()
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 50) * (1 - 0.9 * step / STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1} loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Train and write the folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer()
    config = describe(tokenizer)
    model = Llama(config)
    pool: list[Messages] = []

    def make_talk() -> Messages:
        if not pool:
            pool.extend(talk for _ in range(200) for kind in KINDS.values() for talk in play(rng, kind))
            rng.shuffle(pool)
        return pool.pop()

    fit(model, make_talk, tokenizer)
    FOLDER.mkdir(exist_ok=True)
    weights = {name: tensor.half().contiguous() for name, tensor in model.module.state_dict().items()}
    save_file(weights, FOLDER / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    (FOLDER / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": TEMPLATE}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(special, indent=1) + "\n")


if __name__ == "__main__":
    main()
