"""The train engine for one machine: full fine-tuning with AdamW over a torch model.

The weights are changed in place, so that an inference engine in the same process shares them (`publish` says so and
copies nothing). Micro-batches are prefix trees: a token that samples share is computed once and gathered per sample,
so every loss stays exact.

Shape legend: N nodes of the tree, M trained tokens of a micro-batch, U distinct nodes that predict them, V vocabulary.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manege.config import TrainConfig
from manege.engine.base import Weights
from manege.engine.threads import physical_cores
from manege.errors import TrainerError
from manege.model.base import LanguageModel
from manege.model.folder import ModelFolder
from manege.model.load import export_folder, read_weights, save_weights
from manege.trainer.algo.batching import micro_batches
from manege.trainer.algo.samples import Sample
from manege.trainer.algo.tree import build_tree, separate
from manege.trainer.engines.base import Capabilities, WeightedSample
from manege.trainer.engines.tree_attention import TreeAttention
from manege.trainer.loss import token_loss
from manege.trainer.objective import Objective
from manege.types import FloatArray

__all__ = ["TorchEngine"]

_STATE_FILE = "optimizer.pt"
_HEADER_FILE = "engine.json"


class TorchEngine:
    """`TrainEngine` over a `LanguageModel` in this process."""

    def __init__(
        self, model: LanguageModel, folder: ModelFolder, config: TrainConfig, *, publish_folder: Path | None = None
    ) -> None:
        """`publish_folder`: where an engine outside this process reads new weights; None: it shares our memory."""
        self.capabilities = Capabilities(prefix_tree=True, max_sample_tokens=model.context_limit)
        self._model, self._folder, self._config = model, folder, config
        self._parameters = _trainable(model, config.frozen)
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._num_steps = 0
        self._publish_folder = publish_folder

    def logprobs(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        """See TrainEngine."""
        results = [np.empty(0, np.float32)] * len(samples)
        with torch.no_grad():
            for batch in self._micro_batches(samples):
                logprobs_M, _ = self._trained_logprobs([samples[index] for index in batch])
                values = logprobs_M.float().cpu().numpy()
                ends = np.cumsum([samples[index].num_trained for index in batch])
                for index, part in zip(batch, np.split(values, ends[:-1]), strict=True):
                    results[index] = part
        return results

    def step(self, batch: Sequence[WeightedSample], objective: Objective) -> Mapping[str, float]:
        """See TrainEngine."""
        # Per thread of the process; the inference engine, which is paused now, may have chosen fewer for itself.
        torch.set_num_threads(physical_cores())
        self._optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {}
        for indices in self._micro_batches([item.sample for item in batch]):
            for name, value in self._backward([batch[index] for index in indices], objective).items():
                combine = max if name == "gap_max" else float.__add__
                totals[name] = combine(totals[name], value) if name in totals else value
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        if not (math.isfinite(norm) and math.isfinite(totals["loss"])):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainerError(
                f"loss {totals['loss']} or gradient norm {norm} is not finite; weights are unchanged. "
                "Lower train.learning_rate or look for broken log-probabilities"
            )
        self._num_steps += 1
        rate = self._config.learning_rate * min(1.0, self._num_steps / (self._config.warmup_steps + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return _metrics(totals, norm, rate)

    def publish(self) -> Weights:
        """See TrainEngine."""
        if self._publish_folder is None:
            return Weights(kind="shared")
        # Two names take turns, so that an engine that is slow to read never sees a folder half written.
        folder = self._publish_folder / str(self._num_steps % 2)
        self.export(folder)
        return Weights(kind="folder", folder=str(folder))

    def save(self, folder: Path) -> None:
        """See TrainEngine; the caller gives a folder that is not visible as a checkpoint yet."""
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(self._model, folder)
        state = {"optimizer": self._optimizer.state_dict(), "rng": torch.get_rng_state(), "num_steps": self._num_steps}
        torch.save(state, folder / _STATE_FILE)
        (folder / _HEADER_FILE).write_text(json.dumps({"schema": 1, "num_parameters": self._num_parameters()}))

    def load(self, folder: Path) -> None:
        """See TrainEngine."""
        try:
            header = json.loads((folder / _HEADER_FILE).read_text())
        except (OSError, ValueError) as error:
            raise TrainerError(f"{folder} is not a checkpoint of this engine: {error}") from error
        if header["num_parameters"] != self._num_parameters():
            raise TrainerError(
                f"checkpoint {folder} has {header['num_parameters']} parameters, the model {self._num_parameters()}; "
                "resume with the model it was made with"
            )
        read_weights(self._model, folder)
        state = torch.load(folder / _STATE_FILE, weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self._num_steps = state["num_steps"]

    def export(self, folder: Path) -> None:
        """See TrainEngine."""
        export_folder(self._model, self._folder, folder)

    def _micro_batches(self, samples: Sequence[Sample]) -> Sequence[Sequence[int]]:
        sequences = [sample.ids_T for sample in samples]
        return micro_batches(sequences, self._config.micro_batch_tokens, share=self._config.prefix_tree)

    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.module.parameters())

    def _trained_logprobs(self, samples: Sequence[Sample]) -> tuple[Tensor, int]:
        """Log-probabilities of the trained tokens, sample after sample (M,), and the number of nodes computed."""
        lay_out = build_tree if self._config.prefix_tree else separate
        tree = lay_out([sample.ids_T for sample in samples])
        parameter = self._parameters[0]
        device = parameter.device
        attend = TreeAttention(tree, device=device, dtype=parameter.dtype)
        hidden_NE = self._model.hidden(
            torch.from_numpy(tree.ids_N).long().to(device), torch.from_numpy(tree.positions_N).long().to(device), attend
        )
        predictors, targets, temperatures = [], [], []
        for sample, nodes_T in zip(samples, tree.sequences, strict=True):
            where = sample.positions_M
            if len(where) and where[0] == 0:
                raise TrainerError(f"rollout {sample.rollout_id}: the first token of a sample cannot be a sampled one")
            predictors.append(nodes_T[where - 1])
            targets.append(tree.ids_N[nodes_T[where]])
            temperatures.append(np.full(len(where), sample.temperature))
        unique_U, row_M = np.unique(np.concatenate(predictors), return_inverse=True)
        logits_UV = self._model.logits(hidden_NE.index_select(0, torch.from_numpy(unique_U).to(device)))
        # One temperature per row: samples that share a predicting node come from one run.
        heat_U = torch.ones(len(unique_U), dtype=logits_UV.dtype, device=device)
        rows = torch.from_numpy(row_M).to(device)
        heat_U[rows] = torch.from_numpy(np.concatenate(temperatures)).to(device, logits_UV.dtype)
        logits_UV = logits_UV / heat_U[:, None] if bool((heat_U != 1).any()) else logits_UV
        chosen_M = logits_UV[rows, torch.from_numpy(np.concatenate(targets)).long().to(device)]
        return chosen_M - torch.logsumexp(logits_UV, dim=-1)[rows], len(tree.ids_N)

    def _backward(self, batch: Sequence[WeightedSample], objective: Objective) -> dict[str, float]:
        """Adds the gradient of one micro-batch; returns sums over its trained tokens."""
        logprobs_M, num_nodes = self._trained_logprobs([item.sample for item in batch])

        def constant(parts: Sequence[FloatArray]) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(logprobs_M.device, logprobs_M.dtype)

        recorded_M = constant([item.sample.logprobs_M for item in batch])
        advantages_M = constant([item.advantages_M for item in batch])
        weights_M = constant([np.full(item.sample.num_trained, item.weight) for item in batch])
        result = token_loss(logprobs_M, recorded_M, advantages_M, objective)
        loss = (weights_M * result.loss_M).sum()
        loss.backward()
        with torch.no_grad():
            gap_M = (logprobs_M - recorded_M).abs()
            return {
                "loss": float(loss),
                "tokens": float(len(logprobs_M)),
                "unique": float(num_nodes),
                "total": float(sum(item.sample.num_tokens for item in batch)),
                "clipped": float(result.clipped_M.sum()),
                "surprisal": float(-recorded_M.sum()),
                "gap": float(gap_M.sum()),
                "gap_max": float(gap_M.max()),
            }


def _trainable(model: LanguageModel, frozen: Sequence[str]) -> list[torch.nn.Parameter]:
    names = [name for name, _ in model.module.named_parameters()]
    for part in frozen:
        if not any(part in name for name in names):
            raise TrainerError(f"train.frozen: no parameter's name contains {part!r}; names look like {names[0]!r}")
    chosen = []
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
        if parameter.requires_grad:
            chosen.append(parameter)
    if not chosen:
        raise TrainerError(f"train.frozen = {list(frozen)!r} leaves nothing to train")
    return chosen


def _metrics(totals: Mapping[str, float], norm: float, rate: float) -> Mapping[str, float]:
    tokens = max(totals["tokens"], 1.0)
    return {
        "loss": totals["loss"],
        "grad_norm": norm,
        "learning_rate": rate,
        "trained_tokens": totals["tokens"],
        "unique_tokens": totals["unique"],
        "total_tokens": totals["total"],
        "unique_ratio": totals["unique"] / totals["total"],
        "clip_fraction": totals["clipped"] / tokens,
        "entropy": totals["surprisal"] / tokens,
        "gap_mean": totals["gap"] / tokens,
        "gap_max": totals["gap_max"],
    }
