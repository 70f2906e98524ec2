"""Makes tests/tiny/model: a byte-level Llama of a quarter of a million parameters, warm-started on demonstrations.

    python -m tests.tiny.make_model

The teacher errs at every turn with a probability of 0.4, without ever spoiling the copying of values; so the model
knows the moves but plays them badly when sampled. Reinforcement learning has to do the rest. Takes a minute on a CPU.
"""

import json
import random
import string
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "model"
SPECIAL = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STEPS, BATCH, RATE, ERRORS = 700, 32, 3e-3, 0.4


def make_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def demonstration(rng):
    """Turns of one conversation; the assistant's are to be learnt."""
    first, second = rng.sample(string.ascii_lowercase, 2)
    value, known, answer = str(rng.randint(10, 99)), first, None
    turns = [("user", f"q {first}")]
    for _ in range(4):
        turns.append(("assistant", _move(rng, known, answer)))
        move = turns[-1][1]
        if move == f"get {first}":
            known, shown = second, f"go {second}"
        elif move == f"get {second}" and known == second:
            answer, shown = value, f"is {value}"
        elif len(move) == 5 and move.startswith("get "):
            shown = "no"
        else:
            break
        turns.append(("user", shown))
    return turns


def _move(rng, known, answer):
    if rng.random() >= ERRORS:
        return f"ans {answer}" if answer else f"get {known}"
    if answer:
        return rng.choice([f"{rng.choice(['is', 'say', 'val'])} {answer}", f"get {known}"])
    return rng.choice(["ans ?", f"get {rng.choice(string.ascii_lowercase)}", f"get{rng.choice('_-.')}{known}"])


def encode(tokenizer, turns):
    ids, weights = [], []
    for role, text in turns:
        head = tokenizer.encode(f"<|{role}|>").ids
        body = tokenizer.encode(f"{text}<|end|>").ids
        ids += head + body
        weights += [0.2] * len(head) + [1.0 if role == "assistant" else 0.2] * len(body)
    return ids, weights


def main():
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer()
    end = tokenizer.token_to_id("<|end|>")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(STEPS):
        rows = [encode(tokenizer, demonstration(rng)) for _ in range(BATCH)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(BATCH, longest, dtype=torch.long)
        weights = torch.zeros(BATCH, longest)
        for i, (row_ids, row_weights) in enumerate(rows):
            ids[i, : len(row_ids)] = torch.tensor(row_ids)
            weights[i, : len(row_ids)] = torch.tensor(row_weights)
        logits = model(ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 50) * (1 - 0.9 * step / STEPS)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
    FOLDER.mkdir(exist_ok=True)
    model.config.torch_dtype = "float16"
    model.config.architectures = ["LlamaForCausalLM"]  # as save_pretrained of a model writes it
    model.config.save_pretrained(FOLDER)
    weights = {k: v.half().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, FOLDER / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    (FOLDER / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|end|>",
                "pad_token": "<|pad|>",
                "chat_template": TEMPLATE,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
