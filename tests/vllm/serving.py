"""A vLLM server for a module of tests, and what our own model says about the tokens that it sampled."""

import os
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import torch
from anyio.from_thread import start_blocking_portal

from manege.backend_config import BackendConfig
from manege.config import ModelConfig
from manege.engine.launch import engine_servers
from manege.model.attend import causal_attend
from manege.model.load import export_folder, load_model

ROOT = Path(__file__).parents[2]
ROOMY = {"hf_overrides": {"max_position_embeddings": 2048}}
"""Of the tiny model, whose whole own context of 256 is sampled in a quarter of a second: too soon for a pause."""
PYTHON = os.environ.get("MANEGE_TEST_VLLM", str(ROOT / ".venv-vllm" / "bin" / "python"))


def backend(count=1, weights="folder", **options):
    engines = {"kind": "vllm", "count": count, "python": PYTHON, "options": options}
    return BackendConfig.model_validate({"engines": engines, "weights": weights})


@asynccontextmanager
async def urls_of(folder, logs, **options):
    async with engine_servers(backend(**options), ModelConfig(device="cpu"), folder, logs) as urls:
        yield urls


@contextmanager
def served(folder, logs, **options):
    """The URL of a server that outlives the event loops of single tests."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(urls_of(folder, logs, **options)) as urls:
        yield urls[0]


def changed(source, target, *, scale):
    """A copy of a model folder whose weights differ; returns its model."""
    model, generator = load_model(source), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std().nan_to_num(0) * scale)
    export_folder(model, source, target)
    return model


def logprobs_of(model, prompt_ids, answer_ids, temperature=1.0):
    """(R,) of the answer's tokens, by one forward pass of our own model."""
    ids = torch.tensor([*prompt_ids, *answer_ids])
    with torch.no_grad():
        hidden = model.hidden(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        logits = model.logits(hidden[len(prompt_ids) - 1 : -1]).float() / temperature
    return logits.log_softmax(-1).gather(1, ids[len(prompt_ids) :, None])[:, 0].numpy()
