"""The train engine for one machine: AdamW over the weights of a torch model, or over adapters beside them (`lora`).

They are changed in place, so that an inference engine in the same process shares them (`publish` says so and copies
nothing). Where the weights are held in less than float32 the optimiser works on copies (`masters`). Micro-batches are
prefix trees (`packed`), and their gradients are sums, so that the loss is the same however a batch is divided.

Shape legend: M trained tokens of a micro-batch, U distinct positions that predict them, V vocabulary.
"""

import copy
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from manege.config import TrainConfig
from manege.engine.base import Weights
from manege.engine.threads import physical_cores
from manege.engine.weight_sender import WeightSender
from manege.errors import TrainerError
from manege.model.base import LanguageModel
from manege.model.folder import ModelFolder
from manege.model.load import export_folder, read_weights
from manege.trainer.algo.batching import micro_batches
from manege.trainer.algo.samples import Sample
from manege.trainer.engines.base import Capabilities, StepReport, WeightedSample
from manege.trainer.engines.lora import Adapters
from manege.trainer.engines.masters import Masters
from manege.trainer.engines.micro_loss import micro_loss
from manege.trainer.engines.packed import PackedSamples
from manege.trainer.engines.step_sums import StepSums
from manege.trainer.objective import Objective
from manege.types import FloatArray

__all__ = ["TorchEngine"]

_LOSSES = frozenset({"ppo", "cispo", "gspo"})
_STATE_FILE = "optimizer.pt"
_ADAPTER_FOLDER = "adapter"


class TorchEngine:
    """`TrainEngine` over a `LanguageModel` in this process."""

    def __init__(
        self,
        model: LanguageModel,
        folder: ModelFolder,
        config: TrainConfig,
        *,
        reference: bool = False,
        publish_folder: Path | None = None,
        sender: WeightSender | None = None,
    ) -> None:
        """`reference`: a KL term needs the model as it is now: a frozen copy is kept, unless only adapters are trained;
        `publish_folder`: where an engine outside this process reads new weights; `sender`: from which it fetches them;
        neither: it shares our memory."""
        self.capabilities = Capabilities(
            prefix_tree=True,
            max_sample_tokens=model.context_limit,
            losses=_LOSSES,
            reference=reference,
            publishes="transfer" if sender else "folder" if publish_folder else "shared",
        )
        self._model, self._folder, self._config = model, folder, config
        first = next(model.module.parameters())
        self._device, self._dtype = first.device, first.dtype
        # The copy comes first: what is put into the model below is no part of it.
        self._reference = _frozen(model) if reference and not config.lora_rank else None
        self._adapters = Adapters(model, config, base=folder.name) if config.lora_rank else None
        self._masters = Masters(self._adapters.parameters if self._adapters else _trainable(model, config.frozen))
        self._parameters = self._masters.parameters
        if config.gradient_checkpointing:
            model.checkpoint_layers()
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._num_steps = 0
        self._publish_folder, self._sender = publish_folder, sender

    def logprobs(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        """See TrainEngine."""
        results = [np.empty(0, np.float32)] * len(samples)
        with torch.no_grad():
            for batch in self._micro_batches(samples):
                packed = self._pack([samples[index] for index in batch])
                values = packed.logprobs(packed.logits(self._model)).float().cpu().numpy()
                ends = np.cumsum([samples[index].num_trained for index in batch])
                for index, part in zip(batch, np.split(values, ends[:-1]), strict=True):
                    results[index] = part
        return results

    def accumulate(self, batch: Sequence[WeightedSample], objective: Objective) -> StepSums:
        """Add the gradient of the loss to that of the parameters, without a step; what ranks or studies can add up."""
        sums = StepSums()
        for indices in self._micro_batches([item.sample for item in batch]):
            self._backward([batch[index] for index in indices], objective, sums)
        return sums

    def step(self, batch: Sequence[WeightedSample], objective: Objective) -> StepReport:
        """See TrainEngine."""
        # Per thread of the process; the inference engine, which is paused now, may have chosen fewer for itself.
        torch.set_num_threads(physical_cores())
        self._optimizer.zero_grad(set_to_none=True)
        sums = self.accumulate(batch, objective)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm))
        if not (math.isfinite(norm) and math.isfinite(sums.loss)):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainerError(
                f"loss {sums.loss} or gradient norm {norm} is not finite; weights are unchanged. "
                "Lower train.learning_rate or look for broken log-probabilities"
            )
        self._num_steps += 1
        rate = self._config.learning_rate * min(1.0, self._num_steps / (self._config.warmup_steps + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._masters.write_back()
        return sums.report(grad_norm=norm, learning_rate=rate)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """See TrainEngine. Holds a copy of what is trained and of the optimiser meanwhile."""
        kept = [parameter.detach().clone() for parameter in self._parameters]
        optimizer, num_steps = copy.deepcopy(self._optimizer.state_dict()), self._num_steps
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for parameter, old in zip(self._parameters, kept, strict=True):
                    parameter.copy_(old)
            self._masters.write_back()
            self._optimizer.load_state_dict(optimizer)
            self._num_steps = num_steps
            raise

    def publish(self) -> Weights:
        """See TrainEngine."""
        if self._sender is not None:
            return self._sender.publish(self._named_weights() or self._model.module.named_parameters())
        if self._publish_folder is None:
            return Weights(kind="shared")
        # Two names take turns, so that an engine that is slow to read never sees a folder half written.
        folder = self._publish_folder / str(self._num_steps % 2)
        self._export_weights(folder)
        return Weights(kind="folder", folder=str(folder))

    def save(self, folder: Path) -> None:
        """See TrainEngine; the caller gives a folder that is not visible as a checkpoint yet."""
        self.export(folder)
        state = {
            "num_parameters": self._num_parameters(),
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self._num_steps,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
        }
        if self._masters.are_copies:
            state["masters"] = [parameter.detach() for parameter in self._parameters]
        torch.save(state, folder / _STATE_FILE)

    def load(self, folder: Path) -> None:
        """See TrainEngine."""
        try:
            state = torch.load(folder / _STATE_FILE, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise TrainerError(f"{folder} is not a checkpoint of this engine: {error}") from error
        if state["num_parameters"] != self._num_parameters():
            raise TrainerError(
                f"checkpoint {folder} has {state['num_parameters']} parameters, the model {self._num_parameters()}; "
                "resume with the model it was made with"
            )
        if self._adapters:
            self._adapters.load(folder / _ADAPTER_FOLDER)
        else:
            read_weights(self._model, folder)
        self._masters.read(state.get("masters"))
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_steps = state["num_steps"]
        torch.set_rng_state(state["rng"])
        if self._device.type == "cuda" and state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self._device)

    def export(self, folder: Path) -> None:
        """See TrainEngine. Adapters are in the weights, and by themselves in a folder inside."""
        self._export_weights(folder)
        if self._adapters:
            self._adapters.save(folder / _ADAPTER_FOLDER)

    def _export_weights(self, folder: Path) -> None:
        export_folder(self._model, self._folder, folder, weights=self._named_weights())

    def _named_weights(self) -> Iterable[tuple[str, Tensor]] | None:
        """With the adapters in them; None: the model's own parameters."""
        return self._adapters.merged() if self._adapters else None

    def _pack(self, samples: Sequence[Sample]) -> PackedSamples:
        return PackedSamples(samples, share=self._config.prefix_tree, device=self._device, dtype=self._dtype)

    def _micro_batches(self, samples: Sequence[Sample]) -> Sequence[Sequence[int]]:
        sequences = (sample.ids_T for sample in samples)
        return micro_batches(sequences, self._config.micro_batch_tokens, share=self._config.prefix_tree)

    def _num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.module.parameters())

    def _backward(self, batch: Sequence[WeightedSample], objective: Objective, sums: StepSums) -> None:
        """Adds the gradient of one micro-batch."""
        samples = [item.sample for item in batch]
        packed = self._pack(samples)
        logits_UV = packed.logits(self._model)
        reference_M = self._reference_logprobs(packed) if objective.kl > 0 else None
        found = micro_loss(batch, packed.logprobs(logits_UV), objective, reference_M=reference_M)
        found.loss.backward()
        sums.add(samples, found, entropy_M=packed.entropy(logits_UV), num_nodes=packed.num_nodes)

    @torch.no_grad()
    def _reference_logprobs(self, packed: PackedSamples) -> Tensor:
        if not self.capabilities.reference:
            raise TrainerError("credit.kl > 0 needs the model that the run began with; this engine kept no copy of it")
        with self._adapters.off() if self._adapters else nullcontext():
            return packed.logprobs(packed.logits(self._reference or self._model))


def _frozen(model: LanguageModel) -> LanguageModel:
    copied = copy.deepcopy(model)
    copied.module.requires_grad_(False)
    return copied


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
